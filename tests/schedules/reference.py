"""What actions wait for, as a graph that shares nothing with the package: schedules run where it has no circle.

program order     each action behind the one before it on its rank
data              F(s, k) behind F(p, k) of each producer p;  gradient(s, k) behind gradient(c, k) of each consumer c
                  and behind F(s, k);  W(s, k) behind I(s, k);  latency on the edges that cross ranks

`Run` is a slow simulator: it looks at every rank before each step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx
from support.inside import RankProgram, Transfer

from stagewright.schedules import Action, AllReduce, Costs, Link, Links, Op, Schedule

GRADIENT = (Op.B, Op.I)
Node = tuple[int, Action]  # (rank, action): the same update stands on every replica of a stage


def seconds(costs: Costs, action: Action) -> float:
    """Seconds of one action, read straight from the costs (backward and split given alike)."""
    column = {
        Op.F: costs.forward,
        Op.B: costs.backward,
        Op.I: costs.input_grad,
        Op.W: costs.weight_grad,
        Op.U: costs.update,
    }[action.op]
    own = column[action.stage] if isinstance(column, tuple) else column
    found = own if isinstance(own, float) else own[action.index % len(own)]
    if costs.index_factors is None or action.op is Op.U:
        return found
    return found * costs.index_factors[action.index % len(costs.index_factors)]


def data_edges(schedule: Schedule) -> Iterator[tuple[Node, Node]]:
    """(maker, user) of every result that an action of the schedule needs."""
    home = {
        action: (rank, action)
        for rank, program in enumerate(schedule.programs)
        for action in program
        if action.op is not Op.U
    }
    for action, node in home.items():
        stage, op, k = action
        makers: list[Action] = []
        if op is Op.F:
            makers = [Action(edge.src, Op.F, k) for edge in schedule.stage_edges if edge.dst == stage]
        elif op in GRADIENT:
            users = [edge.dst for edge in schedule.stage_edges if edge.src == stage and edge.grad]
            makers = [Action(user, op, k) for user in users for op in GRADIENT]  # one of the two is there
            makers.append(Action(stage, Op.F, k))
        elif op is Op.W:
            makers = [Action(stage, Op.I, k)]
        for maker in makers:
            if maker in home:
                yield home[maker], node


def graph(schedule: Schedule) -> nx.DiGraph:
    dag = nx.DiGraph()
    for rank, program in enumerate(schedule.programs):
        nodes = [(rank, action) for action in program]
        dag.add_nodes_from(nodes)
        dag.add_edges_from(pairwise(nodes), kind="order")
    for maker, user in data_edges(schedule):
        if not dag.has_edge(maker, user):
            dag.add_edge(maker, user, kind="data")
    return dag


def has_deadlock(schedule: Schedule) -> bool:
    return not nx.is_directed_acyclic_graph(graph(schedule))


def together(schedule: Schedule, producer: int, consumer: int, *, grad: bool) -> list[int]:
    """The consumers of a stage that share a message with this one, or one back: those on the same ranks, ascending."""
    ranks = schedule.owners
    edges = [edge for edge in schedule.stage_edges if edge.src == producer and (edge.grad or not grad)]
    return sorted(edge.dst for edge in edges if ranks[edge.dst] == ranks[consumer])


def name_of_message(schedule: Schedule, maker: Action, user: Action) -> tuple[int, int]:
    """The stages that name what brings the result of one action to another: the first consumer stands for all."""
    if maker.op is Op.F:
        return maker.stage, together(schedule, maker.stage, user.stage, grad=False)[0]
    return together(schedule, user.stage, maker.stage, grad=True)[0], user.stage


def last_of(schedule: Schedule, rank: int, stages: list[int], k: int) -> int:
    """The one of these stages that makes its gradient of microbatch k last."""
    made = [a.stage for a in schedule.programs[rank] if a.op in GRADIENT and a.index == k and a.stage in stages]
    return made[-1]


def latency_between(schedule: Schedule, latency: tuple[float, ...], before: Node, node: Node) -> float:
    """A gradient leaves with those that are added to it, behind the last; all take the first consumer's latency."""
    (rank, (stage, op, k)), user = before, node[1].stage
    if op is Op.F:
        return latency[stage]
    stages = together(schedule, user, stage, grad=True)
    return latency[stages[0]] if last_of(schedule, rank, stages, k) == stage else 0.0


def peak_receives(program: RankProgram) -> int:
    """The most posted and unconsumed receives at once, over all links."""
    peak = count = 0
    for step in program.steps:
        if isinstance(step, Transfer):
            count += not step.is_send
        else:
            peak = max(peak, count)
            count -= len(program.inputs.get(step, ()))
    return peak


FREE = Links(network=Link(), activation_bytes=0.0, gradient_bytes=0.0)


@dataclass
class Run:
    """starts: by (rank, action). arrivals: by (kind, src, dst, microbatch), when ready and when there.
    sums: by (stage, update group), when ready and when through. busy: by link or card, what it carried."""

    schedule: Schedule
    costs: Costs
    links: Links = FREE
    starts: dict[tuple[int, Action], float] = field(default_factory=dict)
    arrivals: dict[tuple[str, int, int, int], tuple[float, float]] = field(default_factory=dict)
    sums: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    busy: dict[object, list[tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.programs = [list(program) for program in schedule.programs]
        self.free = [0.0] * schedule.num_ranks
        self.present = {a for program in schedule.programs for a in program}
        self.group = schedule.total_indices if schedule.has_epilogue else schedule.group_size
        while any(self.programs):
            ends = {rank: self.end(rank) for rank, program in enumerate(self.programs) if program}
            end, rank = min((end, rank) for rank, end in ends.items() if end is not None)
            action = self.programs[rank].pop(0)
            self.starts[rank, action] = end - seconds(self.costs, action)
            self.free[rank] = end
            self.send(rank, action, end)

    def end(self, rank: int) -> float | None:
        """When the next action of a rank would end; None: not known yet."""
        stage, op, k = action = self.programs[rank][0]
        start = self.free[rank]
        for src, dst, grad in self.schedule.stage_edges:
            key = None
            if op is Op.F and dst == stage:
                key, maker = ("act", src, together(self.schedule, src, dst, grad=False)[0], k), src
            elif op in GRADIENT and src == stage and grad:
                key, maker = ("grad", together(self.schedule, src, dst, grad=True)[0], src, k), dst
            if key is None or self.home(maker, k) == rank:
                continue
            if key not in self.arrivals:
                return None
            start = max(start, self.arrivals[key][1])
        if op is Op.U and any(each.stage == stage for each in self.links.sums):
            if (stage, k) not in self.sums:
                return None
            start = max(start, self.sums[stage, k][1])
        return start + seconds(self.costs, action)

    def home(self, stage: int, k: int) -> int:
        ranks = self.schedule.owners[stage]
        return ranks[k % self.schedule.num_microbatches % len(ranks)]

    def send(self, rank: int, action: Action, now: float) -> None:
        stage, op, k = action
        edges = [(src, dst) for src, dst, _ in self.schedule.stage_edges]
        activation, gradient = (
            dict(zip(edges, sizes if isinstance(sizes, tuple) else [sizes] * len(edges), strict=True))
            for sizes in (self.links.activation_bytes, self.links.gradient_bytes)
        )
        for src, dst, grad in self.schedule.stage_edges:
            if op is Op.F and src == stage:
                users = together(self.schedule, src, dst, grad=False)
                if dst == users[0]:
                    size = max(activation[src, user] for user in users)
                    self.message(("act", src, dst, k), rank, self.home(dst, k), size, now)
            elif op in GRADIENT and dst == stage and grad:
                makers = together(self.schedule, src, dst, grad=True)
                if last_of(self.schedule, rank, makers, k) == stage:
                    size = max(gradient[src, maker] for maker in makers)
                    self.message(("grad", makers[0], src, k), rank, self.home(src, k), size, now)
        for each in self.links.sums:
            left = [(s, o, i) for program in self.programs for s, o, i in program if o in (Op.B, Op.W)]
            mine = [i // self.group for s, o, i in left if s == stage]
            if each.stage == stage and op in (Op.B, Op.W) and k // self.group not in mine:
                self.sums[stage, k // self.group] = (now, self.sum(each, now))

    def message(self, key: tuple[str, int, int, int], src: int, dst: int, size: float, now: float) -> None:
        if src == dst:
            return
        way = self.way(src, dst)
        latency = self.costs.latency[key[1]] if isinstance(self.costs.latency, tuple) else self.costs.latency
        through = self.occupy(self.parts(src, dst), now, size * way.seconds_per_byte)
        self.arrivals[key] = (now, through + way.latency + latency)

    def sum(self, each: AllReduce, now: float) -> float:
        return self.occupy({part for src, dst in each.ways for part in self.parts(src, dst)}, now, each.seconds)

    def way(self, src: int, dst: int) -> Link:
        network = self.links.network
        return network[src, dst] if isinstance(network, dict) else network

    def parts(self, src: int, dst: int) -> set[object]:
        way = self.way(src, dst)
        cards = {("out", way.sending), ("in", way.receiving)}
        return {(src, dst)} | {card for card in cards if card[1] is not None}

    def occupy(self, parts: set[object], now: float, length: float) -> float:
        start = max([now, *(self.busy[part][-1][1] for part in parts if part in self.busy)])
        for part in parts:
            self.busy.setdefault(part, []).append((start, start + length))
        return start + length

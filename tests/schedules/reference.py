"""What actions wait for, as a graph that shares nothing with the package: schedules run where it has no circle.

program order     each action behind the one before it on its rank
data              F(s, k) behind F(p, k) of each producer p;  gradient(s, k) behind gradient(c, k) of each consumer c
                  and behind F(s, k);  W(s, k) behind I(s, k);  latency on the edges that cross ranks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import networkx as nx
from support.inside import Lowered, RankProgram, Transfer

from stagewright.schedules import Action, Costs, Message, Op, Schedule

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


def delivered(lowered: Lowered) -> dict[tuple[int, int], list[Message]]:
    """Run all ranks, each as far as it gets, over links that match by order alone: the n-th receive that is posted gets
    the n-th message that was sent; by link, what arrived."""
    links: dict[tuple[int, int], deque[Message]] = {}
    posted: dict[tuple[int, int], deque[Message]] = {}
    seen: dict[tuple[int, int], list[Message]] = {}
    here: list[set[Message]] = [set() for _ in lowered.programs]
    position = [0] * len(lowered.programs)
    moved = True
    while moved:
        moved = False
        for program in lowered.programs:
            rank = program.rank
            while position[rank] < len(program.steps):
                step = program.steps[position[rank]]
                if not isinstance(step, Transfer):
                    if not set(program.inputs.get(step, ())) <= here[rank]:
                        break
                else:
                    link = (rank, step.peer) if step.is_send else (step.peer, rank)
                    (links if step.is_send else posted).setdefault(link, deque()).append(step.message)
                    while links.get(link) and posted.get(link):
                        message = links[link].popleft()
                        assert message == posted[link].popleft()
                        seen.setdefault(link, []).append(message)
                        here[link[1]].add(message)
                position[rank] += 1
                moved = True
    assert position == [len(program.steps) for program in lowered.programs]
    assert not any(links.values())
    assert not any(posted.values())
    return seen


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

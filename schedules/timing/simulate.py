"""The simulator: runs a schedule on given costs and links, and returns when everything happens.

Event-driven: the only events are the ends of actions. When an action ends at time t on rank r, its messages
leave (arriving latency later; with links, when those have carried them), whoever stands blocked on them starts, and r
starts its next action as soon as its inputs have arrived. A rank runs its program in order, so an action's start is the
maximum of when its lane became free and when its last input arrived. Events come in the order of time, of equal ones
the lowest rank's first: so links serve whatever is ready first.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from operator import attrgetter

from ..ir import LAST_USES, Action, Op, Schedule, ScheduleError
from ..messages import Message, MessageKind
from ..needs import Needs, Wire
from .costs import Costs, CostTable
from .links import Links, Route, Sum, Traffic, wire_bytes
from .timeline import RankTrace, Span, Timeline

_OPS = (Op.F, Op.B, Op.I, Op.W, Op.U)
_NOT_YET = -1.0
# Slot base; by microbatch, the latency, and the route where there are links.
_Output = tuple[int, list[float], list[Route | None] | None]


def simulate(schedule: Schedule, costs: Costs, links: Links | None = None) -> Timeline:
    """When each action of `schedule` runs under `costs`.

    With `costs.update`, `costs.norm` or sums in `links`, a flush schedule ends with each rank's optimizer steps (its
    epilogue): behind the rank's own last backward and the sums of the stage's gradients, or with `costs.norm` when all
    ranks and sums are through and the global norm is known.

    Arguments:
        costs: of one stage action each [s].
        links: what carries the messages, and sums of gradients; None: messages take the latency in `costs` and never
            queue. A latency in `costs` comes on top of that of links.

    Raises ValueError for costs that do not fit the stages and links that do not fit the schedule, ScheduleError for a
    schedule in which a rank waits for ever. It takes the schedule for complete and each program for sound in itself:
    `check` proves that, and says why where it is not. O(actions * log P).
    """
    if not isinstance(links, Links | None):
        raise ValueError(f"links={links!r:.60}: expected Links(...), or None for messages that take the costs' latency")
    return _Simulation(schedule, costs.table(num_stages=schedule.num_stages), links).run()


def ideal_makespan(schedule: Schedule, costs: Costs) -> float:
    """The largest own work of any rank [s]: what a rank without any idle time would take."""
    table = costs.table(num_stages=schedule.num_stages)
    return max(sum(table.of(a.op, a.stage) for a in program) for program in schedule.programs)


class _GroupSum:
    """The sum of one stage's gradients: when each update group is ready, and when it is through.

    Slot of update group g and the owner in place q of R: base + g * R + q, where that owner's update looks.
    """

    def __init__(self, schedule: Schedule, each: Sum, route: Route, *, base: int) -> None:
        self.route, self.base, self.ways = route, base, each.ways
        self.num_owners = len(schedule.owners[each.stage])
        self.group_size = schedule.total_microbatches if schedule.has_epilogue else schedule.group_size
        self.lacking = Counter(
            index // self.group_size
            for rank in set(schedule.owners[each.stage])
            for stage, op, index in schedule.programs[rank]
            if stage == each.stage and op in LAST_USES
        )
        self.spans: dict[int, tuple[float, float]] = {}  # group -> (ready, through)

    def count(self, index: int, now: float, arrived: list[float], blocked: dict[int, int]) -> list[int]:
        """A backward of microbatch `index` has ended; returns the ranks that stood blocked on its group, if it was the
        last."""
        group = index // self.group_size
        self.lacking[group] -= 1
        if self.lacking[group]:
            return []
        self.spans[group] = (now, self.route.carry(now))
        slots = range(self.base + group * self.num_owners, self.base + (group + 1) * self.num_owners)
        for slot in slots:
            arrived[slot] = self.spans[group][1]
        return [blocked.pop(slot) for slot in slots if slot in blocked]


class _Simulation:
    """Dense arrays for one run: an action is (code, index) with code = op * S + stage; an input is a slot.

    Slot of wire number w, microbatch k: w * N + k. It holds the arrival time. Those of sums come after.
    """

    def __init__(self, schedule: Schedule, table: CostTable, links: Links | None) -> None:
        self.schedule, self.table, self.links = schedule, table, links
        self.num_stages = schedule.num_stages
        self.num_slots = schedule.total_microbatches
        self.durations = [table.column(op)[s] for op in _OPS for s in range(self.num_stages)]
        count = len(self.durations)
        self.inputs: list[list[int]] = [[] for _ in range(count)]  # code -> slot bases
        self.outputs: list[list[_Output]] = [[] for _ in range(count)]  # by code
        self.sums: dict[int, _GroupSum] = {}  # by stage
        self.wires = Needs(schedule).wires
        self.traffic = None if links is None else Traffic(links)
        self.end_of_slots = len(self.wires) * self.num_slots
        self._wire()
        self._find_sums()
        self.arrived = [_NOT_YET] * self.end_of_slots

    def _code(self, op: Op, stage: int) -> int:
        return _OPS.index(op) * self.num_stages + stage

    def _wire(self) -> None:
        """Give each wire that crosses ranks its slots. One within a rank needs none: program order suffices."""
        owners = self.schedule.owners
        sizes = {} if self.links is None else wire_bytes(self.schedule, self.links)
        for number, wire in enumerate(self.wires):
            if owners[wire.src] == owners[wire.dst]:
                continue
            base = number * self.num_slots
            routes = None if self.traffic is None else self._routes(wire, sizes[wire], self.traffic)
            for op in wire.ops:
                self.inputs[self._code(op, wire.dst)].append(base)
                self.outputs[self._code(op, wire.src)].append((base, self._delays(wire), routes))

    def _delays(self, wire: Wire) -> list[float]:
        """Latency per microbatch from stage to stage: none where replicas of both stand on one rank."""
        latency, owner = self.table.latency[wire.src], self.schedule.owner
        if not set(self.schedule.owners[wire.src]) & set(self.schedule.owners[wire.dst]):
            return [latency] * self.num_slots
        return [0.0 if owner(wire.src, k) == owner(wire.dst, k) else latency for k in range(self.num_slots)]

    def _routes(self, wire: Wire, num_bytes: float, traffic: Traffic) -> list[Route | None]:
        """Route per microbatch from stage to stage: None where replicas of both stand on one rank."""
        owner, latency = self.schedule.owner, self.table.latency[wire.src]
        between: dict[tuple[int, int], Route | None] = {}
        pairs = [(owner(wire.src, k), owner(wire.dst, k)) for k in range(self.num_slots)]
        for src, dst in pairs:
            if (src, dst) not in between:
                here = src == dst
                between[src, dst] = None if here else traffic.message(src, dst, num_bytes=num_bytes, latency=latency)
        return [between[pair] for pair in pairs]

    def _find_sums(self) -> None:
        schedule = self.schedule
        if self.links is None or self.traffic is None or not schedule.has_backward:
            return
        for each in self.links.sums:
            if not 0 <= each.stage < self.num_stages:
                raise ValueError(f"a sum of stage {each.stage}: expected a stage from 0 to {self.num_stages - 1}")
            self.sums[each.stage] = _GroupSum(schedule, each, self.traffic.sum(each), base=self.end_of_slots)
            groups = max(1, schedule.num_batches * schedule.groups_per_batch)
            self.inputs[self._code(Op.U, each.stage)].append(self.end_of_slots)
            self.end_of_slots += groups * len(schedule.owners[each.stage])

    def run(self) -> Timeline:
        programs = self._encode()
        starts = self._play(programs)
        ranks = []
        for rank, program in enumerate(self.schedule.programs):
            durations = self.durations
            codes = programs[rank][0]
            compute = [
                Span(action, start, start + durations[code])
                for action, start, code in zip(program, starts[rank], codes, strict=True)
            ]
            ranks.append(RankTrace(compute=tuple(compute)))
        if self.schedule.has_epilogue:
            ranks = self._with_epilogue(ranks)
        if self.links is not None or any(self.table.latency):
            ranks = [
                RankTrace(compute=trace.compute, comm=comm)
                for trace, comm in zip(ranks, self._messages(ranks), strict=True)
            ]
        return Timeline(schedule=self.schedule, ranks=tuple(ranks))

    def _encode(self) -> list[tuple[list[int], list[int]]]:
        """Programs as (codes, indices)."""
        code_of = {(op.value, s): i * self.num_stages + s for i, op in enumerate(_OPS) for s in range(self.num_stages)}
        encoded = []
        for rank, program in enumerate(self.schedule.programs):
            try:
                encoded.append(([code_of[op, stage] for stage, op, _ in program], [k for _, _, k in program]))
            except KeyError as error:
                op, stage = error.args[0]
                raise ScheduleError(
                    f"rank {rank} runs {op} of stage {stage}, which has no cost: expected F B I W U of the stages "
                    f"0..{self.num_stages - 1}"
                ) from None
            if self.sums:
                self._encode_updates(rank, program, encoded[rank][1])
        return encoded

    def _encode_updates(self, rank: int, program: tuple[Action, ...], indices: list[int]) -> None:
        """Updates that wait for a sum look at the slot of their own rank."""
        for at, (stage, op, group) in enumerate(program):
            if op is Op.U and stage in self.sums:
                owners = self.schedule.owners[stage]
                indices[at] = group * len(owners) + owners.index(rank)

    def _play(self, programs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """The event loop; returns the start times in program order."""
        arrived = self.arrived
        starts: list[list[float]] = [[] for _ in programs]
        position = [0] * len(programs)
        free_at = [0.0] * len(programs)
        blocked: dict[int, int] = {}  # slot -> the rank that stands before it
        events: list[tuple[float, int]] = []  # (end of the running action, rank)
        inputs, outputs, durations = self.inputs, self.outputs, self.durations
        sum_behind = {self._code(op, stage): each for stage, each in self.sums.items() for op in LAST_USES}
        ready = list(range(len(programs)))
        while True:
            for rank in ready:
                codes, indices = programs[rank]
                at = position[rank]
                if at == len(codes):
                    continue
                code, k = codes[at], indices[at]
                start = free_at[rank]
                for base in inputs[code]:
                    arrival = arrived[base + k]
                    if arrival == _NOT_YET:
                        blocked[base + k] = rank
                        break
                    if arrival > start:
                        start = arrival
                else:
                    starts[rank].append(start)
                    heappush(events, (start + durations[code], rank))
            if not events:
                break
            now, rank = heappop(events)
            codes, indices = programs[rank]
            at = position[rank]
            code, k = codes[at], indices[at]
            position[rank] = at + 1
            free_at[rank] = now
            ready = [rank]
            for base, delays, routes in outputs[code]:
                if routes is None or (route := routes[k]) is None:
                    arrived[base + k] = now + delays[k]
                else:
                    arrived[base + k] = route.carry(now)
                waiter = blocked.pop(base + k, None)
                if waiter is not None:
                    ready.append(waiter)
            ready += sum_behind[code].count(k, now, arrived, blocked) if code in sum_behind else ()
        self._check_through(position)
        return starts

    def _check_through(self, position: list[int]) -> None:
        for rank, program in enumerate(self.schedule.programs):
            if position[rank] < len(program):
                raise ScheduleError(
                    f"rank {rank} never gets what {program[position[rank]]} needs: "
                    f"the schedule deadlocks; check(schedule) prints the cycle"
                )

    def _with_epilogue(self, ranks: list[RankTrace]) -> list[RankTrace]:
        """The optimizer steps of a flush schedule, stage by stage, each behind the sum of its gradients."""
        ends = [trace.compute[-1].end if trace.compute else 0.0 for trace in ranks]
        summed = {stage: each.spans[0][1] for stage, each in self.sums.items()}
        if self.table.norm is not None:
            ends = [max([*ends, *summed.values()]) + self.table.norm] * len(ranks)
        extended = []
        for rank, trace in enumerate(ranks):
            spans = list(trace.compute)
            end = ends[rank]
            for stage in self.schedule.placement[rank]:
                update = self.table.update[stage]
                if update > 0 or self.table.norm or stage in summed:
                    start = max(end, summed.get(stage, 0.0))
                    end = start + update
                    spans.append(Span(Action(stage, Op.U, 0), start, end))
            extended.append(RankTrace(compute=tuple(spans)))
        return extended

    def _messages(self, ranks: list[RankTrace]) -> list[tuple[Span[Message], ...]]:
        """The comm lane of each receiver: each message (or its part of a sum) from when it was ready to its arrival."""
        comm: list[list[Span[Message]]] = [[] for _ in ranks]
        owner = self.schedule.owner
        outgoing: dict[tuple[Op, int], list[tuple[int, Wire]]] = {}
        for number, wire in enumerate(self.wires):
            for op in wire.ops:
                outgoing.setdefault((op, wire.src), []).append((number * self.num_slots, wire))
        for rank, trace in enumerate(ranks):
            for (stage, op, k), _, end in trace.compute:
                for base, (kind, src, dst) in outgoing.get((op, stage), ()):
                    receiver = owner(dst, k)
                    if receiver != rank:
                        comm[receiver].append(Span(Message(kind, src, dst, k), end, self.arrived[base + k]))
        for each in self.sums.values():
            for group, (made, through) in each.spans.items():
                for src, dst in each.ways:
                    if dst < len(comm):
                        comm[dst].append(Span(Message(MessageKind.SUM, src, dst, group), made, through))
        return [tuple(sorted(spans, key=attrgetter("start"))) for spans in comm]

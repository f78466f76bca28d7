"""The simulator: runs a schedule on given costs and returns when everything happens.

Event-driven: the only events are the ends of actions. When an action ends at time t on rank r, its messages
leave (arriving at t + latency), whoever stands blocked on them starts, and r starts its next action as
soon as its inputs have arrived. A rank runs its program in order, so an action's start is the maximum of when its
lane became free and when its last input arrived.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ..ir import BACKWARD_OPS, Action, Op, Schedule, ScheduleError
from ..messages import Message, MessageKind
from .costs import Costs, CostTable
from .timeline import RankTrace, Span, Timeline

_OPS = (Op.F, Op.B, Op.I, Op.W, Op.U)
_NOT_YET = -1.0


def simulate(schedule: Schedule, costs: Costs, links: None = None) -> Timeline:
    """When each action of `schedule` runs under `costs`.

    With `costs.update` above 0, a flush schedule ends with each rank's optimizer steps (its epilogue): right behind the
    rank's own last backward, or with `costs.norm` when all ranks are through and the global norm is known.

    Arguments:
        costs: of one stage action each [s].
        links: reserved for sizes and bandwidths, which come with the partitioner; latency stands in `costs`.

    Raises ValueError for costs that do not fit the stages, ScheduleError for a schedule in which a rank waits for ever.
    It takes the schedule for complete and each program for sound in itself: `check` proves that, and says why
    where it is not. O(actions * log P).
    """
    if links is not None:
        raise ValueError(f"links={links!r}: expected None; give the latency of messages as Costs(latency=...)")
    return _Simulation(schedule, costs.table(num_stages=schedule.num_stages)).run()


def ideal_makespan(schedule: Schedule, costs: Costs) -> float:
    """The largest own work of any rank [s]: what a rank without any idle time would take."""
    table = costs.table(num_stages=schedule.num_stages)
    return max(sum(table.of(a.op, a.stage) for a in program) for program in schedule.programs)


class _Simulation:
    """Dense arrays for one run: an action is (code, index) with code = op * S + stage; an input is a slot.

    Slot of edge e, direction d (0 forward, 1 backward), microbatch k: (2e + d) * N + k. It holds the arrival time.
    """

    def __init__(self, schedule: Schedule, table: CostTable) -> None:
        self.schedule = schedule
        self.table = table
        self.num_stages = schedule.num_stages
        self.num_slots = schedule.total_microbatches
        self.durations = [table.column(op)[s] for op in _OPS for s in range(self.num_stages)]
        count = len(self.durations)
        self.inputs: list[list[int]] = [[] for _ in range(count)]  # code -> slot bases
        self.outputs: list[list[tuple[int, list[float]]]] = [[] for _ in range(count)]  # code -> (slot base, delays)
        self._wire()

    def _wire(self) -> None:
        """Give each edge that crosses ranks its slots. An edge within a rank needs none: program order suffices."""
        owners = self.schedule.owners
        forward, input_grad, backward = (_OPS.index(op) * self.num_stages for op in (Op.F, Op.I, Op.B))
        for number, edge in enumerate(self.schedule.stage_edges):
            if owners[edge.src] == owners[edge.dst]:
                continue
            there, back = self._delays(edge.src, edge.dst), self._delays(edge.dst, edge.src)
            base = 2 * number * self.num_slots
            self.inputs[forward + edge.dst].append(base)
            self.outputs[forward + edge.src].append((base, there))
            if edge.grad:
                base += self.num_slots
                for op in (backward, input_grad):
                    self.inputs[op + edge.src].append(base)
                    self.outputs[op + edge.dst].append((base, back))

    def _delays(self, src: int, dst: int) -> list[float]:
        """By microbatch, the latency from stage to stage: none where replicas of both stand on one rank."""
        latency, owner = self.table.latency[src], self.schedule.owner
        if not set(self.schedule.owners[src]) & set(self.schedule.owners[dst]):
            return [latency] * self.num_slots
        return [0.0 if owner(src, k) == owner(dst, k) else latency for k in range(self.num_slots)]

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
        if any(self.table.latency):
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
        return encoded

    def _play(self, programs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """The event loop; returns the start times in program order."""
        arrived = [_NOT_YET] * (2 * len(self.schedule.stage_edges) * self.num_slots)
        starts: list[list[float]] = [[] for _ in programs]
        position = [0] * len(programs)
        free_at = [0.0] * len(programs)
        blocked: dict[int, int] = {}  # slot -> the rank that stands before it
        events: list[tuple[float, int]] = []  # (end of the running action, rank)
        inputs, outputs, durations = self.inputs, self.outputs, self.durations
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
            for base, delays in outputs[code]:
                arrived[base + k] = now + delays[k]
                waiter = blocked.pop(base + k, None)
                if waiter is not None:
                    ready.append(waiter)
        for rank, (codes, _) in enumerate(programs):
            if position[rank] < len(codes):
                raise ScheduleError(
                    f"rank {rank} never gets what {self.schedule.programs[rank][position[rank]]} needs: "
                    f"the schedule deadlocks; check(schedule) prints the cycle"
                )
        return starts

    def _with_epilogue(self, ranks: list[RankTrace]) -> list[RankTrace]:
        """The optimizer steps of a flush schedule, stage by stage."""
        ends = [trace.compute[-1].end if trace.compute else 0.0 for trace in ranks]
        if self.table.norm is not None:
            ends = [max(ends) + self.table.norm] * len(ranks)
        extended = []
        for rank, trace in enumerate(ranks):
            spans = list(trace.compute)
            end = ends[rank]
            for stage in self.schedule.placement[rank]:
                if self.table.update[stage] > 0:
                    spans.append(Span(Action(stage, Op.U, 0), end, end + self.table.update[stage]))
                    end = spans[-1].end
            extended.append(RankTrace(compute=tuple(spans)))
        return extended

    def _messages(self, ranks: list[RankTrace]) -> list[tuple[Span, ...]]:
        """The comm lane of each receiver: each message from the end of its maker to its arrival."""
        comm: list[list[Span]] = [[] for _ in ranks]
        owner, edges, latency = self.schedule.owner, self.schedule.stage_edges, self.table.latency
        outgoing = [[e.dst for e in edges if e.src == s] for s in range(self.num_stages)]
        incoming = [[e.src for e in edges if e.dst == s and e.grad] for s in range(self.num_stages)]
        for rank, trace in enumerate(ranks):
            for action, _, end in trace.compute:
                assert isinstance(action, Action)
                stage, op, k = action
                if op is Op.F:
                    kind, peers = MessageKind.ACT, outgoing[stage]
                elif op in BACKWARD_OPS:
                    kind, peers = MessageKind.GRAD, incoming[stage]
                else:
                    continue
                for peer in peers:
                    receiver = owner(peer, k)
                    if receiver != rank:
                        comm[receiver].append(Span(Message(kind, stage, peer, k), end, end + latency[stage]))
        return [tuple(sorted(spans, key=lambda span: span.start)) for spans in comm]

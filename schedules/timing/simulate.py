"""The simulator: runs a schedule on given costs and links, and returns when everything happens.

Event-driven: the only events are the ends of actions. When an action ends at time t on rank r, its messages
leave (arriving latency later; with links, when those have carried them), whoever stands blocked on them starts, and r
starts its next action as soon as its inputs have arrived. A rank runs its program in order, so an action's start is the
maximum of when its lane became free and when its last input arrived. Events come in the order of time, of equal ones
the lowest rank's first: so links serve whatever is ready first. An action that runs beside a sum which keeps its rank
busy ends later (`links`): where such a sum began meanwhile, the event is put off.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from ..ir import COMPUTE_OPS, MOVE_OPS, Action, Collective, Op, Schedule, ScheduleError
from ..messages import Message
from .costs import Costs, CostTable
from .links import Links, Processor, Route, Taken
from .timeline import RankTrace, Span, Timeline
from .wiring import OPS, Meeting, Output, ScheduleWiring

_NOT_YET = -1.0


# An `Output` with its times: its base and last, and by microbatch the latency, or the route where there are links.
_Sending = tuple[int, tuple[int, ...] | None, list[float], list[Route | None] | None]


def simulate(schedule: Schedule, costs: Costs, links: Links | None = None) -> Timeline:
    """When each action of `schedule` runs under `costs`.

    With `costs.update`, `costs.norm` or sums in `links`, a flush schedule ends with each rank's optimizer steps (its
    epilogue): behind the rank's own last backward and the sums of the stage's gradients, or with `costs.norm` when all
    ranks and sums are through and the global norm is known. Where ranks update parts of weights, it ends when these are
    gathered.

    Arguments:
        costs: of one stage action each [s].
        links: what carries the messages, and sums of gradients; None: messages take the latency in `costs` and never
            queue. A latency in `costs` comes on top of that of links. A stage of which links have no sum takes
            `costs.reduce_grad` for one, if it has replicas; those of tied weights are in `costs` alone.

    Raises ValueError for costs that do not fit the stages and links that do not fit the schedule, ScheduleError for a
    schedule in which a rank waits for ever. It takes the schedule for complete and each program for sound in itself:
    `check` proves that, and says why where it is not. O(actions * log P).
    """
    if not isinstance(links, Links | None):
        raise ValueError(f"links={links!r:.60}: expected Links(...), or None for messages that take the costs' latency")
    table = costs.table_for(schedule)
    return run_once(ScheduleWiring(schedule, table, links), table)


# Ratios for what goes on beside actions: so many of "messages", or of "sums"; none where they do not vary.
Beside = Callable[[str, int], Sequence[float]]


def run_once(
    wiring: ScheduleWiring, table: CostTable, *, messages: bool = True, beside: Beside | None = None
) -> Timeline:
    """The timeline of a schedule that is wired already; the table may have other seconds than it was wired with, not
    other sums and moves."""
    return _Simulation(wiring, table, beside).run(messages=messages)


def busy_seconds(schedule: Schedule, costs: Costs) -> float:
    """Seconds of F, B, I and W of all ranks together, a batch."""
    table = costs.table_for(schedule)
    own = sum(table.of(op, s, k) for program in schedule.programs for s, op, k in program if op in COMPUTE_OPS)
    return own / schedule.num_batches


def ideal_makespan(schedule: Schedule, costs: Costs) -> float:
    """The largest own work of any rank [s]: what a rank without any idle time would take."""
    table = costs.table_for(schedule)
    return max(sum(table.of(op, stage, k) for stage, op, k in program) for program in schedule.compute_programs)


class _MeetingTimes:
    """Times of a `Meeting`: when ranks begin it, and when it is through, by update group or microbatch; it takes a
    share of its ranks' processors."""

    def __init__(self, meeting: Meeting, route: Route, share: float, processors: Sequence[Processor]) -> None:
        self.meeting, self.route, self.share = meeting, route, share
        self.processors = [processors[rank] for rank in meeting.ranks] if processors else ()
        self.begun: dict[int, dict[int, float]] = {}  # by rank, when it began [s]
        self.through: dict[int, float] = {}  # when all ranks have it [s]

    def begin(self, group: int, rank: int, now: float, arrived: list[float]) -> Sequence[int]:
        """A rank begins that of a group; returns the slots that it fills, if it was the last to begin."""
        begun = self.begun.setdefault(group, {})
        begun[rank] = now
        if len(begun) < len(self.meeting.ranks):
            return ()
        if self.meeting.after is not None:
            now = max(now, arrived[self.meeting.after + group])
        start = self.route.free_from(now) if self.share > 0 else now
        self.through[group] = through = self.route.carry(now)
        if self.share > 0:
            for each in self.processors:
                each.take(Taken(start, through, self.share))
        slots = self.meeting.fills.get(group, ())
        for slot in slots:
            arrived[slot] = through
        return slots


class _Simulation:
    def __init__(self, wiring: ScheduleWiring, table: CostTable, beside: Beside | None) -> None:
        self.beside = beside
        self.wiring, self.schedule, self.table = wiring, wiring.schedule, table
        schedule, links = self.schedule, wiring.links
        self.has_messages = links is not None or any(table.latency)
        rows = [table.row(op, s) for op in OPS for s in range(schedule.num_stages)]
        # By code and index: [S * 5][M].
        self.durations = [row * (wiring.num_indices // len(row)) for row in rows]
        free_at = [0.0] * wiring.num_channels
        self.delays = [table.latency[each.stage] for each in wiring.passages]
        routes = [
            Route(
                each.num_bytes * each.way.seconds_per_byte,
                delay + each.way.latency,
                each.channels,
                free_at,
                each.way.blocks,
            )
            for each, delay in zip(wiring.passages, self.delays, strict=True)
        ]
        self.routes = None if links is None else routes
        self.processors = [Processor() for _ in wiring.programs] if any(table.sum_busy) else []
        number = len(wiring.meetings)
        of_sums = (beside and beside("sums", number)) or [1.0] * number
        self.meetings = [
            _MeetingTimes(
                each,
                Route(each.seconds * times, 0.0, each.channels, free_at),
                0.0 if each.op in MOVE_OPS else max(table.sum_busy[stage] for stage in each.stages),
                self.processors,
            )
            for each, times in zip(wiring.meetings, of_sums, strict=True)
        ]
        # By pair of ranks: when each receive was posted that no message has taken, what waits for one, and the last.
        self.posted = defaultdict[tuple[int, int], deque[float]](deque)
        self.held = defaultdict[tuple[int, int], deque[tuple[Route, int]]](deque)
        self.last = defaultdict[tuple[int, int], float](float)
        for pair in (pair for own in wiring.posts for pair in own.get(0, ())):
            self.posted[pair].append(-math.inf)
        self.arrived = [_NOT_YET] * wiring.num_slots
        self.free_at = [0.0] * len(wiring.programs)  # when a rank may compute on [s]
        for slot in wiring.filled:
            self.arrived[slot] = 0.0
        for rank, own in enumerate(wiring.begins):  # all-reduces of gradients of which a rank makes none
            self._begin(own.get(0, ()), rank, 0.0)

    def run(self, *, messages: bool) -> Timeline:
        computes = [
            list(map(Span, program, *times)) for program, times in zip(self.wiring.actions, self._play(), strict=True)
        ]
        comm = self._messages(computes) if messages and self.has_messages else [()] * len(computes)
        if self.schedule.has_epilogue:
            self._add_epilogue(computes)
        lanes = zip(computes, comm, *self._beside_compute(computes), strict=True)
        ranks = (
            RankTrace(compute=tuple(c), comm=m, collectives=together, moves=moves) for c, m, together, moves in lanes
        )
        return Timeline(schedule=self.schedule, around=self.table.around, ranks=tuple(ranks))

    def _sending(self, output: Output) -> _Sending:
        delays = [0.0 if p is None else self.delays[p] for p in output.passages]
        routes = None if self.routes is None else [None if p is None else self.routes[p] for p in output.passages]
        if self.beside is not None and (times := self.beside("messages", len(delays))):
            delays = [delay * each for delay, each in zip(delays, times, strict=True)]
            if routes is not None:
                routes = [route and route.slower(each) for route, each in zip(routes, times, strict=True)]
        return output.base, output.last, delays, routes

    def _play(self) -> list[tuple[list[float], list[float]]]:
        """The event loop; returns by rank when its actions start and end, in program order."""
        programs, inputs, begins = self.wiring.programs, self.wiring.inputs, self.wiring.begins
        arrived, durations, shared = self.arrived, self.durations, bool(self.processors)
        outputs = [[self._sending(each) for each in outputs] for outputs in self.wiring.outputs]
        starts: list[list[float]] = [[] for _ in programs]
        ends: list[list[float]] = [[] for _ in programs]
        position = [0] * len(programs)
        free_at = self.free_at
        blocked: dict[int, list[int]] = {}  # slot -> the ranks that stand before it
        events: list[tuple[float, int]] = []  # (end of the running action, rank)
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
                        blocked.setdefault(base + k, []).append(rank)
                        break
                    if arrival > start:
                        start = arrival
                else:
                    starts[rank].append(start)
                    heappush(events, (start + durations[code][k], rank))
            if not events:
                break
            now, rank = heappop(events)
            codes, indices = programs[rank]
            at = position[rank]
            code, k = codes[at], indices[at]
            if shared and self._is_put_off(events, now, rank, starts[rank][at], durations[code][k]):
                ready = []
                continue
            position[rank] = at + 1
            free_at[rank] = now
            ends[rank].append(now)
            ready = [rank]
            filled = self._finish(outputs[code], code, k, rank)
            if at + 1 in begins[rank]:
                for pair in self.wiring.posts[rank].get(at + 1, ()):
                    self.posted[pair].append(now)
                    filled += self._let_go(pair, now)
                filled += self._begin(begins[rank][at + 1], rank, now)
            for slot in filled:
                ready += blocked.pop(slot, ())
        self._check_through(position)
        return list(zip(starts, ends, strict=True))

    def _finish(self, sendings: Iterable[_Sending], code: int, index: int, rank: int) -> list[int]:
        """An action ends, and its messages leave; returns the slots that they fill."""
        filled, now = [], self.free_at[rank]
        for base, last, delays, routes in sendings:
            if last is not None and last[index] != code:
                continue  # others will add to it
            if routes is None or (route := routes[index]) is None:
                self.arrived[base + index] = now + delays[index]
            elif (pair := self.wiring.waits.get(base + index)) is not None:
                self.held[pair].append((route, base + index))
                filled += self._let_go(pair, now)
                continue
            else:
                self.arrived[base + index] = through = route.carry(now)
                if route.blocks:
                    self.free_at[rank] = max(self.free_at[rank], through - route.latency)
            filled.append(base + index)
        return filled

    def _let_go(self, pair: tuple[int, int], now: float) -> list[int]:
        """Messages leave whose receives are posted; returns the slots that they fill."""
        filled, posted, held = [], self.posted[pair], self.held[pair]
        while posted and held:
            route, slot = held.popleft()
            heard = max(posted.popleft() + 2 * route.latency, self.last[pair])
            self.arrived[slot] = self.last[pair] = max(route.carry(now), heard + route.seconds)
            filled.append(slot)
        return filled

    def _is_put_off(self, events: list[tuple[float, int]], now: float, rank: int, start: float, seconds: float) -> bool:
        """Whether what runs on a rank ends later than was thought when it started: then that is the event."""
        end = self.processors[rank].end(start, seconds)
        if end > now:
            heappush(events, (end, rank))
        return end > now

    def _begin(self, meetings: Iterable[tuple[int, int]], rank: int, now: float) -> list[int]:
        """A rank begins meetings; returns the slots that are filled now."""
        return [
            slot for number, group in meetings for slot in self.meetings[number].begin(group, rank, now, self.arrived)
        ]

    def _check_through(self, position: list[int]) -> None:
        for rank, program in enumerate(self.wiring.actions):
            if position[rank] < len(program):
                raise ScheduleError(
                    f"rank {rank} never gets what {program[position[rank]]} needs: "
                    f"the schedule deadlocks; check(schedule) prints the cycle"
                )

    def _add_epilogue(self, computes: list[list[Span[Action]]]) -> None:
        """The optimizer steps of a flush schedule, stage by stage, each behind the sums of its gradients."""
        ends, update = [*self.free_at], self.table.update
        summed: dict[int, float] = {}
        for each in self.meetings:
            if each.meeting.op is Op.REDUCE_GRAD:
                summed.update((stage, max(each.through[0], summed.get(stage, 0.0))) for stage in each.meeting.stages)
        if self.table.norm is not None:
            ends = [max([*ends, *summed.values()]) + self.table.norm] * len(computes)
        steps = [
            [
                stage
                for stage in filter(self.schedule.trains, stages)
                if update[stage] > 0 or self.table.norm or stage in summed
            ]
            for stages in self.schedule.placement
        ]
        starts, done = [0.0] * len(computes), [0] * len(computes)
        events: list[tuple[float, int]] = []
        ready = list(enumerate(ends))
        while True:
            for rank, end in ready:
                if done[rank] < len(steps[rank]):
                    stage = steps[rank][done[rank]]
                    starts[rank] = max(end, summed.get(stage, 0.0))
                    heappush(events, (starts[rank] + update[stage], rank))
            if not events:
                return
            now, rank = heappop(events)
            stage = steps[rank][done[rank]]
            ready = []
            if self.processors and self._is_put_off(events, now, rank, starts[rank], update[stage]):
                continue
            done[rank] += 1
            computes[rank].append(Span(Action(stage, Op.U, 0), starts[rank], now))
            if stage in self.wiring.behind:  # weights that were updated in parts, in the order in which they are
                self._begin([(self.wiring.behind[stage], 0)], rank, now)
            ready = [(rank, now)]

    def _messages(self, computes: list[list[Span[Action]]]) -> list[tuple[Span[Message], ...]]:
        """The comm lane of each receiver: each message from when it was ready to its arrival."""
        comm: list[list[Span[Message]]] = [[] for _ in computes]
        wiring = self.wiring
        for (codes, indices), compute in zip(wiring.programs, computes, strict=True):
            for code, k, (_, _, end) in zip(codes, indices, compute, strict=True):
                for base, wire, passages, last in wiring.outputs[code]:
                    passage = passages[k]
                    if passage is not None and (last is None or last[k] == code):
                        span = Span(wire.message(k), end, self.arrived[base + k])
                        comm[wiring.passages[passage].receiver].append(span)
        return [tuple(sorted(spans, key=attrgetter("start"))) for spans in comm]

    def _beside_compute(
        self, computes: Sequence[Sequence[Span[Action]]]
    ) -> tuple[list[tuple[Span[Collective], ...]], list[tuple[Span[Action], ...]]]:
        """The lanes of collectives, and of moves, of each rank, from begun on this rank to through; and its fills."""
        collectives: list[list[Span[Collective]]] = [[] for _ in self.schedule.placement]
        moves: list[list[Span[Action]]] = [[] for _ in self.schedule.placement]
        for each in self.meetings:
            stages, op, *_ = each.meeting
            for group, through in each.through.items():
                for rank, begun in each.begun[group].items():
                    if op in MOVE_OPS:
                        moves[rank].append(Span(Action(stages[0], op, group), begun, through))
                    else:
                        collectives[rank].append(Span(Collective(stages, op, group), begun, through))
        by_start = attrgetter("start")
        return [tuple(sorted(s, key=by_start)) for s in collectives], [tuple(sorted(s, key=by_start)) for s in moves]

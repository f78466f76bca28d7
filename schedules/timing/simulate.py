"""The simulator: runs a schedule on given costs and links, and returns the times of everything that happens.

The only events are the ends of actions. When an action ends at time t on rank r, its messages leave (they arrive after
the latency, or when the links have carried them), ranks blocked on them may start, and r starts its next action once
its inputs have arrived. A rank runs its program in order, so

    start(action) = max(end of the previous action on its rank, arrivals of its inputs)

Events are ordered by time, then by rank, so that links serve messages in the order in which they are ready. An action
that runs alongside a sum which takes a share of the processor ends later (`links`): where such a sum began in the
meantime, its end event is postponed.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from ..ir import COMPUTE_OPS, MOVE_OPS, Action, Collective, Op, Schedule, ScheduleError
from ..messages import Message
from .costs import Costs, CostTable
from .links import Links, Processor, Taken, Transit
from .timeline import RankTrace, Span, Timeline
from .wiring import LANE_OPS, JointStep, Output, ScheduleWiring

_NOT_YET = -1.0


# An `Output` with its times: its base and last, and by microbatch the latency, or the transit where there are links.
_Sending = tuple[int, tuple[int, ...] | None, list[float], list[Transit | None] | None]


def simulate(schedule: Schedule, costs: Costs, links: Links | None = None) -> Timeline:
    """When each action of `schedule` runs under `costs`.

    With `costs.update`, `costs.norm` or sums in `links`, a flush schedule ends with the optimizer steps of each rank
    (its epilogue). They come after the rank's own last backward and the sums of the stage's gradients; with
    `costs.norm`, once all ranks and sums are complete and the global norm is known. Where ranks update parts of
    weights, the schedule ends when these are gathered.

    Arguments:
        costs: of one stage action each [s].
        links: the network that carries messages and sums of gradients; None: messages take the latency in `costs` and
            never queue. A latency in `costs` is added to that of links. A replicated stage for which `links` has no sum
            takes `costs.reduce_grad`; sums of tied weights are in `costs` only.

    Raises ValueError for costs that do not fit the stages and links that do not fit the schedule, ScheduleError for a
    schedule in which a rank waits for ever. The schedule is assumed to be complete and each program sound: `check`
    proves that. O(actions * log P).
    """
    if not isinstance(links, Links | None):
        raise ValueError(f"links={links!r:.60}: expected Links(...), or None for messages that take the costs' latency")
    table = costs.table_for(schedule)
    return run_once(ScheduleWiring(schedule, table, links), table)


# As many ratios for "messages" or for "sums"; empty where their durations do not vary.
TransferRatios = Callable[[str, int], Sequence[float]]


def run_once(
    wiring: ScheduleWiring, table: CostTable, *, messages: bool = True, ratios: TransferRatios | None = None
) -> Timeline:
    """The timeline of a schedule that is wired already; `table` may have other seconds than the wiring, but not other
    sums and moves."""
    return _Simulation(wiring, table, ratios).run(messages=messages)


def busy_seconds(schedule: Schedule, costs: Costs) -> float:
    """Seconds of F, B, I and W of all ranks together, per batch."""
    table = costs.table_for(schedule)
    return sum(_own_work(schedule, table, COMPUTE_OPS)) / schedule.num_batches


def ideal_makespan(schedule: Schedule, costs: Costs) -> float:
    """The largest own work of any rank [s]: the time of a rank that is never idle."""
    return max(_own_work(schedule, costs.table_for(schedule), LANE_OPS))


def _own_work(schedule: Schedule, table: CostTable, ops: Collection[Op]) -> list[float]:
    """Seconds of actions of each rank, of those that run together what they take."""
    together = schedule.together
    found = []
    for program in schedule.programs:
        saved = sum(table.hidden(a, together[a]) for a in program if a in together) if together else 0.0
        found.append(sum(table.of(op, stage, k) for stage, op, k in program if op in ops) - saved)
    return found


class _JointStepTimes:
    def __init__(self, step: JointStep, transit: Transit, share: float, processors: Sequence[Processor]) -> None:
        self.step, self.transit, self.share = step, transit, share
        self.processors = [processors[rank] for rank in step.ranks] if processors else ()
        self.begun: dict[int, dict[int, float]] = {}  # by rank, when it began [s]
        self.through: dict[int, float] = {}  # when all ranks have it [s]

    def begin(self, group: int, rank: int, now: float, arrived: list[float]) -> Sequence[int]:
        """A rank begins the step of a group; returns the slots that it fills if it was the last to begin."""
        begun = self.begun.setdefault(group, {})
        begun[rank] = now
        if len(begun) < len(self.step.ranks):
            return ()
        if self.step.after is not None:
            now = max(now, arrived[self.step.after + group])
        start = self.transit.free_from(now) if self.share > 0 else now
        self.through[group] = through = self.transit.carry(now - self.step.early)
        if self.share > 0:
            for each in self.processors:
                each.take(Taken(start, through, self.share))
        slots = self.step.fills.get(group, ())
        for slot in slots:
            arrived[slot] = through
        return slots


class _Simulation:
    def __init__(self, wiring: ScheduleWiring, table: CostTable, ratios: TransferRatios | None) -> None:
        self.ratios = ratios
        self.wiring, self.schedule, self.table = wiring, wiring.schedule, table
        schedule, links = self.schedule, wiring.links
        self.has_messages = links is not None or any(table.latency)
        rows = [table.row(op, s) for op in LANE_OPS for s in range(schedule.num_stages)]
        # By code and index: [S * 5][M].
        self.durations = [row * (wiring.num_indices // len(row)) for row in rows]
        self.together = schedule.together
        for forward, backward in self.together.items():
            code = wiring.code(backward.op, backward.stage)
            shorter = list(self.durations[code])
            shorter[backward.index] -= table.hidden(forward, backward)
            self.durations[code] = tuple(shorter)
        free_at = [0.0] * wiring.num_channels
        self.delays = [table.latency[each.stage] for each in wiring.routes]
        transits = [
            Transit(
                each.num_bytes * each.way.seconds_per_byte,
                delay + each.way.latency,
                each.channels,
                free_at,
                each.way.buffer * each.way.seconds_per_byte if each.way.blocks else None,
            )
            for each, delay in zip(wiring.routes, self.delays, strict=True)
        ]
        self.transits = None if links is None else transits
        self.processors = [Processor() for _ in wiring.programs] if any(table.sum_busy) else []
        number = len(wiring.joint_steps)
        of_sums = (ratios and ratios("sums", number)) or [1.0] * number
        self.joint_steps = [
            _JointStepTimes(
                each,
                Transit(each.seconds * times, 0.0, each.channels, free_at),
                0.0 if each.op in MOVE_OPS else max(table.sum_busy[stage] for stage in each.stages),
                self.processors,
            )
            for each, times in zip(wiring.joint_steps, of_sums, strict=True)
        ]
        # By pair of ranks: times of posted receives without a message, messages without a receive, last arrival.
        self.posted = defaultdict[tuple[int, int], deque[float]](deque)
        self.held = defaultdict[tuple[int, int], deque[tuple[Transit, int]]](deque)
        self.last = defaultdict[tuple[int, int], float](float)
        self.unsent: list[set[int]] = [set() for _ in wiring.programs]  # slots, of messages that their sender waits for
        self.later: list[list[tuple[Transit, int]]] = [[] for _ in wiring.programs]  # see `ScheduleWiring`
        for pair in (pair for own in wiring.posts for pair in own.get(0, ())):
            self.posted[pair].append(-math.inf)
        self.arrived = [_NOT_YET] * wiring.num_slots
        self.free_at = [0.0] * len(wiring.programs)  # when a rank may compute on [s]
        for slot in wiring.filled:
            self.arrived[slot] = 0.0
        for rank, own in enumerate(wiring.begins):  # all-reduces to which a rank contributes no gradient
            self._begin(own.get(0, ()), rank, 0.0)

    def run(self, *, messages: bool) -> Timeline:
        computes = [
            list(map(Span, program, *times)) for program, times in zip(self.wiring.actions, self._play(), strict=True)
        ]
        comm = self._messages(computes) if messages and self.has_messages else [()] * len(computes)
        if self.schedule.has_epilogue:
            self._add_epilogue(computes)
        lanes = zip(computes, comm, *self._other_lanes(computes), strict=True)
        ranks = (
            RankTrace(compute=tuple(c), comm=m, collectives=all_of, moves=moves, exchanges=self._exchanges(c))
            for c, m, all_of, moves in lanes
        )
        return Timeline(schedule=self.schedule, around=self.table.around, ranks=tuple(ranks))

    def _exchanges(self, compute: Sequence[Span[Action]]) -> tuple[Span[Collective], ...]:
        """Exchanges at the ends of their actions; of a backward that runs together with a forward, first what that one
        hides while it computes (see `overlap`)."""
        found: list[Span[Collective]] = []
        if not any(any(row) for rows in self.table.exchanges.values() for row in rows):
            return ()
        for at, (action, _, end) in enumerate(compute):
            left = self.table.exchange(action)
            if left <= 0:
                continue
            what = Collective((action.stage,), Op.EXCHANGE, action.index)
            before = compute[at - 1] if at else None
            if before is not None and self.together.get(before.what) == action:
                computes = before.end - before.start - self.table.exchange(before.what)
                if (first := min(left, computes)) > 0:
                    found.append(Span(what, before.start, before.start + first))
                    left -= first
            if left > 0:
                found.append(Span(what, end - left, end))
        return tuple(sorted(found, key=attrgetter("start")))

    def _sending(self, output: Output) -> _Sending:
        delays = [0.0 if p is None else self.delays[p] for p in output.routes]
        transits = None if self.transits is None else [None if p is None else self.transits[p] for p in output.routes]
        if self.ratios is not None and (times := self.ratios("messages", len(delays))):
            delays = [delay * each for delay, each in zip(delays, times, strict=True)]
            if transits is not None:
                transits = [transit and transit.slower(each) for transit, each in zip(transits, times, strict=True)]
        return output.base, output.last, delays, transits

    def _play(self) -> list[tuple[list[float], list[float]]]:
        """The event loop; returns by rank when its actions start and end, in program order."""
        programs, inputs, begins = self.wiring.programs, self.wiring.inputs, self.wiring.begins
        waits_also = self.wiring.waits_also
        arrived, durations, shared = self.arrived, self.durations, bool(self.processors)
        outputs = [[self._sending(each) for each in outputs] for outputs in self.wiring.outputs]
        starts: list[list[float]] = [[] for _ in programs]
        ends: list[list[float]] = [[] for _ in programs]
        position = [0] * len(programs)
        free_at, unsent, later = self.free_at, self.unsent, self.later
        blocked: dict[int, list[int]] = {}  # slot -> the ranks that wait for it
        events: list[tuple[float, int]] = []  # (end of the running action, rank)
        ready, now = list(range(len(programs))), 0.0
        while True:
            for rank in ready:
                codes, indices = programs[rank]
                at = position[rank]
                if at == len(codes) or unsent[rank]:
                    continue
                code, k = codes[at], indices[at]
                start = free_at[rank]
                also = waits_also[rank]
                for base in (*inputs[code], *also[at]) if at in also else inputs[code]:
                    arrival = arrived[base + k]
                    if arrival == _NOT_YET:
                        blocked.setdefault(base + k, []).append(rank)
                        break
                    if arrival > start:
                        start = arrival
                else:
                    start = self._send_late(rank, start, ready, blocked) if later[rank] else start
                    starts[rank].append(start)
                    heappush(events, (start + durations[code][k], rank))
            if not events:
                if ready := self._send_later(now):
                    continue
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
                filled += self._post(rank, at + 1, now, ready)
                filled += self._begin(begins[rank][at + 1], rank, now)
            for slot in filled:
                ready += blocked.pop(slot, ())
        self._check_through(position)
        return list(zip(starts, ends, strict=True))

    def _finish(self, sendings: Iterable[_Sending], code: int, index: int, rank: int) -> list[int]:
        filled, now = [], self.free_at[rank]
        for base, last, delays, transits in sendings:
            if last is not None and last[index] != code:
                continue  # other actions still contribute
            if transits is None or (transit := transits[index]) is None:
                self.arrived[base + index] = now + delays[index]
            elif (pair := self.wiring.waits.get(base + index)) is not None:
                self.held[pair].append((transit, base + index))
                if transit.held is not None:
                    self.unsent[rank].add(base + index)
                filled += self._let_go(pair, now)
                continue
            elif base + index in self.wiring.later:
                self.later[rank].append((transit, base + index))
                continue
            else:
                self.arrived[base + index] = through = transit.carry(now)
                if transit.held is not None:
                    self.free_at[rank] = max(self.free_at[rank], through - transit.latency - transit.held)
            filled.append(base + index)
        return filled

    def _send_late(self, rank: int, start: float, ready: list[int], blocked: dict[int, list[int]]) -> float:
        """Send the messages that waited until this rank had its next input. Adds the ranks that wait for them to
        `ready`, and returns when this one computes on [s]."""
        for transit, slot in self.later[rank]:
            self.arrived[slot] = through = transit.carry(start)
            start = max(start, through - transit.latency - (transit.held or 0.0))
            ready += blocked.pop(slot, ())
        self.later[rank].clear()
        return start

    def _post(self, rank: int, place: int, now: float, ready: list[int]) -> list[int]:
        """A rank posts its receives at a place of its program; returns the slots that they fill, and adds to `ready`
        who waited for them."""
        filled: list[int] = []
        for pair in self.wiring.posts[rank].get(place, ()):
            self.posted[pair].append(now)
            waited = bool(self.unsent[pair[0]])
            filled += self._let_go(pair, now)
            if waited and not self.unsent[pair[0]]:
                ready.append(pair[0])
        return filled

    def _send_later(self, now: float) -> list[int]:
        """Ranks that all wait for each other to receive; from now on they do so no longer."""
        ready = [rank for rank, slots in enumerate(self.unsent) if slots]
        for rank in ready:
            self.unsent[rank].clear()
            self.free_at[rank] = max(self.free_at[rank], now)
        return ready

    def _let_go(self, pair: tuple[int, int], now: float) -> list[int]:
        """Send the held messages of a pair of ranks whose receives are posted; returns the slots that they fill."""
        filled, posted, held = [], self.posted[pair], self.held[pair]
        while posted and held:
            (transit, slot), since = held.popleft(), posted.popleft()
            if transit.held is not None:
                ends = pair if slot in self.unsent[pair[0]] else ()  # who waits
                self.arrived[slot] = through = transit.carry(max([now, *(self.free_at[rank] for rank in ends)]))
                for rank in ends:
                    self.free_at[rank] = through - transit.latency
                self.unsent[pair[0]].discard(slot)
            else:
                heard = max(since + 2 * transit.latency, self.last[pair])
                self.arrived[slot] = self.last[pair] = max(transit.carry(now), heard + transit.seconds)
            filled.append(slot)
        return filled

    def _is_put_off(self, events: list[tuple[float, int]], now: float, rank: int, start: float, seconds: float) -> bool:
        """Whether the running action ends later than expected when it started; then its event is postponed."""
        end = self.processors[rank].end(start, seconds)
        if end > now:
            heappush(events, (end, rank))
        return end > now

    def _begin(self, begun: Iterable[tuple[int, int]], rank: int, now: float) -> list[int]:
        return [
            slot for number, group in begun for slot in self.joint_steps[number].begin(group, rank, now, self.arrived)
        ]

    def _check_through(self, position: list[int]) -> None:
        for rank, program in enumerate(self.wiring.actions):
            if position[rank] < len(program):
                raise ScheduleError(
                    f"rank {rank} never gets what {program[position[rank]]} needs: "
                    f"the schedule deadlocks; check(schedule) prints the cycle"
                )

    def _add_epilogue(self, computes: list[list[Span[Action]]]) -> None:
        ends, update = [*self.free_at], self.table.update
        summed: dict[int, float] = {}
        for each in self.joint_steps:
            if each.step.op is Op.REDUCE_GRAD:
                summed.update((stage, max(each.through[0], summed.get(stage, 0.0))) for stage in each.step.stages)
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
            if stage in self.wiring.gather_after_update:
                self._begin([(self.wiring.gather_after_update[stage], 0)], rank, now)
            ready = [(rank, now)]

    def _messages(self, computes: list[list[Span[Action]]]) -> list[tuple[Span[Message], ...]]:
        """The comm lane of each receiver: each message from when it was ready to its arrival."""
        comm: list[list[Span[Message]]] = [[] for _ in computes]
        wiring = self.wiring
        for (codes, indices), compute in zip(wiring.programs, computes, strict=True):
            for code, k, (_, _, end) in zip(codes, indices, compute, strict=True):
                for base, wire, routes, last in wiring.outputs[code]:
                    route = routes[k]
                    if route is not None and (last is None or last[k] == code):
                        span = Span(wire.message(k), end, self.arrived[base + k])
                        comm[wiring.routes[route].receiver].append(span)
        return [tuple(sorted(spans, key=attrgetter("start"))) for spans in comm]

    def _other_lanes(
        self, computes: Sequence[Sequence[Span[Action]]]
    ) -> tuple[list[tuple[Span[Collective], ...]], list[tuple[Span[Action], ...]]]:
        lanes: list[list[list[Span[Any]]]] = [[[] for _ in self.schedule.placement] for _ in range(2)]
        for each in self.joint_steps:
            stages, op, *_ = each.step
            for group, through in each.through.items():
                what = Action(stages[0], op, group) if op in MOVE_OPS else Collective(stages, op, group)
                for rank, begun in each.begun[group].items():
                    lanes[op in MOVE_OPS][rank].append(Span(what, begun, through))
        collectives, moves = ([tuple(sorted(spans, key=attrgetter("start"))) for spans in lane] for lane in lanes)
        return collectives, moves

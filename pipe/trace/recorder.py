"""A rank's stamps of the current step and the last ones, and what they say when they are asked."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ...partition.profiler.clock import Clock, Stamp
from ...schedules import Action, Collective, Message, Op, Span
from ...schedules.timing.records import RankRecord, launches
from ...schedules.timing.spread import TimedAction
from ...schedules.timing.timeline import ExpertRows

_STEPS = 50  # whose stamps are kept

Timed = tuple[tuple[int, ...], Op]  # an op of a stage, or of several together


@dataclass(slots=True)
class _Step:
    actions: list[tuple[Action, Stamp, Stamp]] = field(default_factory=list)
    # With the number of actions before.
    waits: list[tuple[int, Sequence[Message], Stamp, Stamp]] = field(default_factory=list)
    collectives: list[tuple[Collective, Stamp, Stamp]] = field(default_factory=list)
    norms: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    data: list[tuple[Stamp, Stamp]] = field(default_factory=list)  # waits for the batch
    exchanges: list[tuple[Collective, Stamp, Stamp]] = field(default_factory=list)  # within actions
    rows: list[tuple[Action, ExpertRows]] = field(default_factory=list)  # of actions with divided experts
    fused: set[Action] = field(default_factory=set)  # I that ran as one backward with the W after it
    entered: Stamp | None = None
    left: Stamp | None = None
    counts: bool = True  # whether its durations count
    counted_from: tuple[int, int, int] = (0, 0, 0)  # the first action, collective and norm that do
    is_whole: bool = True  # whether all of them do


class RankRecorder:
    """One rank's stamps of the current step and the last ones; seconds are made of them when they are asked for.
    `window`: steps whose stamps are one record: one, or several where batches overlap. `takes_turns`: whether other
    ranks of this process run in between: then the time between actions means nothing."""

    def __init__(self, clock: Clock, *, window: int = 1, takes_turns: bool = False) -> None:
        self.clock = clock
        self._takes_turns = takes_turns
        self._window = window
        self._unrecorded = 0  # counted steps after the newest of `_records`, or since the window began again
        self._before: deque[_Step] = deque(maxlen=window - 1)
        self._past: deque[_Step] = deque(maxlen=_STEPS)  # that count, with actions
        self._now = _Step()
        self._following = _Step()  # waits for its batch, and may be entered
        self._within: list[tuple[Stamp, Stamp]] = []  # exchanges of the action that runs
        self._rows: list[ExpertRows] = []  # of its layers
        self._records: deque[Callable[[], RankRecord]] = deque(maxlen=_STEPS // window)

    def enter(self) -> None:
        """Stamp the entry into the next step, before `begin`."""
        self._following.entered = self.clock.stamp()

    def leave(self) -> None:
        """Stamp the end of the current step, once."""
        if self._now.entered is not None and self._now.left is None:
            self._now.left = self.clock.stamp()

    def begin(self, *, counts: bool = True) -> None:
        """Begin a step; the one before is now one of the last. `counts`: whether durations of this step count; not of
        an evaluation, whose forwards keep nothing for a backward. After it the window begins again: the pipeline was
        empty, and its microbatches count from batch 0."""
        now = self._now
        if now.actions and now.counts:
            self._past.append(now)
            self._unrecorded += now.is_whole
            if self._unrecorded == self._window:
                self._records.append(self.snapshot())
                self._unrecorded = 0
        if counts and now.counts:
            self._before.append(now)
        else:
            self._before.clear()
            self._unrecorded = 0
        self._now, self._following = self._following, _Step()
        self._now.counts = self._now.is_whole = counts
        self._within.clear()  # those from when stages were built
        self._rows.clear()

    def runs_as_one(self, fused: Collection[Action]) -> None:
        """Note that each of these I and its W run as one backward, half of whose time is recorded for either."""
        self._now.fused.update(fused)

    def restart(self) -> None:
        """Continue from another state: the next step does not follow those before, and may have one's number."""
        self.begin()
        self._before.clear()
        self._unrecorded = 0

    def action(self, action: Action, start: Stamp, end: Stamp) -> None:
        self._now.actions.append((action, start, end))
        if self._within:
            what = Collective((action.stage,), Op.EXCHANGE, action.index)
            self._now.exchanges.extend((what, start, end) for start, end in self._within)
            self._within.clear()
        if self._rows:
            own, busiest, means = zip(*self._rows, strict=True)
            self._now.rows.append((action, ExpertRows(sum(own), sum(busiest), sum(means))))
            self._rows.clear()

    def exchange(self, start: Stamp, end: Stamp) -> None:
        """Note what members exchanged within the action that runs."""
        self._within.append((start, end))

    def rows(self, by_member: Sequence[int], index: int) -> None:
        """Note how many rows each member's experts compute in a layer of the action that runs; `index`: of this one."""
        self._rows.append(ExpertRows(by_member[index], max(by_member), sum(by_member) / len(by_member)))

    def wait(self, messages: Sequence[Message], start: Stamp, end: Stamp) -> None:
        self._now.waits.append((len(self._now.actions), messages, start, end))

    def data(self, start: Stamp) -> None:
        """Note the wait for the next step's batch, which began at `start` and ends now."""
        self._following.data.append((start, self.clock.stamp()))

    def collective(self, collective: Collective, start: Stamp, end: Stamp) -> None:
        self._now.collectives.append((collective, start, end))

    def norm(self, start: Stamp, end: Stamp) -> None:
        self._now.norms.append((start, end))

    def last_actions(self) -> list[Action]:
        return [action for action, _, _ in self._now.actions[-4:]]

    def snapshot(self) -> Callable[[], RankRecord]:
        """This step's record, to be read now or later (reading a CUDA clock waits)."""
        steps, at = [*self._before, self._now], self.clock.seconds
        entered, left = self._now.entered, self._now.left

        def read() -> RankRecord:
            return RankRecord(
                compute=tuple(
                    Span(a, start, end)
                    for one in steps
                    for a, start, end in _halved([(a, at(start), at(end)) for a, start, end in one.actions], one.fused)
                ),
                arrivals=tuple(
                    Span(m, at(start), at(end)) for one in steps for _, each, start, end in one.waits for m in each
                ),
                collectives=tuple(Span(c, at(start), at(end)) for one in steps for c, start, end in one.collectives),
                data=tuple((at(start), at(end)) for one in steps for start, end in one.data),
                exchanges=tuple(Span(c, at(start), at(end)) for one in steps for c, start, end in one.exchanges),
                rows=tuple(each for one in steps for each in one.rows),
                step=None if entered is None or left is None else (at(entered), at(left)),
            )

        return read

    def _counted(self) -> list[_Step]:
        return [step for step in (*self._past, self._now) if step.counts]

    def medians(self) -> dict[Timed, float]:
        found: dict[Timed, list[float]] = defaultdict(list)
        for step in self._counted():
            for key, seconds in self._durations(step):
                found[key].append(seconds)
        return {key: statistics.median(durations) for key, durations in found.items()}

    def median_norm(self) -> float | None:
        between = self.clock.between
        norms = [between(*norm) for step in self._counted() for norm in step.norms[step.counted_from[2] :]]
        return statistics.median(norms) if norms else None

    def median_overheads(self) -> dict[int, float]:
        """Median seconds by stage between the end of an action of it and the next one of any, without waits."""
        found: dict[int, list[float]] = defaultdict(list)
        for step in () if self._takes_turns else self._counted():
            launched = self._launches(step)
            for number, seconds in self._between(step, max(1, step.counted_from[0])):
                if number not in launched:
                    found[step.actions[number][0].stage].append(seconds)
        return {stage: statistics.median(seconds) for stage, seconds in found.items()}

    def median_around(self) -> tuple[float, float, float] | None:
        """Median seconds of a step before its first action, between the last backward and the first update, and after
        its last action, without waits, sums and norms; None before the first complete step."""
        found = [around for step in self._whole() if (around := self._outside(step)) is not None]
        if not found:
            return None
        before, middle, after = (statistics.median(each) for each in zip(*found, strict=True))
        return before, middle, after

    def steps(self) -> list[tuple[TimedAction, ...]]:
        """Actions of each of the last steps, oldest first, with the seconds up to the next action."""
        return [self._ran(step) for step in self._whole()]

    def _whole(self) -> list[_Step]:
        return [step for step in self._counted() if step.is_whole and step.actions]

    def records(self) -> list[RankRecord]:
        """The same steps with all their times, oldest first; where batches overlap, a record for each disjoint window
        of steps."""
        ends_window = self._unrecorded + 1 == self._window and self._now.actions and self._now.is_whole
        newest = [self.snapshot()] if ends_window else []
        return [read() for read in (*self._records, *newest)]

    def forget(self) -> None:
        now = self._now
        self._past.clear()
        self._records.clear()
        self._unrecorded = 0
        now.is_whole = not now.actions
        now.counted_from = len(now.actions), len(now.collectives), len(now.norms)

    def _durations(self, step: _Step) -> Iterator[tuple[Timed, float]]:
        first_action, first_collective, _ = step.counted_from
        pair: tuple[Action, float] | None = None  # the last I that ran as one with its W, and its seconds
        for action, start, end in step.actions[first_action:]:
            seconds = self.clock.between(start, end)
            if action in step.fused:
                pair = action, seconds
            elif pair is not None and action == pair[0]._replace(op=Op.W):
                yield ((action.stage,), Op.B), pair[1] + seconds
            else:
                yield ((action.stage,), action.op), seconds
        for collective, start, end in step.collectives[first_collective:]:
            yield (collective.stages, collective.op), self.clock.between(start, end)

    def _launches(self, step: _Step) -> set[int]:
        ends, begun = [end for _, _, end in step.actions], [begun for _, begun, _ in step.collectives]
        return launches(ends, begun, between=self.clock.between)

    def _between(self, step: _Step, first: int) -> Iterator[tuple[int, float]]:
        """For each action of the step from `first` on, without updates: the number of the action before, and the
        seconds between, without waits."""
        between = self.clock.between
        waited: dict[int, float] = defaultdict(float)
        for number, _, start, end in step.waits:
            waited[number] += between(start, end)
        for number in range(first, len(step.actions)):
            (action, _, end), (following, start, _) = step.actions[number - 1 : number + 1]
            if Op.U not in (action.op, following.op) and action not in step.fused:
                yield number - 1, max(0.0, between(end, start) - waited[number])

    def _outside(self, step: _Step) -> tuple[float, float, float] | None:
        """Seconds of this step before its first action, between its last backward and the first update where all
        updates follow it, and after the last action, without waits, sums and norms; the middle includes seconds in
        which sums were begun between two actions. None: it has not ended."""
        between, actions = self.clock.between, step.actions
        if step.entered is None or step.left is None:
            return None
        first = next((n for n, (action, *_) in enumerate(actions) if action.op is Op.U), len(actions))
        middle = 0.0
        if 0 < first < len(actions) and all(action.op is Op.U for action, *_ in actions[first:]):
            middle = self._since(step, actions[first - 1][2], actions[first][1])
            middle -= sum(between(*norm) for norm in step.norms)
        before = between(step.entered, actions[0][1]) - sum(between(s, e) for n, _, s, e in step.waits if n == 0)
        waited = sum(between(s, e) for n, _, s, e in step.waits if n == first)
        launched = self._launches(step)
        launching = sum(seconds for n, seconds in self._between(step, 1) if n in launched)
        after = self._since(step, actions[-1][2], step.left)
        return max(0.0, before), max(0.0, middle - waited) + launching, max(0.0, after)

    def _since(self, step: _Step, ended: Stamp, now: Stamp) -> float:
        """Seconds from an action's end, or from that of a later collective, to `now`."""
        between = self.clock.between
        ends = [end for _, _, end in step.collectives if between(end, now) >= 0]
        return min([between(ended, now), *(between(end, now) for end in ends)])

    def _ran(self, step: _Step) -> tuple[TimedAction, ...]:
        """Actions of a step, with the overhead after each action. After the last one, before an update, and where
        sums begin, the time is not overhead (sums, the norm, the end of the batch): there the median of the others is
        taken."""
        after = {} if self._takes_turns else dict(self._between(step, 1))
        launched = self._launches(step)
        inner = after.keys() - launched
        usual = statistics.median(after[n] for n in inner) if inner else 0.0
        ran: list[TimedAction] = []
        for number, (action, start, end) in enumerate(step.actions):
            seconds = self.clock.between(start, end)
            if action.op is not Op.U and action not in step.fused:
                seconds += after[number] if number in inner else usual
            ran.append((action, seconds))
            if number and step.actions[number - 1][0] in step.fused:  # both halves ran as one
                half = (ran[-2][1] + seconds) / 2
                ran[-2:] = [(one, half) for one, _ in ran[-2:]]
        return tuple(ran)


def _halved(
    actions: Sequence[tuple[Action, float, float]], fused: Collection[Action]
) -> Iterator[tuple[Action, float, float]]:
    """Each action with its begin and end; the time of an I and W that ran as one is halved between them."""
    middle: float | None = None
    for number, (action, start, end) in enumerate(actions):
        if action in fused and number + 1 < len(actions):
            middle = (start + actions[number + 1][2]) / 2
            yield action, start, middle
        else:
            yield action, start if middle is None else middle, end
            middle = None

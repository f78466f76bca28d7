"""A rank's stamps of the current step, and durations of the last ones."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from ...partition.profiler.clock import Clock, Stamp
from ...schedules import Action, Collective, Message, Op, Span
from ...schedules.timing.records import RankRecord, launches
from ...schedules.timing.spread import TimedAction

_WINDOW = 400  # durations remembered of each (stage, op)
_STEPS = 50  # of which each action's is remembered

Timed = tuple[tuple[int, ...], Op]  # an op of a stage, or of several together


class _Stamps(NamedTuple):
    """Stamps of one step.

    data: waits for its batch. fused: I that ran as one backward with the W after it. exchanges: within actions.
    """

    actions: list[tuple[Action, Stamp, Stamp]]
    waits: list[tuple[Message, Stamp, Stamp]]
    collectives: list[tuple[Collective, Stamp, Stamp]]
    data: list[tuple[Stamp, Stamp]]
    fused: set[Action]
    exchanges: list[tuple[Collective, Stamp, Stamp]]

    @classmethod
    def none(cls) -> _Stamps:
        return cls([], [], [], [], set(), [])


class RankRecorder:
    """One rank's stamps of the current step, and durations of the last ones.

    Arguments:
        window: steps whose stamps are kept: one, or several where batches overlap.
        takes_turns: whether other ranks of this process run in between: then the time between actions means nothing.
    """

    def __init__(self, clock: Clock, *, window: int = 1, takes_turns: bool = False) -> None:
        self.clock = clock
        self._takes_turns = takes_turns
        self._window = window
        self._unrecorded = 0  # counted steps after the newest of `_records`, or since the window began again
        self._before: deque[_Stamps] = deque(maxlen=window - 1)
        self._now = _Stamps.none()
        self._following = _Stamps.none()  # of the next step: waits for its batch
        self._within: list[tuple[Stamp, Stamp]] = []  # exchanges of the action that runs
        self._remembered = 0  # actions of this step whose durations are taken already
        self._waited: list[tuple[int, Stamp, Stamp]] = []  # with the number of actions of this step before
        self._overheads: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._durations: dict[Timed, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._steps: deque[tuple[TimedAction, ...]] = deque(maxlen=_STEPS)
        self._entered: Stamp | None = None  # when the next step was entered
        self._step: list[Stamp] = []  # when the current step was entered, and left
        self._step_norms = 0.0  # seconds of norms in the current step
        self._around: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)
        self._records: deque[Callable[[], RankRecord]] = deque(maxlen=_STEPS // window)
        self._is_kept = True  # whether the current step is to be one of them
        self._counts = True  # whether durations of the current step are remembered

    def enter(self) -> None:
        """Stamp the entry into the next step, before `begin`."""
        self._entered = self.clock.stamp()

    def leave(self) -> None:
        """Stamp the end of the current step, once."""
        if len(self._step) == 1:
            self._step.append(self.clock.stamp())

    def begin(self, *, counts: bool = True) -> None:
        """Begin a step, and add the one before to the durations.

        Arguments:
            counts: whether this step will be added; not an evaluation, whose forwards keep nothing for a backward.
                After it the window begins again: the pipeline was empty, and its microbatches count from batch 0.
        """
        self._remember()
        if self._now.actions and self._is_kept:
            self._steps.append(self._ran())
            self._unrecorded += 1
            if self._unrecorded == self._window:
                self._records.append(self.snapshot())
                self._unrecorded = 0
            if len(self._step) == 2:
                self._around.append(self._outside(*self._step))
        self._step, self._entered, self._step_norms = [] if self._entered is None else [self._entered], None, 0.0
        if counts and self._counts:
            self._before.append(self._now)
        else:
            self._before.clear()
            self._unrecorded = 0
        self._is_kept = self._counts = counts
        self._now, self._following = self._following, _Stamps.none()
        self._remembered, self._waited = 0, []
        self._within.clear()  # those from when stages were built

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

    def exchange(self, start: Stamp, end: Stamp) -> None:
        """Note what members exchanged within the action that runs."""
        self._within.append((start, end))

    def wait(self, messages: Sequence[Message], start: Stamp, end: Stamp) -> None:
        for message in messages:
            self._now.waits.append((message, start, end))
        self._waited.append((len(self._now.actions), start, end))

    def data(self, start: Stamp) -> None:
        """Note the wait for the next step's batch, which began at `start` and ends now."""
        self._following.data.append((start, self.clock.stamp()))

    def collective(self, collective: Collective, start: Stamp, end: Stamp) -> None:
        self._now.collectives.append((collective, start, end))
        self._durations[collective.stages, collective.op].append(self.clock.between(start, end))

    def norm(self, start: Stamp, end: Stamp) -> None:
        self._norms.append(self.clock.between(start, end))
        self._step_norms += self._norms[-1]

    def median_norm(self) -> float | None:
        return statistics.median(self._norms) if self._norms else None

    def last_actions(self) -> list[Action]:
        return [action for action, _, _ in self._now.actions[-4:]]

    def snapshot(self) -> Callable[[], RankRecord]:
        """This step's record, to be read now or later (reading a CUDA clock waits)."""
        steps = [*self._before, self._now]
        at, step = self.clock.seconds, tuple(self._step)

        def read() -> RankRecord:
            return RankRecord(
                compute=tuple(
                    Span(a, start, end)
                    for one in steps
                    for a, start, end in _halved([(a, at(start), at(end)) for a, start, end in one.actions], one.fused)
                ),
                arrivals=tuple(Span(m, at(start), at(end)) for one in steps for m, start, end in one.waits),
                collectives=tuple(Span(c, at(start), at(end)) for one in steps for c, start, end in one.collectives),
                data=tuple((at(start), at(end)) for one in steps for start, end in one.data),
                exchanges=tuple(Span(c, at(start), at(end)) for one in steps for c, start, end in one.exchanges),
                step=(at(step[0]), at(step[1])) if len(step) == 2 else None,
            )

        return read

    def medians(self) -> dict[Timed, float]:
        self._remember()
        return {key: statistics.median(durations) for key, durations in self._durations.items()}

    def median_overheads(self) -> dict[int, float]:
        """Median seconds by stage between the end of an action of it and the next one of any, without waits."""
        self._remember()
        return {stage: statistics.median(seconds) for stage, seconds in self._overheads.items()}

    def median_around(self) -> tuple[float, float, float] | None:
        """Median seconds of a step before its first action, between the last backward and the first update, and after
        its last action, without waits, sums and norms; None before the first complete step."""
        is_whole = self._now.actions and self._is_kept and len(self._step) == 2
        found = [*self._around, *([self._outside(*self._step)] if is_whole else [])]
        if not found:
            return None
        before, middle, after = (statistics.median(each) for each in zip(*found, strict=True))
        return before, middle, after

    def steps(self) -> list[tuple[TimedAction, ...]]:
        """Actions of each of the last steps, oldest first, with the seconds up to the next action."""
        return [*self._steps, *([self._ran()] if self._now.actions and self._is_kept else [])]

    def records(self) -> list[RankRecord]:
        """The same steps with all their times, oldest first; where batches overlap, a record for each disjoint window
        of steps."""
        is_whole = self._unrecorded + 1 == self._window and self._now.actions and self._is_kept
        newest = [self.snapshot()] if is_whole else []
        return [read() for read in (*self._records, *newest)]

    def forget(self) -> None:
        self._steps.clear()
        self._records.clear()
        self._unrecorded = 0
        self._is_kept = not self._now.actions
        self._remembered = len(self._now.actions)
        self._durations.clear()
        self._overheads.clear()
        self._norms.clear()
        self._around.clear()

    def _remember(self) -> None:
        if not self._counts:
            return
        pair: tuple[Action, float] | None = None  # the last I that ran as one with its W, and its seconds
        for action, start, end in self._now.actions[self._remembered :]:
            seconds = self.clock.between(start, end)
            if action in self._now.fused:
                pair = action, seconds
            elif pair is not None and action == pair[0]._replace(op=Op.W):
                self._durations[(action.stage,), Op.B].append(pair[1] + seconds)
            else:
                self._durations[(action.stage,), action.op].append(seconds)
        launched = self._launches()
        for number, seconds in () if self._takes_turns else self._between(max(1, self._remembered)):
            if number not in launched:
                self._overheads[self._now.actions[number][0].stage].append(seconds)
        self._remembered = len(self._now.actions)

    def _launches(self) -> set[int]:
        ends, begun = [end for _, _, end in self._now.actions], [begun for _, begun, _ in self._now.collectives]
        return launches(ends, begun, between=self.clock.between)

    def _between(self, first: int) -> Iterator[tuple[int, float]]:
        """For each action of the step from `first` on, without updates: the number of the action before, and the
        seconds between, without waits."""
        between = self.clock.between
        waited: dict[int, float] = defaultdict(float)
        for number, start, end in self._waited:
            waited[number] += between(start, end)
        for number in range(first, len(self._now.actions)):
            (action, _, end), (following, start, _) = self._now.actions[number - 1 : number + 1]
            if Op.U not in (action.op, following.op) and action not in self._now.fused:
                yield number - 1, max(0.0, between(end, start) - waited[number])

    def _outside(self, entered: Stamp, left: Stamp) -> tuple[float, float, float]:
        """Seconds of this step before its first action, between its last backward and the first update where all
        updates follow it, and after the last action, without waits, sums and norms; the middle includes seconds in
        which sums were begun between two actions."""
        between, actions = self.clock.between, self._now.actions
        first = next((n for n, (action, *_) in enumerate(actions) if action.op is Op.U), len(actions))
        middle = 0.0
        if 0 < first < len(actions) and all(action.op is Op.U for action, *_ in actions[first:]):
            middle = self._since(actions[first - 1][2], actions[first][1]) - self._step_norms
        before = between(entered, actions[0][1]) - sum(between(s, e) for n, s, e in self._waited if n == 0)
        waited = sum(between(s, e) for n, s, e in self._waited if n == first)
        launched = self._launches()
        launching = sum(seconds for n, seconds in self._between(1) if n in launched)
        return max(0.0, before), max(0.0, middle - waited) + launching, max(0.0, self._since(actions[-1][2], left))

    def _since(self, ended: Stamp, now: Stamp) -> float:
        """Seconds from an action's end, or from that of a later collective, to `now`."""
        between = self.clock.between
        ends = [end for _, _, end in self._now.collectives if between(end, now) >= 0]
        return min([between(ended, now), *(between(end, now) for end in ends)])

    def _ran(self) -> tuple[TimedAction, ...]:
        """Actions of this step, with the overhead after each action. After the last one, before an update, and where
        sums begin, the time is not overhead (sums, the norm, the end of the batch): there the median of the others is
        taken."""
        after = {} if self._takes_turns else dict(self._between(1))
        launched = self._launches()
        inner = [n for n in after if n not in launched]
        usual = statistics.median(after[n] for n in inner) if inner else 0.0
        ran: list[TimedAction] = []
        for number, (action, start, end) in enumerate(self._now.actions):
            seconds = self.clock.between(start, end)
            if action.op is not Op.U and action not in self._now.fused:
                seconds += after[number] if number in inner else usual
            ran.append((action, seconds))
            if number and self._now.actions[number - 1][0] in self._now.fused:  # both halves ran as one
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

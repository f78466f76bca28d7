"""A rank's stamps of the step that runs, and durations of the last ones."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from ...partition.profiler.clock import Clock, Stamp
from ...schedules import Action, Collective, Costs, Message, Op, Span
from ...schedules.timing.records import RankRecord

_WINDOW = 400  # durations remembered of each (stage, op)

Timed = tuple[tuple[int, ...], Op]  # an op of a stage, or of several together
_Stamps = tuple[
    list[tuple[Action, Stamp, Stamp]], list[tuple[Message, Stamp, Stamp]], list[tuple[Collective, Stamp, Stamp]]
]


class Recorder:
    """One rank's stamps of the step that runs, and durations of the last ones.

    Arguments:
        window: steps whose stamps are kept: one, or several where batches overlap.
    """

    def __init__(self, clock: Clock, *, window: int = 1) -> None:
        self.clock = clock
        self._before: deque[_Stamps] = deque(maxlen=window - 1)
        self._actions: list[tuple[Action, Stamp, Stamp]] = []
        self._waits: list[tuple[Message, Stamp, Stamp]] = []
        self._collectives: list[tuple[Collective, Stamp, Stamp]] = []
        self._remembered = 0  # actions of this step whose durations are in already
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._durations: dict[Timed, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))

    def begin(self) -> None:
        """A new step: the one before goes into the durations."""
        self._remember()
        self._before.append((self._actions, self._waits, self._collectives))
        self._actions, self._waits, self._collectives, self._remembered = [], [], [], 0

    def action(self, action: Action, start: Stamp, end: Stamp) -> None:
        """An action ran."""
        self._actions.append((action, start, end))

    def wait(self, messages: Sequence[Message], start: Stamp, end: Stamp) -> None:
        """These messages were waited for, and then there."""
        self._waits += [(message, start, end) for message in messages]

    def collective(self, collective: Collective, start: Stamp, end: Stamp) -> None:
        """A collective was begun on this rank, and was through."""
        self._collectives.append((collective, start, end))
        self._durations[collective.stages, collective.op].append(self.clock.between(start, end))

    def norm(self, start: Stamp, end: Stamp) -> None:
        """The global norm was found and the gradients clipped."""
        self._norms.append(self.clock.between(start, end))

    def median_norm(self) -> float | None:
        """Median seconds of the global norm, waiting for the other ranks included; None without one."""
        return statistics.median(self._norms) if self._norms else None

    def last_actions(self, count: int = 4) -> list[Action]:
        """The newest actions of this step, oldest first."""
        return [action for action, _, _ in self._actions[-count:]]

    def snapshot(self) -> Callable[[], RankRecord]:
        """This step's record, to be read now or later (reading a CUDA clock waits)."""
        steps = [*self._before, (self._actions, self._waits, self._collectives)]
        at = self.clock.seconds

        def read() -> RankRecord:
            return RankRecord(
                compute=tuple(Span(a, at(start), at(end)) for actions, *_ in steps for a, start, end in actions),
                arrivals=tuple((m, at(start), at(end)) for _, waits, _ in steps for m, start, end in waits),
                collectives=tuple(Span(c, at(start), at(end)) for *_, begun in steps for c, start, end in begun),
            )

        return read

    def medians(self) -> dict[Timed, float]:
        """Median seconds by (stages, op), without waits, over the last steps."""
        self._remember()
        return {key: statistics.median(durations) for key, durations in self._durations.items()}

    def forget(self) -> None:
        """Drop the durations (the first steps are slower)."""
        self._remembered = len(self._actions)
        self._durations.clear()
        self._norms.clear()

    def _remember(self) -> None:
        for action, start, end in self._actions[self._remembered :]:
            self._durations[(action.stage,), action.op].append(self.clock.between(start, end))
        self._remembered = len(self._actions)


def costs_from_medians(medians: Mapping[Timed, float], *, num_stages: int, latency: float, norm: float | None) -> Costs:
    """Costs for the simulator from measured medians; an op that no rank measured costs 0."""

    def column(op: Op) -> list[float]:
        return [medians.get(((stage,), op), 0.0) for stage in range(num_stages)]

    return Costs(
        forward=column(Op.F),
        backward=column(Op.B),
        reduce_grad=column(Op.REDUCE_GRAD),
        tied=[(s, seconds) for (s, op), seconds in medians.items() if op is Op.REDUCE_GRAD and len(s) > 1],
        update=column(Op.U),
        latency=latency,
        norm=norm,
    )

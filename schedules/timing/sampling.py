"""Seconds of a step when durations vary: many simulated steps, their median and their range.

A step ends when its last rank ends: it is a maximum of sums of durations. So its mean is above the step simulated with
mean durations, and its relative spread is smaller than that of single actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from ..ir import Op, Schedule
from ..kinds import at_least, option
from ..wording import duration
from .costs import Costs, CostTable
from .links import Links
from .simulate import run_once
from .spread import OpRatios, Spread
from .wiring import LANE_OPS, ScheduleWiring

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SAMPLES = 200
LEAST_SAMPLES = 19  # the least of so many, and the most, are ends of a range of 90%
MOST_ACTIONS = 2_000_000  # in all samples together, as long as these are more than LEAST_SAMPLES
SHARE = 0.9  # of steps, within a range that is printed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """Seconds and bubbles of many simulated steps.

    Arguments:
        seconds: from batch to batch, ascending [s].
        bubbles: likewise, ascending.
    """

    seconds: tuple[float, ...]
    bubbles: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("seconds", "bubbles"):
            numbers = tuple(map(float, getattr(self, name)))
            if not numbers or not all(map(math.isfinite, numbers)) or list(numbers) != sorted(numbers):
                raise ValueError(f"{name}={numbers!r:.60}: expected ascending finite numbers, at least one")
            object.__setattr__(self, name, numbers)

    @property
    def mean(self) -> float:
        """Mean seconds: above those of a simulation with mean durations."""
        return fmean(self.seconds)

    @property
    def median(self) -> float:
        """The prediction that is printed [s]: half of all steps take longer."""
        return median(self.seconds)

    @property
    def bubble(self) -> float:
        """Median bubble."""
        return median(self.bubbles)

    def quantile(self, share: float) -> float:
        """Seconds that this share of steps stays below, between samples linearly; ValueError outside of 0 to 1.

        The i-th of n samples is the quantile i / (n + 1): as large a share of fresh draws stays below it.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share!r}: expected a number from 0 to 1")
        ascending = self.seconds
        at = min(max(share * (len(ascending) + 1) - 1, 0.0), len(ascending) - 1.0)
        low = min(int(at), len(ascending) - 2) if len(ascending) > 1 else 0
        high = min(low + 1, len(ascending) - 1)
        return ascending[low] + (at - low) * (ascending[high] - ascending[low])

    def range(self, share: float = SHARE) -> tuple[float, float]:
        """The interval that holds this share of steps, with as many below as above [s]."""
        return self.quantile((1 - share) / 2), self.quantile((1 + share) / 2)

    def holds(self, steps: Sequence[float], share: float = SHARE) -> float:
        """Share of these measured steps, in seconds, within the range; ValueError without any."""
        if not steps:
            raise ValueError("steps=(): expected the seconds of at least one measured step")
        low, high = self.range(share)
        return fmean(low <= seconds <= high for seconds in steps)

    def __str__(self) -> str:
        return with_range(self.median, self.range())


def with_range(seconds: float, ends: tuple[float, float]) -> str:
    """A predicted step and its range, for people.

    >>> with_range(0.412, (0.401, 0.447))
    '412 ms (90%: 401 ms .. 447 ms)'
    """
    low, high = map(duration, ends)
    return f"{duration(seconds)} ({SHARE:.0%}: {low} .. {high})"


def simulate_spread(
    schedule: Schedule,
    costs: Costs,
    spread: Spread,
    links: Links | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
) -> StepSamples:
    """Seconds and bubbles of simulated steps whose durations are drawn from `spread`.

    Each sample is one of the measured steps of the spread as a whole, with its ratios resampled where the schedule
    has another number of microbatches. For an asynchronous schedule a sample is a whole program, whose batches are all
    drawn from one step. Ratios of 1 reproduce `simulate`. The same seed gives the same samples.

    Arguments:
        costs, links: see `simulate`.
        samples: simulated steps; None: 200, fewer for programs of more than 10,000 actions, at least 19.

    Raises ValueError as `simulate` does, and for a spread of another number of stages. O(samples * actions * log P).

    >>> from stagewright.schedules import Costs, Op, build, simulate
    >>> schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    >>> noise = Spread(actions={Op.F: [[0.5, 1.5]] * 2})
    >>> taken = simulate_spread(schedule, Costs(forward=1.0), noise)
    >>> taken.mean > simulate(schedule, Costs(forward=1.0)).makespan == 15.0
    True
    """
    if samples is None:
        samples = samples_of(sum(map(len, schedule.programs)))
    option("samples", samples, at_least(1, "a number of simulated steps, at least 1"))
    table = costs.table_for(schedule)
    wiring = ScheduleWiring(schedule, table, links)
    seconds, bubbles = [], []
    draws = _StepDraws(schedule, table, spread, seed)
    for _ in range(samples):
        timeline = run_once(wiring, draws.table(), messages=False, ratios=draws.of_transfers)
        seconds.append(timeline.batch_seconds)
        bubbles.append(timeline.bubble)
    return StepSamples(seconds=tuple(sorted(seconds)), bubbles=tuple(sorted(bubbles)))


def samples_of(num_actions: int) -> int:
    """Default number of simulated steps for a program of so many actions.

    >>> [samples_of(number) for number in (32, 10_000, 40_000, 1_000_000)]
    [200, 200, 50, 19]
    """
    return max(LEAST_SAMPLES, min(_SAMPLES, MOST_ACTIONS // max(1, num_actions)))


class _StepDraws:
    """Cost tables with the durations of one drawn step after another: seconds = cost * ratio of the step * ratio of the
    action."""

    def __init__(self, schedule: Schedule, table: CostTable, spread: Spread, seed: int) -> None:
        import numpy as np  # simulating one step needs none

        self._table, self._norm = table, spread.norm
        self._random = np.random.default_rng(seed)
        self._number_of_step, self._own = 0, [np.array(each) for each in spread.step_messages]
        self._of_transfers = {"messages": np.array(spread.messages), "sums": np.array(spread.sums)}
        self._ops = sorted(
            {Op.U, *(op for program in schedule.compute_programs for _, op, _ in program)}, key=LANE_OPS.index
        )
        num_stages, num_indices = schedule.num_stages, schedule.total_indices
        for op, stages in (each for ratios in (spread.actions, *spread.steps) for each in ratios.items()):
            if len(stages) != num_stages:
                raise ValueError(
                    f"a spread of {len(stages)} stages ({op}) for a schedule of {num_stages}: expected as many, as "
                    f"a run of that schedule measures them"
                )
        rows = [(op, stage) for op in self._ops for stage in range(num_stages)]
        self._shape = len(rows), num_indices
        self._seconds = np.array([np.resize(table.row(op, stage), num_indices) for op, stage in rows])

        def lists(ratios: OpRatios) -> list[Sequence[float]]:
            return [(ratios[op][stage] if op in ratios else ()) or (1.0,) for op, stage in rows]

        # One array for the ratios of all rows: those of a row begin at `first`, `number` of them.
        own = lists(spread.actions)
        number = np.array([len(each) for each in own])
        self._ratios = np.concatenate([np.array(each) for each in own])
        self._number, self._first = number[:, None], (np.cumsum(number) - number)[:, None]
        self._steps = [[np.log(each) for each in lists(step)] for step in spread.steps]
        self._means = [
            fmean(step[row].mean() for step in self._steps) for row in range(len(rows) if self._steps else 0)
        ]
        self._sizes = [schedule.groups_per_batch if op is Op.U else schedule.batch_indices for op, _ in rows]

    def table(self) -> CostTable:
        import numpy as np

        at = self._first + (self._random.random(self._shape) * self._number).astype(np.intp)
        seconds = (self._seconds * self._of_step() * self._ratios[at]).tolist()
        width = len(self._table.latency)
        rows = {op: tuple(map(tuple, seconds[n * width : (n + 1) * width])) for n, op in enumerate(self._ops)}
        norm = self._table.norm
        if norm is not None and self._norm:
            norm *= self._norm[int(self._random.integers(len(self._norm)))]
        return replace(self._table, rows={**self._table.rows, **rows}, norm=norm)

    def of_transfers(self, kind: str, number: int) -> list[float]:
        """Ratios for a number of messages or sums; empty where they do not vary. Messages take those of the drawn step
        in random order, since drawing each of them again would count their variance twice."""
        import numpy as np

        if kind == "messages" and self._own and len(own := self._own[self._number_of_step]):
            return list(np.resize(self._random.permutation(own), number).tolist())
        ratios = self._of_transfers[kind]
        found: list[float] = ratios[self._random.integers(len(ratios), size=number)].tolist() if len(ratios) else []
        return found

    def _of_step(self) -> NDArray[np.float64]:
        """Ratios of all actions of one drawn step.

        With x the logarithms of a measured step and m their means over N steps: exp(m + w (x - m)). The factor w, the
        square root of N over a chi-squared number of N - 1 degrees, widens the draw for the unknown variance (Student's
        distribution).
        """
        import numpy as np

        if not self._steps:
            return np.ones(self._shape)
        number = len(self._steps)
        self._number_of_step = int(self._random.integers(number))
        step = self._steps[self._number_of_step]
        wider = math.sqrt(number / self._random.chisquare(number - 1)) if number > 1 else 1.0
        logs = [
            mean + wider * (self._for_batches(own, size) - mean)
            for own, mean, size in zip(step, self._means, self._sizes, strict=True)
        ]
        return np.exp(np.array(logs))

    def _for_batches(self, own: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        """Logarithms by index: those of the step where it has as many, else a random choice of them."""
        import numpy as np

        num_indices = self._shape[1]
        return np.resize(own, num_indices) if len(own) == size else self._random.choice(own, num_indices)

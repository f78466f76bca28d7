"""Seconds of a step when durations vary: many simulated steps, their median and their range.

A step ends when its last rank ends: it is a maximum of sums of durations. So its mean lies above what the means of its
actions give, and it varies less than each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING

from ..ir import Op, Schedule
from ..wording import count, duration
from .costs import Costs, CostTable
from .links import Links
from .pace import Pace, paces_of, steady_pace
from .simulate import Beside, run_once
from .spread import Spread
from .wiring import OPS, Wiring

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
        """Seconds that this share of steps stays below, between samples linearly; ValueError outside of 0 to 1."""
        return _quantile(self.seconds, share)

    def range(self, share: float = SHARE) -> tuple[float, float]:
        """Seconds between which this share of steps lies, as many below as above."""
        return _quantile(self.seconds, (1 - share) / 2), _quantile(self.seconds, (1 + share) / 2)

    def holds(self, steps: Sequence[float], share: float = SHARE) -> float:
        """Part of these measured steps, in seconds, that lies within the range; ValueError for none."""
        if not steps:
            raise ValueError("steps=(): expected the seconds of at least one measured step")
        low, high = self.range(share)
        return fmean(low <= seconds <= high for seconds in steps)

    def __str__(self) -> str:
        """The median and the range, for people."""
        return with_range(self.median, self.range())


def with_range(seconds: float, ends: tuple[float, float]) -> str:
    """A predicted step and where most steps lie, for people.

    >>> with_range(0.412, (0.401, 0.447))
    '412 ms (90%: 401 ms .. 447 ms)'
    """
    low, high = map(duration, ends)
    return f"{duration(seconds)} ({SHARE:.0%}: {low} .. {high})"


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Quantile of samples, the i-th of n being i / (n + 1): as large a share of fresh draws stays below it."""
    if not 0 <= share <= 1:
        raise ValueError(f"share={share!r}: expected a number from 0 to 1")
    at = min(max(share * (len(ascending) + 1) - 1, 0.0), len(ascending) - 1.0)
    low = min(int(at), len(ascending) - 2) if len(ascending) > 1 else 0
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (at - low) * (ascending[high] - ascending[low])


def simulate_spread(
    schedule: Schedule,
    costs: Costs,
    spread: Spread,
    links: Links | None = None,
    *,
    following: int = 0,
    samples: int | None = None,
    seed: int = 0,
) -> StepSamples:
    """Seconds and bubbles of so many simulated steps, whose durations are drawn from `spread`.

    They are steps like those that told the spread; or `following=N`, any of the N steps behind the last of these. The
    machine's pace wanders between steps, so a range for those that follow is about the pace that the last steps had,
    and the wider the larger N is and the more alike neighbours were (`pace`): 90% of N following steps are in their 90%
    range, over many runs together. In a single run all may be outside, since they share a pace.

    Each is what `simulate` says for its durations; of ratios of 1 alone, for these costs. Of an asynchronous schedule a
    sample is a whole program: what is drawn once a step (ranks, sums, the norm) is drawn once for all of its batches.
    The same seed gives the same samples.

    Arguments:
        costs, links: see `simulate`.
        following: steps behind the measured ones (of an asynchronous schedule, batches) of which any may be meant.
        samples: simulated steps; None: 200, of programs of more than 10,000 actions fewer, down to 19.

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
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r}: expected a number of simulated steps, at least 1")
    if not isinstance(following, int) or following < 0:
        raise ValueError(f"following={following!r}: expected a number of steps, or 0 for steps like the measured ones")
    table = costs.table_for(schedule)
    wiring = Wiring(schedule, table, links)
    seconds, bubbles = [], []
    draws = _Draws(schedule, table, spread, seed, following)
    for _ in range(samples):
        timeline = run_once(wiring, draws.table(), messages=False, beside=draws.beside)
        seconds.append(timeline.batch_seconds)
        bubbles.append(timeline.bubble)
    return StepSamples(seconds=tuple(sorted(seconds)), bubbles=tuple(sorted(bubbles)))


def samples_of(num_actions: int) -> int:
    """Steps of a program of so many actions that are simulated where nobody says how many.

    >>> [samples_of(number) for number in (32, 10_000, 40_000, 1_000_000)]
    [200, 200, 50, 19]
    """
    return max(LEAST_SAMPLES, min(_SAMPLES, MOST_ACTIONS // max(1, num_actions)))


class _Draws:
    """Cost tables with durations drawn for one step after the other.

    Arguments:
        table: of the schedule, what ratios of 1 leave.
        following: see `simulate_spread`.
    """

    def __init__(self, schedule: Schedule, table: CostTable, spread: Spread, seed: int, following: int) -> None:
        import numpy as np  # simulating one step needs none

        self._table, self._norm, self._following = table, spread.norm, following
        self._random = np.random.default_rng(seed)
        self.beside = Beside(
            messages=partial(self._some_of, np.array(spread.messages)) if spread.messages else None,
            sums=partial(self._some_of, np.array(spread.sums)) if spread.sums else None,
        )
        self._ops = sorted(
            {Op.U, *(op for program in schedule.compute_programs for _, op, _ in program)}, key=OPS.index
        )
        self._num_ranks, num_stages, num_indices = schedule.num_ranks, schedule.num_stages, schedule.total_indices
        for op, stages in spread.actions.items():
            if len(stages) != num_stages:
                raise ValueError(
                    f"a spread of {len(stages)} stages ({op}) for a schedule of {num_stages}: expected as many, as "
                    f"a run of that schedule measures them"
                )
        if spread.steps and len(spread.steps[0]) != schedule.num_ranks:
            raise ValueError(
                f"a spread of {count(len(spread.steps[0]), 'rank')} for a schedule of {schedule.num_ranks}"
            )
        self._paces, self._shares = _paces(spread, following) if spread.steps else ([], [])
        rows = [(op, stage) for op in self._ops for stage in range(num_stages)]
        self._shape = len(rows), num_indices
        self._seconds = np.array([np.resize(table.row(op, stage), num_indices) for op, stage in rows])
        self._ranks = np.array(
            [[schedule.owner(stage, 0 if op is Op.U else k) for k in range(num_indices)] for op, stage in rows]
        )
        # The ratios of all rows stand in one array: `first` and `number` say where those of a row are.
        lists = [list(spread.actions[op][stage]) if op in spread.actions else [] for op, stage in rows]
        lists = [each or [1.0] for each in lists]
        number = np.array([len(each) for each in lists])
        self._ratios = np.concatenate([np.array(each) for each in lists])
        self._number, self._first = number[:, None], (np.cumsum(number) - number)[:, None]

    def table(self) -> CostTable:
        """Durations of one more step."""
        import numpy as np

        at = self._first + (self._random.random(self._shape) * self._number).astype(np.intp)
        seconds = (self._seconds * self._of_ranks()[self._ranks] * self._ratios[at]).tolist()
        width = len(self._table.latency)
        rows = {op: tuple(map(tuple, seconds[n * width : (n + 1) * width])) for n, op in enumerate(self._ops)}
        norm = self._table.norm
        if norm is not None and self._norm:
            norm *= self._norm[int(self._random.integers(len(self._norm)))]
        update = tuple(row[0] for row in rows[Op.U])
        return replace(self._table, rows={**self._table.rows, **rows}, update=update, norm=norm)

    def _some_of(self, ratios: NDArray[np.float64], number: int) -> list[float]:
        """As many of these, each as likely as any other."""
        found: list[float] = ratios[self._random.integers(len(ratios), size=number)].tolist()
        return found

    def _of_ranks(self) -> NDArray[np.float64]:
        """[P] ratios of one step: of one like those that were measured, or of one that follows."""
        import numpy as np

        if not self._paces:
            return np.ones(self._num_ranks)
        ahead = int(self._random.integers(self._following)) + 1 if self._following else 0
        at = int(self._random.choice(len(self._paces), p=self._shares)) if ahead else 0
        return self._paces[at].draw(self._random, ahead)


def _paces(spread: Spread, following: int) -> tuple[list[Pace], list[float]]:
    """Paces of steps like the measured ones, or of those that follow, and how probable each is."""
    if following:
        return paces_of(spread.steps, spread.chance)
    return [steady_pace(spread.steps, spread.chance)], [1.0]

"""The pace of a machine, which drifts from step to step, and a prediction of the steps that follow.

    logarithm of a rank's ratio in step n  =  level + wander[n] + a step's own        of variance s
    wander[n]  =  exp(-1 / tau) * wander[n-1] + push[n]                               of variance drive * s

`drive` is the strength of the pushes (0: steps are independent), `tau` the number of steps that a push lasts. All ranks
share both, while each rank has its own s, and ranks may share their load. Fifty steps determine neither, so all pairs
of a grid are used, each with its posterior probability after integrating out level and s. A following step is drawn
under one of them: around the remainder of the last step's pace, wider by the pushes until then and by the uncertainty.
For independent steps that is the distribution of the measured steps, wider by Student's factor.

The ratio of a rank is the part that its actions share in a step. A covariance separates it from the noise of single
actions: that of the median of the even actions with the median of the odd ones.

Filter and likelihood: Durbin and Koopman, Time Series Analysis by State Space Methods, 2nd edition, 4.3, 5.7, 7.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import covariance, fmean, median, variance

import numpy as np
from numpy.typing import NDArray

from ..schedules import Op, Schedule, Spread

Numbers = NDArray[np.float64]

_DRIVES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_TAUS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)  # steps
_STEADY = 1 / 3  # prior probability of a pace that does not drift
_MADE = 400  # drawn steps
_MOST_CHANCE = 0.9999  # largest share of the variance that is noise of single actions


def steps_that_follow(spread: Spread, schedule: Schedule, following: int, *, seed: int = 0) -> Spread:
    """A spread of steps drawn from the `following` steps after the measured ones. Over many runs, 90% of these steps
    are in the 90% range; in a single run all may be outside, since they share a pace.

    Raises ValueError for a number below 1.
    """
    if not isinstance(following, int) or following < 1:
        raise ValueError(f"following={following!r}: expected a number of steps, or 0 for steps like the measured ones")
    random = np.random.default_rng(seed)
    rows, chance = shared_ratios(spread, schedule)
    paces, shares = paces_of(rows, chance)
    steps = []
    messages: list[Sequence[float]] = []
    for _ in range(_MADE):
        number, ahead = int(random.integers(len(rows))), int(random.integers(following)) + 1
        pace = paces[int(random.choice(len(paces), p=shares))]
        factors = pace.draw(random, ahead) / rows[number]
        messages += spread.step_messages[number : number + 1]
        steps.append(
            {
                op: [
                    [ratio * factors[schedule.owner(stage, index)] for index, ratio in enumerate(own)]
                    for stage, own in enumerate(stages)
                ]
                for op, stages in spread.steps[number].items()
            }
        )
    return replace(spread, steps=steps, step_messages=messages)


def shared_ratios(spread: Spread, schedule: Schedule) -> tuple[list[list[float]], float]:
    """[N][P] ratios around 1 that all actions of a rank share in a step, and the share of noise of single actions in
    the variance of the measured medians."""
    logs = [_logs_by_rank(step, schedule) for step in spread.steps]
    medians = [[median(of_rank) for of_rank in ranks] for ranks in zip(*logs, strict=True)]
    halves = [
        ([median(of_rank[::2]) for of_rank in ranks], [median(of_rank[1::2] or of_rank) for of_rank in ranks])
        for ranks in zip(*logs, strict=True)
    ]
    whole = sum(variance(of_rank) for of_rank in medians)
    common = sum(covariance(one, other) for one, other in halves)
    scale = sqrt(min(1.0, max(0.0, common / whole))) if whole > 0 else 0.0
    shared = [[exp(scale * (each - fmean(of_rank))) for each in of_rank] for of_rank in medians]
    return [list(row) for row in zip(*shared, strict=True)], min(1 - scale**2, _MOST_CHANCE)


def _logs_by_rank(step: Mapping[Op, Sequence[Sequence[float]]], schedule: Schedule) -> list[list[float]]:
    logs: list[list[float]] = [[] for _ in range(schedule.num_ranks)]
    for stages in step.values():
        for stage, own in enumerate(stages):
            for index, ratio in enumerate(own):
                logs[schedule.owner(stage, index)].append(log(ratio))
    return [of_rank or [0.0] for of_rank in logs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One drive and tau with the posterior given the measured steps. Variances are multiples of s."""

    likelihood: float  # logarithm, up to a constant shared by all paces of these steps
    drive: float  # variance of pushes
    kept: float  # share of the pace that remains one step later, exp(-1 / tau)
    level: Numbers  # [P] logarithms of ratios to which the pace returns
    last: Numbers  # [P] difference of the last step's pace from the level
    answer: float  # decrease of `last` if the level is higher by 1, since the same steps determine both
    # level_variance, last_variance: posterior variances, of `last` given the level
    level_variance: float
    last_variance: float
    own_variance: float  # of a step's own part, without the noise of single actions
    surprises: Numbers  # [N][P] difference of each step from its prediction by the earlier steps, of variance s each

    def middle(self, ahead: int) -> Numbers:
        """[P] expected logarithms of ratios `ahead` steps after the last."""
        return self.level + self.kept**ahead * self.last

    def variance(self, ahead: int) -> float:
        """Variance around `middle`, as a multiple of s."""
        left = self.kept**ahead
        pushed = self.drive * (1 - left**2) / (1 - self.kept**2)
        level = (1 - left * self.answer) ** 2 * self.level_variance
        return self.own_variance + pushed + left**2 * self.last_variance + level

    def draw(self, random: np.random.Generator, ahead: int) -> Numbers:
        """[P] ratios of a step `ahead` steps after the last: the middle plus the surprise of a measured step, scaled by
        the uncertainty of s."""
        number = len(self.surprises)
        surprise: Numbers = self.surprises[random.integers(number)]
        widened = sqrt(self.variance(ahead) * number / random.chisquare(max(1, number - 1)))
        return np.exp(self.middle(ahead) + widened * surprise)


def paces_of(rows: Sequence[Sequence[float]], chance: float = 0.0) -> tuple[list[Pace], list[float]]:
    """Possible paces of the measured steps, and the probability of each; the first is of independent steps. O(N * P).

    Arguments:
        rows: [N][P] ratios of ranks, in the order of steps.
        chance: share of noise of single actions in the variance of the measured steps, which `rows` don't contain.
    """
    moving = [(drive, exp(-1 / tau)) for drive in _DRIVES for tau in _TAUS]
    before = [_STEADY, *[(1 - _STEADY) / len(moving)] * len(moving)]
    measured: Numbers = np.log(np.asarray(rows, dtype=float))
    middle: Numbers = measured.mean(axis=0)
    logs = middle + (measured - middle) / sqrt(1 - chance)  # with the noise of single actions
    paces = _filtered(logs, [(0.0, 0.0), *moving], chance)
    likelihoods = np.array([pace.likelihood for pace in paces])
    weighed = np.array(before) * np.exp(_num_independent(logs) * (likelihoods - likelihoods.max()))
    return paces, (weighed / weighed.sum()).tolist()


def _num_independent(logs: Numbers) -> float:
    """Effective number of independent ranks: 1 if all vary together, P if each varies independently."""
    centred = logs - logs.mean(axis=0)
    # products over ranks or over steps, the fewer of both: their eigenvalues are the same
    products = centred.T @ centred if centred.shape[1] <= len(centred) else centred @ centred.T
    whole = float(np.trace(products))
    return whole**2 / float((products**2).sum()) if whole > 0 else 1.0


def _filtered(logs: Numbers, grid: Sequence[tuple[float, float]], chance: float) -> list[Pace]:
    """Kalman filter over the steps with unknown level and s: the Pace of each pair of the grid.

    Arguments:
        logs: [N, P] logarithms of the ratios of ranks, with the noise of single actions.
        grid: [G] pairs of drive and kept.
        chance: share of that noise in the variance of `logs`.
    """
    # pace [G, P]: estimate if the level were 0; variance [G]: its variance, as a multiple of s
    drive, kept = np.array(grid).T
    pace, variance = np.zeros((len(grid), logs.shape[1])), drive / (1 - kept**2)
    answer = np.zeros(len(grid))  # [G] the pace if all logarithms were 1
    off, one, spread = [], [], []  # by step: difference from the prediction, the same for logarithms of 1, its variance
    for number, row in enumerate(logs):
        if number:
            pace, answer, variance = kept[:, None] * pace, kept * answer, kept**2 * variance + drive
        off.append(row - pace)
        one.append(1 - answer)
        spread.append(variance + 1)
        gain = variance / spread[-1]
        pace, answer, variance = pace + gain[:, None] * off[-1], answer + gain * one[-1], variance * (1 - gain)
    offs, ones, spreads = np.array(off), np.array(one), np.array(spread)  # [N, G, P], [N, G], [N, G]
    precision = (ones**2 / spreads).sum(axis=0)
    level = ((ones / spreads)[:, :, None] * offs).sum(axis=0) / precision[:, None]
    surprises = (offs - ones[:, :, None] * level) / np.sqrt(spreads)[:, :, None]
    squares = (surprises**2).sum(axis=0).mean(axis=1)  # [G] (N - 1) s, a mean over ranks
    varies = bool((squares > 0).all())
    freedom = (len(logs) - 1) * np.log(squares) if varies else 0.0
    likelihood = -0.5 * (np.log(spreads).sum(axis=0) + np.log(precision) + freedom)
    of_chance = chance * ((logs - logs.mean(axis=0)) ** 2).sum(axis=0).mean()
    return [
        Pace(
            likelihood=float(likelihood[g]),
            drive=float(drive[g]),
            kept=float(kept[g]),
            level=level[g],
            last=pace[g] - answer[g] * level[g],
            answer=float(answer[g]),
            level_variance=float(1 / precision[g]),
            last_variance=float(variance[g]),
            own_variance=max(0.0, 1.0 - float(of_chance / squares[g])) if varies else 0.0,
            surprises=surprises[:, g],
        )
        for g in range(len(grid))
    ]

"""The pace of a machine, which wanders from step to step, and what that tells of steps that follow.

    logarithm of a rank's ratio in step n  =  level + wander[n] + a step's own        of variance s
    wander[n]  =  exp(-1 / tau) * wander[n-1] + push[n]                               of variance drive * s

`drive` says how hard the pace is pushed (0: steps are independent), `tau` how many steps a push lasts; both are those
of all ranks, while s is each rank's, and ranks may share their load. Fifty steps tell little of either, so none is
picked: each pair of a grid has the probability that the steps give it, level and s integrated out. A step that follows
is drawn under one of them: around what is left of the pace of the last step, wider by as far as pushes may carry it
until then and by what is not known. Where steps are independent that is the distribution of the steps that were there,
wider by Student's factor.

The ratio of a rank is what its actions share in a step, told apart from the noise of single ones by a covariance: of
the median of every other action with that of those between.

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
_STEADY = 1 / 3  # probability of a pace that does not wander, before any step is looked at
_MADE = 400  # steps that stand for those that follow
_MOST_CHANCE = 0.9999  # of the variance of rows that is told


def steps_that_follow(spread: Spread, schedule: Schedule, following: int, *, seed: int = 0) -> Spread:
    """A spread of steps as they may follow the measured ones: each of these at a pace that any of so many steps behind
    the last may have. 90% of N following steps are in their 90% range, over many runs together; in a single run all may
    be outside, since they share a pace.

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
    """[N][P] ratios that all actions of a rank share in a step, around 1, and which part of the variance of the medians
    that were measured was chance of few actions."""
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
    """[P] logarithms of the ratios of each rank's actions."""
    logs: list[list[float]] = [[] for _ in range(schedule.num_ranks)]
    for stages in step.values():
        for stage, own in enumerate(stages):
            for index, ratio in enumerate(own):
                logs[schedule.owner(stage, index)].append(log(ratio))
    return [of_rank or [0.0] for of_rank in logs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One drive and tau, and what measured steps leave to be known under them. Variances are parts of s.

    Arguments:
        likelihood: logarithm, up to what all paces of these steps have in common.
        drive: variance of pushes.
        kept: part of the pace that is left one step later, exp(-1 / tau).
        level: [P] logarithms of ratios to which the pace returns.
        last: [P] how far the last step's pace was from that.
        answer: by how much `last` is less if the level is higher by 1: both are told by the same steps.
        level_variance, last_variance: of what is not known of these, of `last` for a level that is known.
        own_variance: of a step's own part, without what is chance of few actions.
        surprises: [N][P] what steps had beyond what those before had let expect, of variance s each.
    """

    likelihood: float
    drive: float
    kept: float
    level: Numbers
    last: Numbers
    answer: float
    level_variance: float
    last_variance: float
    own_variance: float
    surprises: Numbers

    def middle(self, ahead: int) -> Numbers:
        """[P] logarithms of ratios to be expected so many steps behind the last."""
        return self.level + self.kept**ahead * self.last

    def variance(self, ahead: int) -> float:
        """Variance around `middle`, as a part of s."""
        left = self.kept**ahead
        pushed = self.drive * (1 - left**2) / (1 - self.kept**2)
        level = (1 - left * self.answer) ** 2 * self.level_variance
        return self.own_variance + pushed + left**2 * self.last_variance + level

    def draw(self, random: np.random.Generator, ahead: int) -> Numbers:
        """[P] ratios of a step so many steps behind the last: as far from the middle as one of the measured was, made
        wider or narrower by what is not known of s."""
        number = len(self.surprises)
        surprise: Numbers = self.surprises[random.integers(number)]
        widened = sqrt(self.variance(ahead) * number / random.chisquare(max(1, number - 1)))
        return np.exp(self.middle(ahead) + widened * surprise)


def paces_of(rows: Sequence[Sequence[float]], chance: float = 0.0) -> tuple[list[Pace], list[float]]:
    """Paces that measured steps may have had, and the probability of each; the first does not wander: steps are
    drawn as those that were there, in any order. O(N * P).

    Arguments:
        rows: [N][P] ratios of ranks, in the order of steps.
        chance: part of the variance of measured steps that was chance of few actions, which `rows` are free of.
    """
    moving = [(drive, exp(-1 / tau)) for drive in _DRIVES for tau in _TAUS]
    before = [_STEADY, *[(1 - _STEADY) / len(moving)] * len(moving)]
    logs = _logs(rows, chance)
    paces = _filtered(logs, [(0.0, 0.0), *moving], chance)
    likelihoods = np.array([pace.likelihood for pace in paces])
    weighed = np.array(before) * np.exp(_num_independent(logs) * (likelihoods - likelihoods.max()))
    return paces, (weighed / weighed.sum()).tolist()


def _logs(rows: Sequence[Sequence[float]], chance: float) -> Numbers:
    """[N][P] logarithms as they were measured, chance of few actions included."""
    logs: Numbers = np.log(np.asarray(rows, dtype=float))
    middle: Numbers = logs.mean(axis=0)
    return middle + (logs - middle) / sqrt(1 - chance)


def _num_independent(logs: Numbers) -> float:
    """How many ranks vary by themselves: 1 where all do so together, P where each does."""
    centred = logs - logs.mean(axis=0)
    # of the products over ranks, or over steps, whichever are fewer: their eigenvalues are the same
    products = centred.T @ centred if centred.shape[1] <= len(centred) else centred @ centred.T
    whole = float(np.trace(products))
    return whole**2 / float((products**2).sum()) if whole > 0 else 1.0


def _filtered(logs: Numbers, grid: Sequence[tuple[float, float]], chance: float) -> list[Pace]:
    """Kalman's filter over the steps, for a level that is not known, and s that is not.

    Arguments:
        grid: [G] drive, and what is kept of a push.
    """
    drive, kept = np.array(grid).T
    pace, variance = np.zeros((len(grid), logs.shape[1])), drive / (1 - kept**2)
    answer = np.zeros(len(grid))  # what the pace would be if all logarithms were 1
    off, one, spread = [], [], []  # by step: beyond what was expected, the same of logarithms of 1, variance of it
    for number, row in enumerate(logs):
        if number:
            pace, answer, variance = kept[:, None] * pace, kept * answer, kept**2 * variance + drive
        off.append(row - pace)
        one.append(1 - answer)
        spread.append(variance + 1)
        gain = variance / spread[-1]
        pace, answer, variance = pace + gain[:, None] * off[-1], answer + gain * one[-1], variance * (1 - gain)
    offs, ones, spreads = np.array(off), np.array(one), np.array(spread)  # [N, G, P], [N, G], [N, G]
    told = (ones**2 / spreads).sum(axis=0)
    level = ((ones / spreads)[:, :, None] * offs).sum(axis=0) / told[:, None]
    surprises = (offs - ones[:, :, None] * level) / np.sqrt(spreads)[:, :, None]
    squares = (surprises**2).sum(axis=0).mean(axis=1)
    varies = bool((squares > 0).all())
    freedom = (len(logs) - 1) * np.log(squares) if varies else 0.0
    likelihood = -0.5 * (np.log(spreads).sum(axis=0) + np.log(told) + freedom)
    of_chance = chance * ((logs - logs.mean(axis=0)) ** 2).sum(axis=0).mean()
    return [
        Pace(
            likelihood=float(likelihood[g]),
            drive=float(drive[g]),
            kept=float(kept[g]),
            level=level[g],
            last=pace[g] - answer[g] * level[g],
            answer=float(answer[g]),
            level_variance=float(1 / told[g]),
            last_variance=float(variance[g]),
            own_variance=max(0.0, 1.0 - float(of_chance / squares[g])) if varies else 0.0,
            surprises=surprises[:, g],
        )
        for g in range(len(grid))
    ]

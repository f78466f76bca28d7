"""The spread that is found in measured steps: a decomposition of variance.

Let m[n, r] be the median of an action's (measured seconds / its cost) over the actions of rank r in step n. Noise of
single actions is not in what two of these have in common, so

    variance common to all ranks     the covariance of m[., r] and m[., r'] over the steps, two different ranks
    variance common to a rank        the covariance of m over every other action with m over those between, less that

and the rest is the actions' own: what is left of each ratio when both factors are taken out. All of it in logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from math import exp, log, sqrt
from statistics import fmean, median
from typing import NamedTuple

from ..ir import Op
from .costs import CostTable
from .spread import Ratios, Spread

LEAST_STEPS = 10  # below, what differs between steps is anybody's guess
_MOST_RATIOS = 256  # kept of a list; more of them are put together


class Ran(NamedTuple):
    """One action of a measured step, and the seconds that it kept its rank busy, the overhead behind it included."""

    stage: int
    op: Op
    seconds: float


RanStep = Mapping[int, Sequence[Ran]]  # by rank


def estimate_spread(steps: Sequence[RanStep], table: CostTable) -> Spread | None:
    """The spread of measured steps around these costs; None for fewer than LEAST_STEPS, which do not tell it.

    Arguments:
        steps: with what each rank ran, in its order. Ranks of which nothing is known are left out.
    """
    if len(steps) < LEAST_STEPS:
        return None
    known = sorted(set.intersection(*({rank for rank, ran in step.items() if ran} for step in steps)))
    by_rank = [[_logs(step[rank], table) for step in steps] for rank in known]
    logs = [own for own in by_rank if all(own)]
    if not logs:
        return None
    middles = [[_middle(own) for own in rank] for rank in logs]
    every_other = [([_middle(own[::2]) for own in rank], [_middle(own[1::2]) for own in rank]) for rank in logs]
    both = max(0.0, fmean(_covariance(one, other) for one, other in every_other))
    pairs = [_covariance(one, other) for one, other in combinations(middles, 2)]
    common = min(both, max(0.0, fmean(pairs))) if pairs else both
    means = [fmean(each) for each in zip(*middles, strict=True)]
    of_steps = _with_variance(means, common)
    of_ranks = [_with_variance([m - s for m, s in zip(own, of_steps, strict=True)], both - common) for own in middles]
    actions: dict[Op, list[list[float]]] = {}
    for rank, factors in zip(logs, of_ranks, strict=True):
        own_mean = fmean(factors)
        for own, factor, common_factor in zip(rank, factors, of_steps, strict=True):
            for stage, op, each in own:
                stages = actions.setdefault(op, [[] for _ in table.latency])
                stages[stage].append(each - (factor - own_mean) - common_factor)
    return Spread(
        actions={op: [_as_ratios(own) for own in stages] for op, stages in actions.items()},
        ranks=_as_ratios([f - fmean(factors) for factors in of_ranks for f in factors]),
        steps=_as_ratios(of_steps),
        num_steps=len(steps),
    )


def _logs(ran: Sequence[Ran], table: CostTable) -> list[tuple[int, Op, float]]:
    """Of each action that has a cost, the logarithm of its ratio to that."""
    costs = [(each, table.row(each.op, each.stage)[0]) for each in ran]
    return [(r.stage, r.op, log(r.seconds / cost)) for r, cost in costs if r.seconds > 0 and cost > 0]


def _middle(logs: Sequence[tuple[int, Op, float]]) -> float:
    return median(each for _, _, each in logs) if logs else 0.0


def _covariance(one: Sequence[float], other: Sequence[float]) -> float:
    mean, others = fmean(one), fmean(other)
    return sum((a - mean) * (b - others) for a, b in zip(one, other, strict=True)) / (len(one) - 1)


def _with_variance(values: Sequence[float], variance: float) -> list[float]:
    """The values with the same mean, drawn together to this variance, where they have more."""
    mean, own = fmean(values), _covariance(values, values)
    scale = sqrt(min(1.0, variance / own)) if own > 0 else 0.0
    return [mean + scale * (each - mean) for each in values]


def _as_ratios(logs: Sequence[float]) -> Ratios:
    """Ascending ratios to four digits; of very many, the means of neighbours, which have the same mean."""
    ordered = sorted(map(exp, logs))
    number = min(len(ordered), _MOST_RATIOS)
    cuts = [n * len(ordered) // number for n in range(number + 1)] if number else [0]
    return tuple(float(f"{fmean(ordered[a:b]):.4g}") for a, b in pairwise(cuts))

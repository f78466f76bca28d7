"""The spread that is found in measured steps: a decomposition of variance.

Let m[n, r] be the median of log(measured seconds / cost) over the actions of rank r in step n. It varies from step to
step with what all of the actions share, and with what few actions happen to have. Only the first is in what every other
action has in common with those between:

    variance of what they share     the covariance, over the steps, of m of every other action and m of those between

So m is drawn together to that variance for the ratios of ranks, and what is left of each action is its own.

Messages, sums and the norm have the ratios that the steps' timelines show: of messages those for which their receiver
waited from before they were made, since of others only the late ones are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean, median
from typing import NamedTuple

from ..ir import Action, Op
from .costs import CostTable
from .measured_inputs import durations_beside
from .spread import Ratios, Spread
from .timeline import Timeline

LEAST_STEPS = 10  # below, what differs between steps is anybody's guess
_MOST_CHANCE = 0.9999  # of the variance of rows that is told
_MOST_RATIOS = 256  # kept of a list; more of them are put together


class Ran(NamedTuple):
    """One action of a measured step, and the seconds that it kept its rank busy, the overhead behind it included."""

    action: Action
    seconds: float


Logs = list[tuple[int, Op, float]]  # of one rank in one step, in its order


def estimate_spread(
    ranks: Sequence[Sequence[Sequence[Ran]]], table: CostTable, timelines: Sequence[Timeline] = ()
) -> Spread | None:
    """The spread of measured steps around these costs; None for fewer than LEAST_STEPS, which do not tell it.

    Arguments:
        ranks: [P][N] what each rank ran in each step, in its order. One that lacks some counts as alike in all.
        timelines: of these steps, or some of them; of none, and of fewer than LEAST_STEPS, what goes on beside actions
            is taken not to vary.
    """
    number = max(map(len, ranks), default=0)
    if number < LEAST_STEPS:
        return None
    logs = [[_logs(ran, table) for ran in steps] for steps in ranks]
    shared, scale = _shared(logs, number)
    actions: dict[Op, list[list[float]]] = {}
    for own, factors in zip(logs, shared, strict=True):
        for ran, factor in zip(own, factors[number - len(own) :], strict=True):
            for stage, op, each in ran:
                stages = actions.setdefault(op, [[] for _ in table.latency])
                stages[stage].append(each - factor)
    return Spread(
        actions={op: [_as_ratios(own) for own in stages] for op, stages in actions.items()},
        steps=[[float(f"{exp(each):.4g}") for each in row] for row in zip(*shared, strict=True)],
        chance=round(min(1 - scale**2, _MOST_CHANCE), 4),
        **_beside(timelines, table),
    )


def _beside(timelines: Sequence[Timeline], table: CostTable) -> dict[str, Ratios]:
    """Ratios of messages, sums and the norm, by the field of a `Spread`."""
    found: dict[str, list[float]] = {"messages": [], "sums": [], "norm": []}
    seen = durations_beside(timelines) if len(timelines) >= LEAST_STEPS else ()
    for kind, stages, seconds in seen:
        cost = _cost(kind, stages, table)
        if cost and seconds > 0:
            found[kind].append(log(seconds / cost))
    return {kind: _as_ratios(logs) for kind, logs in found.items()}


def _cost(kind: str, stages: tuple[int, ...], table: CostTable) -> float | None:
    if kind == "norm":
        return table.norm
    if kind == "messages":
        return table.latency[stages[0]]
    return table.reduce_grad[stages[0]] if len(stages) == 1 else table.tied.get(stages)


def _shared(logs: Sequence[Sequence[Logs]], number: int) -> tuple[list[list[float]], float]:
    """[P][N] logarithms of the ratios that all actions of a rank share in a step, around 0, and by what those that were
    measured were drawn together to them."""
    whole = [own if len(own) == number and all(own) else () for own in logs]
    middles = [[_middle(ran) for ran in own] for own in whole]
    halves = [([_middle(ran[::2]) for ran in own], [_middle(ran[1::2]) for ran in own]) for own in whole if own]
    variance = sum(_covariance(own, own) for own in middles if own)
    common = sum(_covariance(one, other) for one, other in halves)
    scale = sqrt(min(1.0, max(0.0, common / variance))) if variance > 0 else 0.0
    return [[scale * (each - fmean(own)) for each in own] if own else [0.0] * number for own in middles], scale


def _logs(ran: Sequence[Ran], table: CostTable) -> Logs:
    """Logarithm of the ratio of each action to its cost, where it has one."""
    costs = [(what, seconds, table.of(what.op, what.stage, what.index)) for what, seconds in ran]
    return [(what.stage, what.op, log(seconds / cost)) for what, seconds, cost in costs if seconds > 0 and cost > 0]


def _middle(logs: Logs) -> float:
    return median(each for _, _, each in logs) if logs else 0.0


def _covariance(one: Sequence[float], other: Sequence[float]) -> float:
    mean, others = fmean(one), fmean(other)
    return sum((a - mean) * (b - others) for a, b in zip(one, other, strict=True)) / (len(one) - 1)


def _as_ratios(logs: Sequence[float]) -> Ratios:
    """Ascending ratios to four digits; of very many, the means of neighbours, which have the same mean."""
    ordered = sorted(map(exp, logs))
    number = min(len(ordered), _MOST_RATIOS)
    cuts = [n * len(ordered) // number for n in range(number + 1)] if number else [0]
    return tuple(float(f"{fmean(ordered[a:b]):.4g}") for a, b in pairwise(cuts))

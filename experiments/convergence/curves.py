"""Loss curves of several methods and seeds, and what they say. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: after each evaluation, the steps so far, the training seconds so far, the validation loss [nats].

    Evaluations do not count in `seconds`; the drain in front of one, and filling the pipeline again, do.
    """

    method: str
    seed: int
    tokens_per_step: int
    steps: list[int]
    seconds: list[float]
    losses: list[float]

    @property
    def final_loss(self) -> float:
        """At the last evaluation [nats]."""
        return self.losses[-1]

    @property
    def tokens_per_second(self) -> float:
        """Over the whole run."""
        return self.steps[-1] * self.tokens_per_step / self.seconds[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """All seeds of one method.

    Arguments:
        final: mean of the final losses [nats]; low, high: their range.
        seconds: mean training time.
        common_loss: the higher of this method's and the reference's mean final loss: both reach it.
        seconds_to_common, reference_seconds: when the mean curves of this method and of the reference reach it.
    """

    method: str
    seeds: int
    final: float
    low: float
    high: float
    seconds: float
    tokens_per_second: float
    common_loss: float
    seconds_to_common: float
    reference_seconds: float


def of_method(curves: Sequence[Curve], method: str) -> list[Curve]:
    """The curves of one method, by seed."""
    return sorted((curve for curve in curves if curve.method == method), key=lambda curve: curve.seed)


def mean_of(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """(seconds, losses): means over the seeds at each evaluation.

    >>> one = Curve(method="a", seed=0, tokens_per_step=1, steps=[1, 2], seconds=[1.0, 2.0], losses=[4.0, 2.0])
    >>> two = Curve(method="a", seed=1, tokens_per_step=1, steps=[1, 2], seconds=[3.0, 4.0], losses=[6.0, 2.0])
    >>> mean_of([one, two])
    ([2.0, 3.0], [5.0, 2.0])
    """
    seconds = [fmean(column) for column in zip(*(curve.seconds for curve in curves), strict=True)]
    losses = [fmean(column) for column in zip(*(curve.losses for curve in curves), strict=True)]
    return seconds, losses


def seconds_to(target: float, seconds: Sequence[float], losses: Sequence[float]) -> float:
    """Seconds until a curve first reaches `target`, on straight lines between its points; ValueError if it never does.

    >>> seconds_to(3.0, [1.0, 2.0, 3.0], [5.0, 4.0, 2.0])
    2.5
    """
    for at, loss in enumerate(losses):
        if loss <= target:
            if at == 0 or losses[at - 1] == loss:
                return seconds[at]
            part = (losses[at - 1] - target) / (losses[at - 1] - loss)
            return seconds[at - 1] + part * (seconds[at] - seconds[at - 1])
    raise ValueError(f"the loss never reaches {target}: expected at least {min(losses)}")


def summarize(curves: Sequence[Curve], *, reference: str) -> list[MethodResult]:
    """A result a method, in the order in which they first come."""
    theirs = mean_of(of_method(curves, reference))
    results = []
    for method in dict.fromkeys(curve.method for curve in curves):
        own = of_method(curves, method)
        finals = [curve.final_loss for curve in own]
        mine = mean_of(own)
        common = max(mine[1][-1], theirs[1][-1])
        results.append(
            MethodResult(
                method=method,
                seeds=len(own),
                final=fmean(finals),
                low=min(finals),
                high=max(finals),
                seconds=fmean(curve.seconds[-1] for curve in own),
                tokens_per_second=fmean(curve.tokens_per_second for curve in own),
                common_loss=common,
                seconds_to_common=seconds_to(common, *mine),
                reference_seconds=seconds_to(common, *theirs),
            )
        )
    return results


def within_spread(results: Sequence[MethodResult], method: str, reference: str) -> bool:
    """Whether the mean final loss of `method` is no worse than the worst seed of `reference`."""
    by_name = {result.method: result for result in results}
    return by_name[method].final <= by_name[reference].high

"""Estimates from repeated measurements of times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_FASTEST = 3  # samples


def typical(samples: Sequence[float]) -> float:
    """The mean without the slowest tenth [s]: what an action takes beside whatever else runs on the machine.

    Sums of many actions, such as a step, come out near the sum of their means, not of their best times.

    >>> typical([1.0] * 8 + [2.0, 9.0])
    1.1111111111111112
    """
    ranked = sorted(samples)
    return statistics.fmean(ranked[: max(1, len(ranked) - len(ranked) // 10)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A robust estimate: the median of the fastest quarter [s], and half the interquartile range over the median.

    What else runs on a machine makes samples longer, in bursts, and never shorter: a median of all moves with it, and
    moves less for a short action than for a long one, which is hit more often. A single fastest sample would say more
    of luck than of the action.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """From at least one sample [s]; the fastest quarter are at least LEAST_FASTEST.

        >>> Estimate.of([1.0, 1.5, 2.0, 1.0, 9.0])
        Estimate(seconds=1.0, spread=0.3333333333333333)
        """
        ranked = sorted(samples)
        fastest = ranked[: max(LEAST_FASTEST, len(ranked) // 4)]
        middle = statistics.median(ranked)
        if len(ranked) < 2 or middle == 0:
            return cls(seconds=statistics.median(fastest), spread=0.0)
        low, _, high = statistics.quantiles(ranked, n=4, method="inclusive")
        return cls(seconds=statistics.median(fastest), spread=(high - low) / 2 / middle)

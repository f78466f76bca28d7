"""A rank's processor while all-reduces of gradients take a share of it.

    processor   |   F3   |  B2 at half rate  |  B3   |
    sum                  |  busy share 1/2   |

While something that takes a share b of the processor is under way, an action gets on at rate 1 - b: it lasts longer by
b times the seconds beside it, whenever in it these are. Under several at once the largest share counts, since seconds
that were measured at the same time have the wait for each other in them. A processor that is shared fairly would slow
down what takes more than half of it instead, by as much: both are through at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import inf
from typing import NamedTuple


class Taken(NamedTuple):
    """A share of the processor, from `start` to `end` [s]."""

    start: float
    end: float
    share: float


def seconds_left(taken: Iterable[Taken], start: float, end: float) -> float:
    """Seconds of a whole processor that an action got which ran from one moment to the other [s].

    >>> seconds_left([Taken(2.0, 6.0, 0.5)], 0.0, 4.0)
    3.0
    """
    beside = [each for each in taken if each.start < end and each.end > start]
    if not beside:
        return end - start
    moments = sorted({start, end, *(at for each in beside for at in each[:2] if start < at < end)})
    return sum(
        (b - a) * (1 - max((each.share for each in beside if each.start <= a and b <= each.end), default=0.0))
        for a, b in pairwise(moments)
    )


class Processor:
    """Shares that are taken of one rank's processor."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[Taken] = []

    def take(self, taken: Taken) -> None:
        self._taken.append(taken)

    def end(self, start: float, seconds: float) -> float:
        """When an action ends that starts then and takes so many seconds of a whole processor [s].

        It holds as long as nothing else is taken before it. Actions are asked about in the order in which they run.
        """
        now, left = start, seconds
        self._taken = [each for each in self._taken if each.end > start]
        while True:
            share, until = 0.0, inf
            for each in self._taken:
                if each.start > now:
                    until = min(until, each.start)
                elif each.end > now:
                    share, until = max(share, each.share), min(until, each.end)
            end = now if left <= 0 else inf if share == 1 else now + left / (1 - share)
            if end <= until:
                return end
            left -= (until - now) * (1 - share)
            now = until

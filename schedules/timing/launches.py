"""Where a rank began sums of gradients between two of its actions.

rank 0 | B0 |  copies  | B1 |           what goes on between them is no overhead of B0: gradients are put
sum          |--------------            together and sent off, and the next action waits for that
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Moment = TypeVar("Moment")


def launches(
    ends: Sequence[Moment], begun: Iterable[Moment], *, between: Callable[[Moment, Moment], float]
) -> set[int]:
    """Numbers of the actions behind which sums or gathers were begun; -1 for those in front of the first.

    Arguments:
        ends: of a rank's actions in order.
        begun: when each of its sums and gathers began.
        between: seconds from one moment to another.

    >>> launches([1.0, 3.0, 5.0], [3.0, 4.5], between=lambda begin, end: end - begin)
    {1}
    """
    return {bisect_right(ends, 0.0, key=lambda end: between(moment, end)) - 1 for moment in begun}

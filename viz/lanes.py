"""Lanes: spans that overlap are put beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


def assign_lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """The lane of each (start, end), so that no two spans of a lane overlap; they may touch.

    The fewest lanes that will do, each span in the lowest that is free (greedy interval partitioning).
    Starts must ascend. O(spans * log lanes).

    >>> assign_lanes([(0, 2), (1, 3), (2, 4)])
    [0, 1, 0]
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, lane)
    lanes = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes

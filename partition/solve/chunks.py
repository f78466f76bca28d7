"""The best cuts where each stage has one place: S = P V stages in a row, replicas equal or none.

    best_s[i] = min over j of max{ cost_s(i, j), best_s+1[j] },   best_S[n-1] = 0

cost_s(i, j) is what stage s costs between cuts i and j, infinite where it does not fit. Of several answers the one
with the least sum of squares is taken, thus the evenest, then the one whose earlier stages are longest: a second pass
with the sum of cost_s^2 in place of the maximum, over stages that cost at most best_0[0].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..topology import Floats
from .cut_sums import Bools, Cuts

MAX_MOVES = 32
_ROUNDING = 1e-12
CostOf = Callable[[int], Floats]


def even_stages(cost: CostOf, num_stages: int, num_cuts: int) -> tuple[tuple[int, ...], float] | None:
    """S + 1 cuts, from the first to the last, and what the slowest stage costs; None where nothing fits. O(S n w).
    `cost`: of stage s, [n, w], w for all alike: in row i, of those that end 1, 2, .. w cuts after cut i; infinite after
    the last.

    >>> work = np.array([0, 3, 1, 1, 1])
    >>> cost = np.array([[work[i + 1 : i + k].sum() if i + k <= 5 else np.inf for k in range(2, 6)] for i in range(5)])
    >>> even_stages(lambda s: cost, 2, 5)
    ((0, 1, 4), 3.0)
    """
    every = [cost(stage) for stage in range(num_stages)]
    width, rows = every[-1].shape[1], np.arange(num_cuts)
    padded = np.full(num_cuts + width, np.inf)  # of the cuts from here to the end: the most, then the sum of squares
    rest, behind = padded[:num_cuts], np.lib.stride_tricks.sliding_window_view(padded[1:], width)  # [n, w]
    rest[-1] = 0.0
    for costs in reversed(every):
        rest[:] = np.maximum(costs, behind).min(axis=1)
    least = float(rest[0])
    if not np.isfinite(least):
        return None
    bar = least * (1 + _ROUNDING)
    rest[:] = np.inf
    rest[-1] = 0.0
    choices, last_costs = [], None
    for costs in reversed(every):
        if costs is not last_costs:  # most stages cost as much as the next one
            # The last column first: of equal ones the farthest.
            squares, last_costs = np.where(costs <= bar, costs * costs, np.inf)[:, ::-1], costs
        total = squares + behind[:, ::-1]
        nearest = total.argmin(axis=1)
        rest[:] = total[rows, nearest]
        choices.append(rows + width - nearest)
    ends = [0]
    for last in reversed(choices):
        ends.append(int(last[ends[-1]]))
    return tuple(ends), least


def equal_stages(cuts: Cuts, num_stages: int) -> tuple[int, ...] | None:
    """Cuts into stages of nearly equal numbers of nodes, as made by hand; None where the graph has no such chain."""
    sizes = cuts.members.sum(axis=1)
    ends = [0]
    for stage in range(1, num_stages):
        goal = sizes[-1] * stage / num_stages
        allowed = np.flatnonzero(cuts.inside[ends[-1]] & cuts.inside[:, -1])
        if not len(allowed):
            return None
        ends.append(int(allowed[np.abs(sizes[allowed] - goal).argmin()]))
    return (*ends, len(cuts) - 1) if cuts.inside[ends[-1], -1] else None


def all_stages(inside: Bools, num_stages: int, *, limit: int) -> list[tuple[int, ...]] | None:
    """Every way to make S stages; None if there are more than `limit`, or more than 20 times that many partial ways."""
    last = len(inside) - 1
    found: list[tuple[int, ...]] = []
    steps = 0

    def extend(ends: tuple[int, ...]) -> bool:
        nonlocal steps
        steps += 1
        if steps > 20 * limit:
            return False
        left = num_stages - len(ends) + 1
        if left == 1:
            if inside[ends[-1], last]:
                found.append((*ends, last))
            return len(found) <= limit
        return all(extend((*ends, int(at))) for at in np.flatnonzero(inside[ends[-1]]) if at != last)

    return found if extend((0,)) else None


def neighbours(cuts: Cuts, ends: Sequence[int], *, reach: int = 2) -> Iterator[tuple[int, ...]]:
    """The same with one cut moved: to the `reach` nearest ones by work on either side."""
    ends = tuple(ends)
    for at in range(1, len(ends) - 1):
        for other in _moves_of(cuts, ends, at, reach=reach):
            yield (*ends[:at], other, *ends[at + 1 :])


def _moves_of(cuts: Cuts, ends: tuple[int, ...], at: int, *, reach: int) -> list[int]:
    """Cuts to which one may be moved, the `reach` nearest ones by work on either side."""
    if not 0 < at < len(ends) - 1:
        return []
    seconds, between = cuts.seconds, cuts.inside[ends[at - 1]] & cuts.inside[:, ends[at + 1]]
    between[ends[at]] = False
    others = np.flatnonzero(between)
    near = others[np.argsort(np.abs(seconds[others] - seconds[ends[at]]), kind="stable")]
    return [*near[near < ends[at]][:reach].tolist(), *near[near > ends[at]][:reach].tolist()]


def level_ranks(cuts: Cuts, ends: Sequence[int], positions: Sequence[int]) -> tuple[int, ...]:
    """Cuts moved by a node at a time until the work of the P ranks, V stages each, is as level as that makes it. Level:
    the sum of squares of the ranks' work. O(S) a move, of which there are at most MAX_MOVES. `positions`: [S] rank of
    each stage."""
    ends = tuple(ends)
    seconds, last = cuts.seconds, len(ends) - 1
    moves = [_moves_of(cuts, ends, at, reach=1) for at in range(last)]
    for _ in range(MAX_MOVES):
        work = np.diff(seconds[list(ends)])
        load = np.bincount(positions, weights=work)
        best, least = None, -1e-12 * float(seconds[-1]) ** 2
        for at in range(1, last):
            a, b = positions[at - 1], positions[at]
            if a == b:
                continue
            for other in moves[at]:
                more = float(seconds[other] - seconds[ends[at]])
                change = 2 * more * float(load[a] - load[b] + more)  # of the sum of squares
                if change < least:
                    best, least = (at, other), change
        if best is None:
            break
        moved, other = best
        ends = (*ends[:moved], other, *ends[moved + 1 :])
        for at in range(max(moved - 1, 1), min(moved + 2, last)):
            moves[at] = _moves_of(cuts, ends, at, reach=1)
    return ends

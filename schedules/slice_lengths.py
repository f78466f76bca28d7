"""Lengths of the slices of a sequence, since later slices attend to more tokens.

tokens    0           T      causal attention: token i sees i + 1 tokens, so slices of equal length take longer and
equal     |--|--|--|--|      longer, and the longest one sets the pace of the pipeline
by work   |---|--|--|-|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

from .kinds import at_least, option

if TYPE_CHECKING:  # numpy is imported where it is used: simulating and printing schedules do not need it
    import numpy as np

SliceCost = Callable[[int, int], float]  # (tokens of a slice, tokens before it) -> seconds
_Table: TypeAlias = (
    "np.ndarray"  # [K + 1, K + 1] seconds of a slice from unit s up to unit e; infinite where there is none
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalSeconds:
    """Seconds of a slice on a stage: fixed + per_token * l + per_pair * l * (offset + l / 2).

    Each of its l tokens attends to the `offset` earlier tokens, and on average to half of the slice.

    >>> CausalSeconds(per_token=1.0, per_pair=0.5)(4, 2)
    12.0
    """

    per_token: float
    per_pair: float = 0.0
    fixed: float = 0.0

    def __call__(self, length: int, offset: int) -> float:
        return self.fixed + self.per_token * length + self.per_pair * length * (offset + length / 2)


def slice_seconds(lengths: Sequence[int], seconds: SliceCost) -> list[float]:
    """Seconds of each slice; repeated M times they are `index_factors` of `Costs(forward=1.0, ...)`.

    >>> slice_seconds([3, 1], CausalSeconds(per_token=1.0, per_pair=2.0))
    [12.0, 8.0]
    """
    offsets = [0, *accumulate(lengths)]
    return [seconds(length, offset) for length, offset in zip(lengths, offsets, strict=False)]


def equal_work_lengths(total: int, num_slices: int, seconds: SliceCost, *, multiple: int = 1) -> tuple[int, ...]:
    """The lengths that minimise the seconds of the longest slice, then their sum: the choice for Seq1F1B.

    O(n K^2) for K = total / multiple.

    Arguments:
        total: tokens of a sequence, T.
        num_slices: n.
        seconds: of a slice, such as `CausalSeconds`.
        multiple: divides each length.

    Raises ValueError for sizes that do not fit.

    >>> equal_work_lengths(16, 4, CausalSeconds(per_token=1.0, per_pair=1.0))
    (7, 4, 3, 2)
    """
    import numpy as np

    table = _table(total, seconds, multiple, least=num_slices)
    least, _ = _fewest(table, num_slices, np.maximum)
    _, ends = _fewest(np.where(table <= least, table, np.inf), num_slices, np.add)
    return _lengths(ends, multiple)


def shortest_lengths(
    total: int,
    seconds: SliceCost,
    *,
    num_ranks: int,
    num_microbatches: int = 1,
    num_slices: int | None = None,
    multiple: int = 1,
) -> tuple[int, ...]:
    """The lengths with which all slices pass P equal stages soonest: TeraPipe's dynamic programme.

    P stages take M (t1 + ... + tn) + (P - 1) max(t1, ..., tn), since the longest slice delays each stage once. For each
    possible longest slice, the sum is minimised over all cuts (TeraPipe, section 3.3, where this is approximate; here
    every length of a slice is tried). This is the makespan of the `terapipe` schedule, with seconds of F + B where B is
    a multiple of F.

    Arguments:
        num_slices: n; None: the best number, which a fixed cost per slice limits.
        others: as in `equal_work_lengths`.

    O(K^3) for each of at most K^2 longest slices, K = total / multiple; those that cannot be best are skipped.
    """
    import numpy as np

    table = _table(total, seconds, multiple, least=num_slices or 1)
    best = np.inf
    found: tuple[int, ...] = (total,)
    together, _ = _sums(table, num_slices)  # the least possible sum
    for longest in np.unique(table[np.isfinite(table)]):
        if num_microbatches * together + (num_ranks - 1) * longest >= best:
            break
        least, ends = _sums(np.where(table <= longest, table, np.inf), num_slices)
        makespan = num_microbatches * least + (num_ranks - 1) * longest
        if makespan < best:
            best, found = makespan, _lengths(ends, multiple)
    return found


def _table(total: int, seconds: SliceCost, multiple: int, *, least: int) -> _Table:
    import numpy as np

    for name, value in (("total", total), ("multiple", multiple), ("num_slices", least)):
        option(name, value, at_least(1))
    units = total // multiple
    if total % multiple or units < least:
        raise ValueError(
            f"{total} tokens for {least} slices whose lengths are multiples of {multiple}: expected a multiple of "
            f"{multiple}, of at least {least * multiple}"
        )
    table = np.full((units + 1, units + 1), np.inf)
    for start in range(units):
        for end in range(start + 1, units + 1):
            table[start, end] = seconds((end - start) * multiple, start * multiple)
    if not (table[np.isfinite(table)] >= 0).all() or np.isnan(table).any():
        raise ValueError("seconds= returned less than 0, or no number: expected seconds of a slice")
    return table


def _fewest(table: _Table, num_slices: int, together: Callable[..., np.ndarray]) -> tuple[float, list[int]]:
    """The least combination of exactly so many slices, and the units at which they end.

    With t[s, e] the seconds of a slice and `together` max or +: f[1, e] = t[0, e], and f[n, e] is the least of
    together(f[n - 1, s], t[s, e]) over s.
    """
    units = len(table) - 1
    least = table[0]
    starts: list[np.ndarray] = []
    for _ in range(num_slices - 1):
        each = together(least[:, None], table)
        starts.append(each.argmin(axis=0))
        least = each.min(axis=0)
    ends = [units]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    return float(least[units]), ends[::-1]


def _sums(table: _Table, num_slices: int | None) -> tuple[float, list[int]]:
    """The least sum; of any number of slices by default."""
    import numpy as np

    if num_slices is not None:
        return _fewest(table, num_slices, np.add)
    units = len(table) - 1
    least = np.full(units + 1, np.inf)
    least[0] = 0.0
    start = np.zeros(units + 1, dtype=int)
    for end in range(1, units + 1):
        each = least[:end] + table[:end, end]
        start[end] = each.argmin()
        least[end] = each[start[end]]
    ends = [units]
    while start[ends[-1]]:
        ends.append(int(start[ends[-1]]))
    return float(least[units]), ends[::-1]


def _lengths(ends: Sequence[int], multiple: int) -> tuple[int, ...]:
    return tuple((end - start) * multiple for start, end in pairwise([0, *ends]))

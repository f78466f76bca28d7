"""A small set of configurations in which every two values of any two factors meet (greedy, after AETG)."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    *,
    allowed: Callable[[Row], bool] = lambda row: True,
    cost: Callable[[Row], float] = lambda row: 0.0,
    seed: int = 0,
) -> list[Row]:
    """Rows that cover every pair of values which some allowed row has; the same rows for the same arguments.

    Of rows that cover equally many new pairs the one with the least `cost` is taken.

    >>> len(pairwise({"a": [1, 2], "b": [3, 4], "c": [5, 6]})) < 8
    True
    """
    names = list(factors)
    everything = [dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())]
    candidates = [row for row in everything if allowed(row)]
    random.Random(seed).shuffle(candidates)
    pairs = [frozenset(_pairs(row)) for row in candidates]
    missing = set().union(*pairs)
    # How many pairs a row adds never grows: the first row whose count is up to date is the best.
    waiting = [(-len(pairs[k]), cost(row), k) for k, row in enumerate(candidates)]
    heapq.heapify(waiting)
    chosen = []
    while missing:
        _, price, k = waiting[0]
        now = (-len(pairs[k] & missing), price, k)
        if heapq.heapreplace(waiting, now) == now:
            missing -= pairs[k]
            chosen.append(candidates[k])
    order = {id(row): k for k, row in enumerate(everything)}
    return sorted(chosen, key=lambda row: order[id(row)])


def _pairs(row: Row) -> Iterable[Pair]:
    return ((a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2))

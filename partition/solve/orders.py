"""Orders of unequal nodes along the pipeline: each changes which devices the first and the last stages run on.

Of few devices, all orders that differ: a stage may have devices of several nodes, and leave some of theirs to others.

Nodes of one kind are exchangeable, so n nodes of which n_k are of kind k have n! / (n_1! n_2! ..) different orders; all
are returned up to MAX_ORDERS (`node_orders`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, permutations
from operator import mul

import numpy as np

from ..cluster import Cluster

MAX_ORDERS = 100
_Kind = tuple[str, int]  # its name, and the number of a node that has links of its own


def canonical_order(cluster: Cluster) -> tuple[int, ...]:
    """An order of the nodes that does not depend on how they are listed, and moves no link: slow kinds first. Nodes are
    sorted within each group, groups within the larger group, and so on; equal ones stay as they are."""
    kinds = {kind.name: kind for kind in cluster.kinds}

    def key(at: int) -> tuple[float, float, float]:
        kind = kinds[(cluster.nodes or ())[at]]
        return kind.speed, kind.link_speed, math.inf if kind.memory_bytes is None else kind.memory_bytes

    groups: list[tuple[int, ...]] = [(at,) for at in range(len(cluster.nodes or ()))]
    for level in cluster.levels[1:]:
        joined = [groups[first : first + level.size] for first in range(0, len(groups), level.size)]
        groups = [
            tuple(at for group in sorted(each, key=lambda group: [key(at) for at in group]) for at in group)
            for each in joined
        ]
    return groups[0]


def own_ranks(order: Sequence[int], size: int, ranks: Iterable[int]) -> tuple[int, ...]:
    """Ranks of the reordered cluster as ranks of the given one: node i of the former is node `order[i]` of the latter,
    with `size` ranks per node."""
    return tuple(order[rank // size] * size + rank % size for rank in ranks)


def node_orders(cluster: Cluster) -> tuple[list[tuple[int, ...]], str | None]:
    """Orders of the nodes that differ in their kinds and `node_links`, and a note where these are not all.

    Nodes are moved only where that moves no link: on two levels, where any node is as near to any other. Where more
    than MAX_ORDERS differ: as given, the slow ones first, and the slow ones last.

    >>> node_orders(Cluster.from_levels([(8, 1e9), (3, 1e9)]))
    ([(0, 1, 2)], None)
    """
    names = _node_kinds(cluster)
    given = tuple(range(len(names)))
    counts = Counter(names)
    if len(counts) == 1:
        return [given], None
    if len(cluster.levels) > 2:
        return [given], "unequal nodes on more than two levels of links: only the given order was tried"
    if math.factorial(len(names)) // math.prod(math.factorial(n) for n in counts.values()) <= MAX_ORDERS:
        return [_places(names, kinds) for kinds in _arrangements(counts)], None
    speeds = {kind.name: kind.speed for kind in cluster.kinds}
    slow_first = tuple(sorted(given, key=lambda at: speeds[names[at][0]]))
    tried = list(dict.fromkeys([given, slow_first, slow_first[::-1]]))
    return tried, f"unequal nodes: {len(tried)} of their many orders were tried"


def device_orders(cluster: Cluster, most: int) -> list[tuple[int, ...]]:
    """Every order of the devices, one of those that differ in an exchange of equal groups; none where there are more
    than `most`.

    >>> device_orders(Cluster.from_levels([(2, 1e9), (2, 1e8)]), 3)
    [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1)]
    """
    sizes = [1, *accumulate((level.size for level in cluster.levels), mul)]
    kinds = [kind for kind in _node_kinds(cluster) for _ in range(sizes[1])]
    if any(level.devices_per_card not in (None, *sizes) for level in cluster.levels):
        return []  # devices of a node are not equal

    def is_first(device: int, taken: Collection[int]) -> bool:
        """Whether each of its groups was begun, or is the first of its equals that were not."""
        for size, outer in pairwise(sizes):
            group, begun = device // size, {other // size for other in taken}
            own, before = kinds[group * size :][:size], range(device // outer * outer // size, group)
            equals = {other for other in before if kinds[other * size :][:size] == own}
            if group not in begun and not equals <= begun:
                return False
        return True

    orders: list[tuple[int, ...]] = [()]
    for _ in kinds:
        orders = [(*o, at) for o in orders for at in range(len(kinds)) if at not in o and is_first(at, o)]
        if len(orders) > most:
            return []
    return orders


def level_orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """Orders of the devices that go along other levels before the innermost: (0, 2, 1, 3) on two levels of two."""
    every = np.arange(cluster.num_devices).reshape([level.size for level in cluster.levels[::-1]])
    orders = (every.transpose(axes).ravel().tolist() for axes in permutations(range(every.ndim)))
    return [*dict.fromkeys(map(tuple, orders))][1:]


def _node_kinds(cluster: Cluster) -> tuple[_Kind, ...]:
    apart = {node for src, dst, *_ in cluster.node_links for node in (src, dst)}
    return tuple((name, at if at in apart else -1) for at, name in enumerate(cluster.nodes or ()))


def _arrangements(counts: Counter[_Kind]) -> Iterator[tuple[_Kind, ...]]:
    if not counts:
        yield ()
    for name in sorted(counts):
        for rest in _arrangements(counts - Counter([name])):
            yield (name, *rest)


def _places(names: tuple[_Kind, ...], kinds: tuple[_Kind, ...]) -> tuple[int, ...]:
    """Nodes of these kinds in this order, of equal ones the lower first."""
    left = {name: [at for at, other in enumerate(names) if other == name] for name in set(names)}
    return tuple(left[kind].pop(0) for kind in kinds)

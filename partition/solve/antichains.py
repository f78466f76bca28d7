"""Cuts of a graph in two: the states of the dynamic program.

A cut is a set of nodes that holds, with each node, all that it needs. Its maximal nodes are an antichain, hence the
name. A stage is the difference of two cuts, one inside the other; a pipeline is a chain of cuts from {} to all nodes.

        a -> b -> d        {} < {a} < {a b}   < {a b c} < {a b c d}
        a -> c -> d             {a} < {a c}   < {a b c}

They are found from {} by adding one node at a time whose needs are all inside (`_down_sets`); sets are bit masks, and
each is extended once: O(cuts * nodes) steps, for up to 2^nodes cuts where branches are parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..profile import Profile
from ..topology import Floats
from .cut_sums import Bools, Cuts, cuts_of, total

MAX_CUTS = 1500
_MAX_STATES = 6000  # of PipeDream's model, which is never simplified


def all_cuts(profile: Profile, *, limit: int = MAX_CUTS) -> Cuts:
    """Every cut of the graph, or, where these are more than `limit`, a part of them that says so in its notes.

    A source without time, memory and output joins its first consumer: that loses nothing. Where the cuts are too many,
    the stretches of the graph with the most of them (each between two nodes that all paths pass) are taken in one
    fixed order of their nodes, the largest first, until no more than `limit` remain, or no such stretch.

    O(cuts * (nodes + cuts * nodes / 64)).
    """
    graph = _Graph(len(profile.nodes), profile.links)
    free = _free_sources(profile, graph)
    busy = [at for at in profile.order() if at not in free]
    links = [(src, dst) for src, dst in profile.links if src not in free]
    notes: tuple[str, ...] = ()
    masks = _down_sets(_Graph(graph.size, links), busy, limit)
    if len(masks) > limit:
        links, notes = _in_one_order(graph.size, links, busy, limit)
        masks = _down_sets(_Graph(graph.size, links), busy, None)
    if free:
        masks = [_with_needs(graph, mask) for mask in masks]
    return _cuts(profile, graph, masks, notes)


def pipedream_cuts(profile: Profile) -> Cuts:
    """The states of PipeDream's optimizer: a further source joins the first cut that needs it, never earlier. These are
    all cuts whose maximal nodes lead back to the first source of the profile. Raises ValueError for a graph with very
    many of them."""
    graph = _Graph(len(profile.nodes), profile.links)
    first = next(at for at in range(graph.size) if not graph.needs[at])
    start = graph.down(first)
    seen, todo = {start}, [(start, frozenset(graph.feeds[first]))]
    while todo:
        state, border = todo.pop()
        for at in border:
            longer = state | graph.down(at)
            if longer not in seen:
                seen.add(longer)
                if len(seen) > _MAX_STATES:
                    raise ValueError(
                        f"the graph has more than {_MAX_STATES} cuts: expected fewer parallel branches for PipeDream's "
                        f"model; cost_model='default' takes a part of them"
                    )
                fed = {t for new in _bits(longer & ~state) for t in graph.feeds[new]}
                todo.append((longer, frozenset(t for t in border | fed if not longer >> t & 1)))
    cuts = _cuts(profile, graph, [0, *seen], ())
    return replace(cuts, crossing=_as_pipedream_counts(profile, graph, cuts.members))


def _as_pipedream_counts(profile: Profile, graph: _Graph, members: Bools) -> Floats:
    """[n] bytes that PipeDream's optimizer counts across each cut. It counts a maximal node, and of what that node
    needs each tensor that something else takes, too. So the output of a fork counts until its branches join, even where
    all that take it are inside the cut."""
    downs = [graph.down(at) for at in range(graph.size)]
    counted = np.zeros((graph.size, graph.size), dtype=bool)  # [maximal node, tensor]
    for at, down in enumerate(downs):
        counted[at, [p for p in _bits(down) if p == at or any(not down >> x & 1 for x in graph.feeds[p])]] = True
    maximal = members.copy()
    for at in range(graph.size):
        if graph.feeds[at]:
            maximal[:, at] &= ~members[:, graph.feeds[at]].any(axis=1)
    tensors = maximal.astype(np.float32) @ counted.astype(np.float32) > 0
    weights = np.array([node.activation_bytes for node in profile.nodes])
    return total(tensors, weights)


class _Graph:
    """Nodes 0..size-1 with what each needs and feeds; sets of nodes are bit masks."""

    def __init__(self, size: int, links: Sequence[tuple[int, int]]) -> None:
        self.size = size
        self.needs: list[list[int]] = [[] for _ in range(size)]
        self.feeds: list[list[int]] = [[] for _ in range(size)]
        for src, dst in links:
            self.feeds[src].append(dst)
            self.needs[dst].append(src)
        self._down: dict[int, int] = {}

    def down(self, at: int) -> int:
        """The node and all that it needs, near and far."""
        todo = [at]
        while todo:
            node = todo[-1]
            missing = [each for each in self.needs[node] if each not in self._down]
            if missing:
                todo += missing
                continue
            mask = 1 << node
            for each in self.needs[node]:
                mask |= self._down[each]
            self._down[node] = mask
            todo.pop()
        return self._down[at]


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _with_needs(graph: _Graph, mask: int) -> int:
    for at in _bits(mask):
        mask |= graph.down(at)
    return mask


def _free_sources(profile: Profile, graph: _Graph) -> set[int]:
    """Nodes that cost nothing in any place, and need only such nodes."""
    free: set[int] = set()
    for at in profile.order():
        node = profile.nodes[at]
        held = node.parameter_bytes + node.buffer_bytes + node.stash_bytes
        costs = node.seconds + node.activation_bytes + held
        if costs == 0 and graph.feeds[at] and free.issuperset(graph.needs[at]):
            free.add(at)
    return free


def _down_sets(graph: _Graph, nodes: Sequence[int], limit: int | None) -> list[int]:
    """All sets of `nodes` that hold what their nodes need among `nodes`. Of more than `limit`, limit + 1."""
    allowed = set(nodes)
    needs = {at: sum(1 << each for each in set(graph.needs[at]) & allowed) for at in nodes}
    ready = frozenset(at for at in nodes if not needs[at])
    seen, todo = {0}, [(0, ready)]
    while todo:
        state, ready = todo.pop()
        for at in ready:
            longer = state | 1 << at
            if longer in seen:
                continue
            seen.add(longer)
            if limit is not None and len(seen) > limit:
                return list(seen)
            new = {t for t in graph.feeds[at] if t in allowed and needs[t] & ~longer == 0}
            todo.append((longer, (ready - {at}) | new))
    return list(seen)


def _in_one_order(
    size: int, links: list[tuple[int, int]], order: Sequence[int], limit: int
) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
    """More links, so that no more than `limit` cuts remain where that can be reached."""
    graph = _Graph(size, links)
    needed = {at: graph.down(at).bit_count() - 1 for at in order}
    needing = dict.fromkeys(order, 0)
    for at in order:
        for each in _bits(graph.down(at) & ~(1 << at)):
            needing[each] += 1
    stretches: list[list[int]] = [[]]
    for at in order:
        if needed[at] + needing[at] + 1 == len(order):
            stretches += [[at], []]
        else:
            stretches[-1].append(at)
    counts = []
    for nodes in stretches:
        number = len(_down_sets(graph, nodes, limit))
        counts.append(number - 1 if number <= limit else number)
    total, fixed = sum(counts) + 1, 0
    for i in sorted(range(len(stretches)), key=lambda i: -counts[i]):
        if total <= limit or counts[i] <= len(stretches[i]):
            break
        links = links + list(pairwise(stretches[i]))
        total += len(stretches[i]) - counts[i]
        fixed += 1
    note = (
        f"the graph has more than {limit} cuts: {fixed} of its stretches with parallel branches were taken in one "
        f"fixed order, which leaves {total} cuts"
    )
    return links, (note,)


def _cuts(profile: Profile, graph: _Graph, masks: Sequence[int], notes: tuple[str, ...]) -> Cuts:
    position = {at: i for i, at in enumerate(profile.order())}
    width = -(-graph.size // 8)
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    members = np.unpackbits(packed.reshape(-1, width), axis=1, bitorder="little")[:, : graph.size].astype(bool)
    in_order = members[:, sorted(position, key=position.__getitem__)]
    # Smaller cuts first, then those whose earliest nodes are first: the rule for ties.
    sizes, keys = in_order.sum(axis=1).tolist(), [row.tobytes() for row in np.packbits(~in_order, axis=1)]
    rows = sorted(range(len(masks)), key=lambda row: (sizes[row], keys[row]))
    return cuts_of(profile, members[rows], notes=notes)

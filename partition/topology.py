"""A cluster as costs see it: how fast devices are and what they hold, seconds of messages and of sums over ranks.

A sum over N ranks goes round in rings through all of them, as many as the node with the fewest members has adapters, k,
each with its part of the buffer: a ring enters a node once, passes its members and leaves it. Its hops over all levels
are under way at once, so that the slowest level sets the pace (Patarasuk and Yuan 2009 for one ring). With the n groups
of the level below that one level joins, G groups of its own, and k members in the smallest of them below it:

    seconds = sum over levels 2 (n - G) latency + 2 (N-1) / N b max over levels (1 / k / bandwidth)

So does NCCL, and so it counts (src/graph/tuning.cc: 2 (N-1) steps of which 2 (nodes - 1) go over the network; b over
channels times the slower of their bandwidths within and between nodes). Over two nodes its trees are up to 1.9 times as
fast, which reduce-scatter and all-gather do not have. The sums of a tensor group, of some tens of MB, don't fill rings
that long: over several nodes its levels' bytes take turns (`rings_of_groups`), each level with the part that the one
below has scattered:

    seconds a byte = sum over levels 2 (m-1) / m / k / bandwidth        m members in the level's largest group

So say trainings of others with T = 16 and 32 on nodes of eight (nanotron, vTrain), and all-reduces of 32 to 128 MB by
themselves, at 95 to 230 of the 357 GB/s of 8 GB (four nodes; see `tests/partition/test_cluster.py`). Where a node has
several members, but not all of its devices, the rings of its other groups pass through the same adapters: a level's
`partial_reduce`. See docs/decisions, number 22.

gloo makes one ring of all N members, on any hosts (`Cluster.rings` "flat"), so that all of the vector
crosses each of its links, and each step waits for the slowest one. A member sends its part of the vector in segments of
at most 1 MiB, at least two, and asks for two at a time: a segment leaves when the next rank has said that it waits for
it, the way there and back. While one travels the other is asked for; so of the 2 (N-1) waits of a small sum two alone
are left besides the bytes of a large one, before its first half (reduce-scatter) and its second (all-gather).
Two sums are under way at once (torch's two threads), the others wait for their turn. With the level that joins all, a
round of two sums, b bytes together, takes the most of

    2 (N-1) latency + b / bandwidth                            the link waits for segments
    2 latency + 2 (N-1) / N b / bandwidth                      segments wait for the link
    (N-1) / N b (1 / bandwidth + latency / 2 MiB)              segments are at most 1 MiB, and a link is long and fast
                                                               (one sum alone: latency / 1 MiB)

Two members have one connection for both ways, and what one asks for follows what it sends: nothing is hidden, and
the last line has 1 / bandwidth once more. `tests/partition/test_flat_rings.py` carries gloo's allreduce.cc out step by
step.

Where the optimizer's state is divided, gradients are reduce-scattered and weights all-gathered (`Topology.exchange`).
By levels each is the half of a ring that its name says, so that both together are never slower than it. gloo has
no reduce-scatter of its own: there it is an all-to-all, and so is what experts send to each other
(`Topology.all_to_all`): each member sends every other one a part of its own, all at once, of b bytes b / N each. Those
to members beyond a level's group cross it, one after the other from one device; in a flat ring's cluster all of a
host's k members share its card:

    seconds = latency + b / N sum over levels (members that it joins) / bandwidth        k times that outside of a host

On one level that is half a ring's bytes; over several it is more, since nothing is summed on the way.

A level's `reduce_latency` and `reduce_bandwidth` say what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from .cluster import Cluster

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Index = Any  # a number or an array of devices; they broadcast
MAX_PAIRS = 1 << 20  # of replicas of two stages that are looked at
SEGMENT_BYTES = 1 << 20  # of gloo's ring, at most
SUMS_AT_ONCE = 2  # over gloo


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """Time of a transfer: `latency` of an empty one [s], and `seconds_a_byte` of each byte of a large one [s/byte]."""

    latency: float
    seconds_a_byte: float
    busy: float = 0.0  # of either end with a message [s]
    busy_a_byte: float = 0.0  # likewise, for each of its bytes
    busy_share: float = 0.0  # of a sum's seconds, those that keep its ranks from computing (0 to 1)
    # where several limits apply and the slowest counts, for each (latency [s], seconds a byte, waits a byte that are
    # divided by the number of transfers under way at once); none: latency and seconds_a_byte alone
    limits: tuple[tuple[float, float, float], ...] = ()
    # how many are carried out at the same time, while others wait; None: as many as there are, as one
    at_once: int | None = None
    on_card: bool = False  # whether a message takes a card that devices share
    sends: str = "beside"  # of a message, as its `Level` has it
    buffer: float = 0.0  # bytes of a message that either end holds, likewise

    def seconds(self, num_bytes: float, *, number: int = 1) -> float:
        """Seconds of `num_bytes` in all, in `number` transfers (at least 1) that are begun together."""
        rounds = 1 if self.at_once is None else -(-number // self.at_once)
        together = min(number, self.at_once or number)
        limits = self.limits or ((self.latency, self.seconds_a_byte, 0.0),)
        return max(rounds * fixed + num_bytes * (sent + waited / together) for fixed, sent, waited in limits)


NO_TRANSFER = TransferTime(latency=0.0, seconds_a_byte=0.0)


class Topology:
    """Devices 0..D-1 of a cluster and what lies between them; a memory limit [bytes] goes before what kinds say."""

    def __init__(self, cluster: Cluster, *, memory_limit: float | None = None) -> None:
        self.cluster, self.memory_limit = cluster, memory_limit
        self._known: dict[object, TransferTime] = {}  # sums, exchanges and messages that were asked for before
        self.num_devices = cluster.num_devices
        self.level_sizes = [level.size for level in cluster.levels]
        self._group_sizes = np.cumprod(self.level_sizes)[:-1]
        self.is_flat = cluster.rings == "flat"
        slowest = np.maximum.accumulate([level.latency for level in cluster.levels]).tolist()
        self.links, self.rings = (
            [TransferTime(latency=a, seconds_a_byte=1 / b) for a, b in zip(latencies, bandwidths, strict=True)]
            for latencies, bandwidths in (
                (slowest, cluster.path_bandwidths),
                (cluster.ring_latencies, cluster.ring_bandwidths),
            )
        )
        self.links = [
            replace(
                link,
                busy=level.message_seconds,
                busy_a_byte=1 / (level.message_bandwidth or math.inf),
                on_card=level.devices_per_card is not None,
                sends=level.sends,
                buffer=level.buffer_bytes,
            )
            for link, level in zip(self.links, cluster.levels, strict=True)
        ]
        kinds = cluster.used_kinds
        place = {kind.name: at for at, kind in enumerate(kinds)}
        which = np.repeat([place[name] for name in cluster.nodes or ()], cluster.levels[0].size)
        held = [kind.memory_bytes if memory_limit is None else memory_limit for kind in kinds]
        self.memory_bytes: Floats = np.array([math.inf if each is None else each for each in held])[which]
        self.speeds: Floats = np.array([kind.speed for kind in kinds])[which]
        self.link_speeds: Floats = np.array([kind.link_speed for kind in kinds])[which]
        self._to_hosts: Floats = np.array([kind.host_bandwidth or 0.0 for kind in kinds])[which]
        self.is_uniform = len(kinds) == 1
        self._node_links = {(a, b): self._node_link(a, b, *figures) for a, b, *figures in cluster.node_links}
        self.shares_cards = any(level.devices_per_card for level in cluster.levels)
        self.has_equal_links = bool((self.link_speeds == 1).all()) and not self._node_links
        self.fastest = float(self.speeds.max())
        self.total_speed = float(self.speeds.sum())
        self.largest_memory = float(self.memory_bytes.max())

    def with_fast_cards(self) -> Topology:
        """The same with the fastest network card on every node: no order of the nodes has faster links."""
        if self.has_equal_links:
            return self
        other = copy(self)
        other.link_speeds = np.full(len(self.link_speeds), self.link_speeds.max())
        other._node_links, other._known = {}, {}
        return other

    def _node_link(self, src: int, dst: int, bandwidth: float, latency: float) -> tuple[int, TransferTime]:
        """A link of its own between two nodes, and its level; ValueError where it is faster than that."""
        level = int(self.levels_between(*(node * self.level_sizes[0] for node in (src, dst))))
        link = self.links[level]
        if 1 / bandwidth < link.seconds_a_byte or latency < link.latency:
            raise ValueError(
                f"link from node {src} to node {dst}: {bandwidth:g} bytes/s after {latency:g} s: expected no faster "
                f"one than its level, of {1 / link.seconds_a_byte:g} bytes/s after {link.latency:g} s, the fastest"
            )
        return level, replace(link, latency=latency, seconds_a_byte=1 / bandwidth)

    def speed(self, ranks: Sequence[int]) -> float:
        """Speed of the slowest of them, times that of the profile's device."""
        return float(self.speeds[0] if self.is_uniform else self.speeds[list(ranks)].min())

    def memory(self, ranks: Sequence[int]) -> float:
        """Bytes on the smallest of them; infinite where it is not said."""
        return float(self.memory_bytes[0] if self.is_uniform else self.memory_bytes[list(ranks)].min())

    def to_host(self, ranks: Sequence[int]) -> float:
        """Bytes a second of the slowest link of these ranks to their host, in each direction; 0 where none is given."""
        return float(self._to_hosts[0] if self.is_uniform else self._to_hosts[list(ranks)].min())

    def _once(self, find: Callable[..., TransferTime], *groups: Sequence[int], tensor: int) -> TransferTime:
        """`find(*groups, tensor)`, computed once for all groups of ranks that lie alike in the cluster.

        With equal links, ranks that are shifted by whole outermost groups have the same levels between them.
        """
        if not self.has_equal_links or self.shares_cards:
            return find(*groups, tensor=tensor)
        outermost = self.num_devices // self.level_sizes[-1]
        shift = min(map(min, groups)) // outermost * outermost
        alike = tuple(_shifted(ranks, -shift) for ranks in groups)
        key = (find.__name__, alike, tensor)
        if key not in self._known:
            self._known[key] = find(*alike, tensor=tensor)
        return self._known[key]

    def between(self, src: Sequence[int], dst: Sequence[int], *, tensor: int) -> TransferTime:
        """The slowest message between replicas of two stages that share a microbatch, tensor rank to tensor rank; those
        of one group go at the same time, over cards that they share."""
        return self._once(self._between, src, dst, tensor=tensor)

    def _between(self, src: Sequence[int], dst: Sequence[int], *, tensor: int) -> TransferTime:
        first, last = _pairs(src, dst, tensor)
        levels = self.levels_between(first, last)
        link = self.links[int(np.max(levels))]
        if self.has_equal_links and not self.shares_cards:
            return link
        speeds = np.minimum(self.link_speeds[first], self.link_speeds[last])
        latency, per_byte = (
            np.array([getattr(each, name) for each in self.links])[levels] for name in ("latency", "seconds_a_byte")
        )
        per_byte = np.where(levels > 0, per_byte / speeds, per_byte)
        for (a, b), (_, own_link) in self._node_links.items():
            own = (first // self.level_sizes[0] == a) & (last // self.level_sizes[0] == b)
            latency = np.where(own, own_link.latency, latency)
            per_byte = np.where(own, own_link.seconds_a_byte, per_byte)
        shares = np.stack([self._sharing(*row) for row in zip(first, last, levels, strict=True)])
        return replace(link, latency=float(latency.max()), seconds_a_byte=float((per_byte * shares).max()))

    def _sharing(self, first: Indices, last: Indices, levels: Indices) -> Floats:
        """How many of these messages, each itself included, go over one card at either of its ends."""
        found = np.ones(levels.shape)
        for number, level in enumerate(self.cluster.levels):
            at = levels == number
            for ends in (first[at], last[at]) if level.devices_per_card else ():
                _, card, counts = np.unique(ends // level.devices_per_card, return_inverse=True, return_counts=True)
                found[at] = np.maximum(found[at], counts[card])
        return found

    def cards(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The card of each of these ranks, on the lowest level where several share one; none where none do."""
        shared = [level.devices_per_card for level in self.cluster.levels if level.devices_per_card]
        return tuple(rank // shared[0] for rank in ranks) if shared else ()

    def _rings_of(self, members: Indices, tensor: int) -> list[TransferTime]:
        """[L] `rings` as sums of these ranks see them, of which a tensor group makes as many at the same time: with the
        cards that they share and links of their own."""
        if self.has_equal_links and not self.shares_cards:
            return self.rings
        links, found = self._own_links(members.tolist()), []
        for number, (level, ring) in enumerate(zip(self.cluster.levels, self.rings, strict=True)):
            own, times = [link for at, link in links if at == number], 1.0
            if level.devices_per_card is not None:
                counts = np.unique(members // level.devices_per_card, return_counts=True)[1]
                times = min(level.devices_per_card, tensor * (1 if self.is_flat else float(counts.max())))
            latency = max([ring.latency, *(link.latency for link in own)])
            per_byte = max([ring.seconds_a_byte, *(link.seconds_a_byte for link in own)])
            found.append(replace(ring, latency=latency, seconds_a_byte=times * per_byte))
        return found

    def _own_links(self, ranks: Iterable[int]) -> frozenset[tuple[int, TransferTime]]:
        """The links of their own, with their levels, that rings through the nodes of these ranks take."""
        hosts = sorted({rank // self.level_sizes[0] for rank in ranks})
        hops = {*zip(hosts, [*hosts[1:], *hosts[:1]], strict=True), *((host, host) for host in hosts)}
        return frozenset(self._node_links[hop] for hop in hops & self._node_links.keys())

    def ring(self, ranks: Sequence[int], *, tensor: int = 1) -> TransferTime:
        """A sum over these ranks, by the bytes that each of them holds; as many as `tensor` go on at the same time."""
        return self._once(self._ring, ranks, tensor=tensor)

    def _ring_in_turn(self, ranks: Sequence[int], *, tensor: int) -> TransferTime:
        """One of a tensor group: by levels one level's bytes wait for the other's."""
        members, found = np.unique(_indices(ranks)), self._ring(ranks, tensor=tensor)
        if self.is_flat:
            return found
        counts = self._counts(members)
        paces = self._paces(counts, self._slowness(members), self._rings_of(members, tensor))
        in_turn = (2 * (1 - 1 / most) * pace for (most, _), pace in zip(counts, paces, strict=True))
        return replace(found, seconds_a_byte=float(sum(in_turn)))

    def _ring(self, ranks: Sequence[int], *, tensor: int) -> TransferTime:
        members = np.unique(_indices(ranks))
        slowness, rings = self._slowness(members), self._rings_of(members, tensor)
        if self.is_flat:
            return self._flat_ring(members, slowness, rings)
        counts = self._counts(members)
        groups = [len(members), *(len(np.unique(members // size)) for size in self._group_sizes), 1]
        spanned = [level for level, (most, _) in zip(self.cluster.levels, counts, strict=True) if most > 1]
        return TransferTime(
            latency=sum(2 * (a - b) * ring.latency for a, b, ring in zip(groups, groups[1:], rings, strict=False)),
            seconds_a_byte=float(self._ring_seconds_a_byte(counts, len(members), slowness, rings)),
            busy_share=spanned[-1].sum_busy if spanned else 0.0,
        )

    def _slowness(self, members: Indices) -> float:
        """Slowness of the slowest network card among them: 1 for a card of full speed."""
        return 1.0 if self.has_equal_links else 1 / float(self.link_speeds[members].min())

    def _counts(self, members: Indices) -> list[tuple[float, float]]:
        """By level, how many of these its largest and its smallest group has."""
        found = []
        for size in self.level_sizes:
            members, counts = np.unique(members // size, return_counts=True)
            found.append((float(counts.max()), float(counts.min())))
        return found

    def exchange(self, ranks: Sequence[int], *, tensor: int = 1) -> TransferTime:
        """A reduce-scatter or an all-gather over these ranks, by the bytes of all parts together."""
        if self.is_flat:
            return self.all_to_all(ranks, tensor=tensor)
        ring = self.ring(ranks, tensor=tensor)
        return replace(ring, latency=ring.latency / 2, seconds_a_byte=ring.seconds_a_byte / 2)

    def all_to_all(self, ranks: Sequence[int], *, tensor: int = 1) -> TransferTime:
        """Each of these ranks sends every other one its part, by the bytes of all parts together."""
        return self._once(self._all_to_all, ranks, tensor=tensor)

    def _all_to_all(self, ranks: Sequence[int], *, tensor: int) -> TransferTime:
        members = np.unique(_indices(ranks))
        at_once = SUMS_AT_ONCE if self.is_flat else None
        if len(members) == 1:
            return replace(NO_TRANSFER, at_once=at_once)
        slowness = self._slowness(members)
        near, per_byte, size, spanned = np.ones(len(members)), np.zeros(len(members)), 1, 0
        sharing: Floats = np.ones(len(members))  # of a host's cards
        is_partial = False
        rings = self._rings_of(members, tensor)
        for number, (level, ring) in enumerate(zip(self.cluster.levels, rings, strict=True)):
            size *= level.size
            _, group, counts = np.unique(members // size, return_inverse=True, return_counts=True)
            joined = counts[group] - near
            pace = ring.seconds_a_byte * (slowness if number else 1.0) / (level.partial_reduce if is_partial else 1.0)
            per_byte += sharing * joined * pace
            near = counts[group].astype(np.float64)
            if number == 0:
                sharing, is_partial = near if self.is_flat else sharing, bool(1 < near.min() < size)
            spanned = number if joined.any() else spanned
        return TransferTime(
            latency=rings[spanned].latency,
            seconds_a_byte=float(per_byte.max()) / len(members),
            busy_share=self.cluster.levels[spanned].sum_busy,
            at_once=at_once,
        )

    def small_sum(self, ranks: Sequence[int]) -> float:
        """Seconds of the sum of a number or two over these ranks, as of the global norm. By levels up a tree and down:
        a chain within the innermost level, a binary tree over each other one (NCCL's tuning.cc). A flat ring has one
        part for all members, which goes round twice, less two hops: each takes its own link's latency and keeps both
        ends busy, and the others wait for their turn."""
        members = np.unique(_indices(ranks))
        if not self.is_flat or len(members) == 1:
            hops = [math.ceil(math.log2(m)) if at else m - 1 for at, (m, _) in enumerate(self._counts(members))]
            return sum(2 * n * ring.latency for n, ring in zip(hops, self._rings_of(members, 1), strict=True))
        levels = self.levels_between(members, np.roll(members, 1))  # the first one closes the ring
        seconds = np.array([link.latency + 2 * link.busy for link in self.links])[levels]
        return float(2 * seconds.sum() - seconds[0] - seconds[1])

    def rings_of_groups(self, size: int, *, stride: int = 1) -> list[TransferTime]:
        """Rings of a tensor or context group's sums: one for each group that has a place of its own."""
        return [self._once(self._ring_in_turn, group, tensor=1) for group in self.groups(size, stride=stride)]

    def groups(self, size: int, *, stride: int = 1) -> list[range]:
        """Groups of `size` ranks, `stride` apart: one for each that has a place of its own."""
        width, found = size * stride, {}
        inner = self.num_devices // self.level_sizes[-1]  # with equal links, places repeat in each outermost group
        for start in range(0, self.num_devices - width + 1, width):
            for first in range(start, start + stride):
                group = range(first, first + width - stride + 1, stride)
                links = self._own_links(group) if self._node_links else None
                found[first % inner, self._slowness(_indices(group)), links] = group
        return list(found.values())

    def ring_of_ranges(self, first: Index, last: Index, slowness: Floats | float) -> Floats:
        """Seconds a byte of sums over the devices first..last, with so slow a network card, elementwise; latency is
        left out."""
        first, last = np.asarray(first), np.asarray(last)
        if self.is_flat:
            return self._flat_seconds_a_byte(first, last, last - first + 1, slowness)
        counts, members = [], last - first + 1
        for size in self.level_sizes:
            is_one = first // size == last // size
            front, back = size - first % size, last % size + 1
            least = np.where(is_one, last - first + 1, np.minimum(front, back))
            most = np.where(last // size - first // size > 1, size, np.where(is_one, least, np.maximum(front, back)))
            counts.append((most, least))
            first, last = first // size, last // size
        return self._ring_seconds_a_byte(counts, members, slowness, self.rings)

    def levels_between(self, first: Index, last: Index) -> Indices:
        """The level that joins two devices, elementwise; 0 for a device and itself."""
        apart = [np.asarray(first) // size != np.asarray(last) // size for size in self._group_sizes]
        return np.asarray(sum(apart), dtype=np.intp) if apart else np.zeros(np.broadcast(first, last).shape, np.intp)

    def _flat_ring(self, members: Indices, slowness: float, rings: Sequence[TransferTime]) -> TransferTime:
        number, level = len(members), int(self.levels_between(members[0], members[-1]))
        if number == 1:
            return replace(NO_TRANSFER, at_once=SUMS_AT_ONCE)
        step, per_byte = (
            max(getattr(each, name) for each in rings[: level + 1]) for name in ("latency", "seconds_a_byte")
        )
        per_byte *= slowness if level else 1.0
        steps, part = 2 * (number - 1), (number - 1) / number
        large = (2 if number == 2 else 1) * part * per_byte, part * step / SEGMENT_BYTES  # sent, and waited meanwhile
        limits = (steps * step, per_byte, 0.0), (2 * step, 2 * part * per_byte, 0.0), (0.0, *large)
        return TransferTime(
            latency=steps * step,
            seconds_a_byte=2 * part * per_byte,
            busy_share=self.cluster.levels[level].sum_busy,
            limits=limits,
            at_once=SUMS_AT_ONCE,
        )

    def _flat_seconds_a_byte(self, first: Index, last: Index, number: Index, slowness: Floats | float) -> Floats:
        """Seconds a byte of one ring over so many devices, of which `first` and `last` are farthest apart."""
        levels = self.levels_between(first, last)
        per_byte = np.array([ring.seconds_a_byte for ring in self.rings])[levels]
        per_byte = np.where(levels > 0, per_byte * slowness, per_byte)
        return np.asarray(2 * (number - 1) / number * per_byte, dtype=np.float64)

    def _ring_seconds_a_byte(
        self, counts: Sequence[tuple[Any, Any]], members: Index, slowness: Floats | float, rings: Sequence[TransferTime]
    ) -> Floats:
        """`counts`: by level, members in its largest and in its smallest group; `members` in all."""
        slowest = reduce(np.maximum, self._paces(counts, slowness, rings))
        return np.asarray(2 * (1 - 1 / np.asarray(members)) * slowest, dtype=np.float64)

    def _paces(
        self, counts: Sequence[tuple[Any, Any]], slowness: Floats | float, rings: Sequence[TransferTime]
    ) -> list[Floats]:
        """By level, seconds a byte of a hop with the part of a buffer that is left there; 0 where groups have one."""
        found, part, in_node = [], np.ones(()), np.asarray(counts[0][1])
        is_partial = (in_node > 1) & (in_node < self.level_sizes[0])
        for level, ((most, least), ring) in enumerate(zip(counts, rings, strict=True)):
            per_byte = ring.seconds_a_byte * (slowness if level else 1.0)
            if level:
                per_byte = per_byte / np.where(is_partial, self.cluster.levels[level].partial_reduce, 1.0)
            found.append(np.where(np.asarray(most) > 1, part * per_byte, 0.0))
            part = part / least
        return found


def _pairs(src: Sequence[int], dst: Sequence[int], tensor: int) -> tuple[Indices, Indices]:
    """[pairs, T] ranks of two stages whose replicas share microbatches."""
    counts = len(src) // tensor, len(dst) // tensor
    k = np.arange(min(math.lcm(*counts), MAX_PAIRS))
    first, last = (_indices(ranks).reshape(n, tensor)[k % n] for ranks, n in zip((src, dst), counts, strict=True))
    return first, last


def _shifted(ranks: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(ranks, range):
        return range(ranks.start + by, ranks.stop + by, ranks.step)
    return tuple(rank + by for rank in ranks)


def _indices(ranks: Sequence[int]) -> Indices:
    if isinstance(ranks, range):
        return np.arange(ranks.start, ranks.stop, ranks.step)
    return np.asarray(ranks)

"""What messages and sums cost between the ranks of a plan, and what its devices are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between ranks: seconds of an empty message, and of each further byte."""

    latency: float
    seconds_a_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Of one message [s]."""
        return self.latency + num_bytes * self.seconds_a_byte


NO_LINK = Link(latency=0.0, seconds_a_byte=0.0)


class Machine:
    """A cluster as the planner asks it.

    Arguments:
        memory_limit: of every device [bytes]; None: what its kind says, if anything.
    """

    def __init__(self, cluster: Cluster, *, memory_limit: float | None) -> None:
        self.cluster = cluster
        self.num_devices = cluster.num_devices
        self._sizes = np.cumprod([level.size for level in cluster.levels])[:-1]
        slowest = np.maximum.accumulate([level.latency for level in cluster.levels])
        self._links, self._rings = (
            [Link(latency=float(a), seconds_a_byte=1 / b) for a, b in zip(slowest, bandwidths, strict=True)]
            for bandwidths in (cluster.path_bandwidths, cluster.ring_bandwidths)
        )
        kinds = {kind.name: kind for kind in cluster.kinds}
        own = [kinds[name] for name in cluster.nodes or () for _ in range(cluster.levels[0].size)]
        self._speeds = np.array([kind.speed for kind in own])
        held = [kind.memory_bytes if memory_limit is None else memory_limit for kind in own]
        self._memory = np.array([math.inf if each is None else each for each in held])
        self.fastest = float(self._speeds.max())
        self.total_speed = float(self._speeds.sum())
        self.largest_memory = float(self._memory.max())
        self.is_uniform = len(set(own)) == 1
        self._link_speeds = np.array([kind.link_speed for kind in own])

    def speed(self, ranks: Sequence[int]) -> float:
        """Of the slowest of them, times that of the profile's device."""
        return float(self._speeds[0] if self.is_uniform else self._speeds[list(ranks)].min())

    def memory(self, ranks: Sequence[int]) -> float:
        """Of the smallest of them [bytes]; infinite where nobody said."""
        return float(self._memory[0] if self.is_uniform else self._memory[list(ranks)].min())

    def between(self, src: Sequence[int], dst: Sequence[int], *, tensor: int) -> Link:
        """The slowest way between replicas of two stages that share a microbatch, tensor rank to tensor rank."""
        counts = len(src) // tensor, len(dst) // tensor
        k = np.arange(math.lcm(*counts))
        starts = (np.asarray(ranks)[::tensor][k % n] for ranks, n in zip((src, dst), counts, strict=True))
        first, last = (start[:, None] + np.arange(tensor) for start in starts)
        return self._slowest(self._links, first, last)

    def across(self, ranks: Sequence[int]) -> Link:
        """The slowest way in a ring over these."""
        if len(ranks) < 2:
            return NO_LINK
        ring = np.asarray(ranks)
        return self._slowest(self._rings, ring, np.roll(ring, -1))

    def _slowest(self, by_level: Sequence[Link], first: np.ndarray, last: np.ndarray) -> Link:
        """Of the ways between these pairs: the outermost level, and slow network cards outside a node."""
        levels = sum((first // size != last // size).astype(int) for size in self._sizes)
        link = by_level[int(np.max(levels))]
        if self.is_uniform and self._link_speeds[0] == 1:
            return link
        speeds = np.minimum(self._link_speeds[first], self._link_speeds[last])
        per_byte = np.array([each.seconds_a_byte for each in by_level])[levels]
        return replace(link, seconds_a_byte=float(np.max(np.where(levels > 0, per_byte / speeds, per_byte))))


def ring_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """A sum over D ranks (or a reduce-scatter and an all-gather): 2 (D-1)/D W / bandwidth, and 2 (D-1) latencies."""
    if num_ranks == 1:
        return 0.0
    steps = 2 * (num_ranks - 1)
    return steps * link.latency + steps / num_ranks * num_bytes * link.seconds_a_byte

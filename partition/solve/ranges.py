"""Costs of a stage of which only its own range of devices is known: what the dynamic program makes small.

Devices are counted from the END of the pipeline: the last stage stands on devices 0.., so that a stage of r replicas
with e devices from itself on to the end stands on e-r..e-1, its consumer below and its producer above.

    stage       4 3 | 2 2 2 2 | 1 | 0 ...         here r = 4, e = 6: devices 2..5
    device      0 1 | 2 3 4 5 | 6 | 7 ...

The two lanes of `stage_cost`, a microbatch, and `memory.stage_parts`, with four things that only the whole plan
tells left at the least that they can be: messages go to the neighbour's nearest device (and to no more consumers than
there are devices behind), the replicas have equal shares of them, they keep a rank as busy as those of the quickest
level do, and gradients are summed once in U = M microbatches (where M is not given, once each replica has had one).
Microbatches in flight: ceil(e/r), the warm-up of 1F1B's order plus one, and no more than a replica's share of a batch
that is flushed.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schedules.families.registry import FAMILIES, family
from ..cluster import Cluster
from ..memory import RankPlace, stage_parts
from ..stage_cost import StageSums, busiest_share, pace
from ..topology import Floats, Index, Indices, Topology
from .cut_sums import Cut, Cuts

# The families that follow PipeDream's warm-up, see `in_flight`.
SCHEDULES = tuple(sorted(each.name for each in FAMILIES.values() if each.takes_replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Stages of r replicas with e devices to the end, arrays of one shape.

    Arguments:
        replicas, in_flight: r, and the microbatches that each of them holds.
        share: of the busiest replica, as long as the slowest device takes.
        limit: bytes for tensors on the smallest device.
        ring, inward, outward: seconds a byte of gradients, and of the tensors across the cut in front and behind.
        taken: of the latter, for the consumer, if all devices behind were its replicas.
    """

    replicas: Indices
    in_flight: Indices
    share: Floats
    limit: Floats
    ring: Floats
    inward: Floats
    outward: Floats
    taken: Floats


class RangeCosts:
    """The model above for one profile on one cluster.

    Arguments:
        num_microbatches: of a batch, M.
        memory_limit: of every device [bytes]; None: what its kind says, if anything.
        beside: of it, what is certain to go to others than tensors (`memory.certain`) [bytes].
        optimizer_ratio: bytes of optimizer state a byte of parameters (2 for Adam).
        action_seconds: that the runtime takes of a rank around each action, messages apart [s].
    """

    def __init__(
        self,
        cuts: Cuts,
        cluster: Cluster,
        *,
        schedule: str,
        num_microbatches: int | None,
        memory_limit: float | None = None,
        beside: float = 0.0,
        optimizer_ratio: float = 2.0,
        action_seconds: float = 0.0,
    ) -> None:
        self.cuts, self.schedule, self.num_microbatches = cuts, schedule, num_microbatches
        self.optimizer_ratio, self.rule = optimizer_ratio, family(schedule).rule
        self.versions = self.rule.versions_kept(0)  # of the weights in any case, and for each microbatch in flight
        self.versions_in_flight = self.rule.versions_kept(1) - self.versions
        self.topology = topology = Topology(cluster, memory_limit=memory_limit)
        self.num_devices = topology.num_devices
        self.is_uniform = topology.is_uniform
        self.work = cuts.seconds / topology.fastest
        self._beside = beside
        self._action, self._busy = action_seconds, min(link.busy for link in topology.links)
        self.seconds_a_byte: Floats = np.array([link.seconds_a_byte for link in topology.links])
        # [first, last] of a range of devices: its slowest one, its smallest one, its slowest network card
        if not self.is_uniform:
            self._slowness = topology.fastest / _least(topology.speeds[::-1])
            self._memory = _least(topology.memory_bytes[::-1] - beside)
        if not topology.has_equal_links:
            self._link_slowness = 1 / _least(topology.link_speeds[::-1])

    @property
    def limit(self) -> float:
        """Bytes for tensors on each device, where all are equal."""
        return float(self.topology.memory_bytes[0]) - self._beside

    def per_replica(self) -> RangeCosts:
        """The same, without M: all replicas of a stage have equal work, whatever the batch."""
        other = copy(self)
        other.num_microbatches = None
        return other

    def ranges(self, r: Index, e: Index) -> Ranges:
        """Figures that costs depend on, elementwise, for r replicas with e devices to the end."""
        r, e = np.asarray(r), np.asarray(e)
        front, back, top = e - r, e - 1, self.num_devices - 1
        share = busiest_share(self.num_microbatches, r)
        slow_links = np.ones(()) if self.topology.has_equal_links else self._link_slowness[front, back]
        sent = self.per_byte(np.maximum(front - 1, 0), back)
        updates = r if self.num_microbatches is None else self.num_microbatches
        return Ranges(
            replicas=r,
            in_flight=self.in_flight(r, e),
            share=share if self.is_uniform else share * self._slowness[front, back],
            limit=np.asarray(self.limit) if self.is_uniform else self._memory[front, back],
            ring=self.topology.ring_of_ranges(front, back, slow_links) / updates,
            inward=self.per_byte(front, np.minimum(e, top)) / r,
            outward=sent / r,
            taken=sent / np.maximum(front, 1),
        )

    def per_byte(self, first: Index, last: Index) -> Floats:
        """Seconds a byte over the slowest link of a range of devices; slow network cards count outside a node."""
        levels = self.topology.levels_between(first, last)
        seconds: Floats = self.seconds_a_byte[levels]
        if self.topology.has_equal_links:
            return seconds
        return np.where(levels > 0, seconds * self._link_slowness[first, last], seconds)

    def in_flight(self, r: Index, e: Index) -> Indices:
        depth = -(-np.asarray(e) // r)
        if not self.rule.is_asynchronous and self.num_microbatches is not None:
            depth = np.minimum(depth, -(-self.num_microbatches // np.asarray(r)))
        return np.asarray(depth, dtype=np.intp)

    def compute(self, sums: StageSums, at: Ranges) -> Floats:
        """F and B of the busiest replica [s a microbatch]."""
        return np.asarray(sums.work / self.topology.fastest * at.share)

    def runtime(self, first: Index, last: Index) -> Floats:
        """Seconds that the runtime takes of a rank around F and B of a microbatch, at least [s]."""
        neighbours = (np.asarray(first) > 0).astype(float) + (np.asarray(last) < len(self.cuts) - 1)
        return np.asarray(2 * (self._action + self._busy * neighbours))

    def communication(self, sums: StageSums, at: Ranges) -> Floats:
        """Messages and all-reduces of gradients, or the consumer's messages [s a microbatch]."""
        own = sums.summed * at.ring + sums.before * at.inward + sums.behind * at.outward
        return np.maximum(own, sums.behind * at.taken)

    def bytes(self, sums: StageSums, at: Ranges) -> Floats:
        fixed, each, behind = self.parts(sums, replicas=at.replicas)
        return np.maximum(np.asarray(fixed + at.in_flight * each, dtype=np.float64), behind)

    def parts(self, sums: StageSums, *, replicas: Any = 1) -> tuple[Floats, Floats, Floats]:
        """Bytes on each device of a stage in any case, for each microbatch in flight, and behind a batch."""
        M, streams = self.num_microbatches, self.rule.is_asynchronous
        messages = np.inf if M is None else -(-M // np.asarray(replicas))
        place = RankPlace(
            stages=(0,), replicas=replicas, tensor=1, limit=np.inf, streams=streams, num_messages=messages
        )
        fixed, each, behind = stage_parts(sums, place, copies=self.versions + 1 + self.optimizer_ratio)
        return fixed, each + self.versions_in_flight * sums.weights, behind

    def seconds(self, first: Cut, last: Cut, at: Ranges) -> Floats:
        """Pace of the stage between two cuts [s a microbatch]; infinite where it does not fit the memory."""
        sums = self.cuts.stages(first, last)
        replicas = np.asarray(at.replicas, dtype=np.float64)
        runtime = self.runtime(first, last) * busiest_share(self.num_microbatches, replicas)
        slower = pace(work=self.compute(sums, at) + runtime, links=self.communication(sums, at))
        if not np.isfinite(at.limit).any():
            return slower
        return np.where(self.bytes(sums, at) <= at.limit, slower, np.inf)


def _least(values: Floats) -> Floats:
    """[first, last] the least of values[first..last]; infinite where the range is empty."""
    table = np.full((len(values), len(values)), np.inf)
    for first in range(len(values)):
        table[first, first:] = np.minimum.accumulate(values[first:])
    return table

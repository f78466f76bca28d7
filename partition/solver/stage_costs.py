"""What a stage costs under the default model: the bottleneck that the dynamic program makes small.

Devices are counted from the END of the pipeline: the last stage stands on devices 0.., so that a stage of r replicas
with e devices from itself on to the end stands on e-r..e-1, its consumer below and its producer above.

    stage       4 3 | 2 2 2 2 | 1 | 0 ...         here r = 4, e = 6: devices 2..5
    device      0 1 | 2 3 4 5 | 6 | 7 ...

Seconds a microbatch, the larger of (compute and communication overlap):

    compute        C ceil(M/r)/M, on the slowest device       the replica with the most; C / r where M is not given
    communication  2 (r-1)/r W / (B_s U)  +  a_in / (B_i r)  +  a_out / (B_o r)

C: F + B of the nodes; W: their parameter bytes, in a ring over the replicas once in U microbatches; a_in, a_out:
bytes that cross the two cuts, as activations one way and as gradients the other (links carry both directions at
once). B is the slowest link on the way: over the replicas (s), or over them and the nearest device of the
neighbour (i, o), slow network cards included. Latency is left to the simulator: it delays a stream, and does not slow
it down.

Bytes on a device: W (versions + 1 gradient + optimizer) + buffers + stash * in_flight, where in_flight = ceil(e/r) is
the warm-up of 1F1B's order plus one (no more than a replica's share of a batch that is flushed), and the versions are
1 (1f1b), 2 (2bw), in_flight (pipedream).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...schedules.registry import FAMILIES, family
from ..cluster import Cluster
from ..memory_use import MemoryUse
from .antichains import Cuts, Floats

# The families that follow PipeDream's warm-up, see `in_flight`.
SCHEDULES = tuple(sorted(each.name for each in FAMILIES.values() if each.takes_replicas))
Indices = npt.NDArray[np.intp]
Index = Any  # a number or an array of cuts, replicas or devices; they broadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What counts towards the memory of a device.

    Arguments:
        limit: of every device [bytes]; None: what the kinds of unequal devices say, else no limit.
        optimizer: bytes of optimizer state a byte of parameters (2 for Adam).
    """

    limit: float | None = None
    optimizer: float = 2.0


class StageCosts:
    """The model above for one profile on one cluster.

    Arguments:
        num_microbatches: of a batch, M; U = M. None: U = r, each replica adds one microbatch to an update.
        compression: of activations, divides a_in and a_out.
    """

    def __init__(
        self,
        cuts: Cuts,
        cluster: Cluster,
        *,
        schedule: str,
        num_microbatches: int | None,
        compression: float = 1.0,
        memory: Memory,
    ) -> None:
        self.cuts, self.schedule, self.num_microbatches, self.memory = cuts, schedule, num_microbatches, memory
        self.rule = family(schedule).rule
        self.num_devices = cluster.num_devices
        kinds = {kind.name: kind for kind in cluster.kinds}
        by_device = [kinds[name] for name in cluster.nodes or () for _ in range(cluster.levels[0].size)][::-1]
        self.fastest = max(kind.speed for kind in by_device)
        self.work = cuts.seconds / self.fastest
        self._slowness = self._memory = self._link_slowness = None
        if len(set(by_device)) > 1:
            # [first, last] of a range of devices: its slowest one, and its smallest one.
            self._slowness = self.fastest / _least([kind.speed for kind in by_device])
            self._memory = _least([np.inf if kind.memory_bytes is None else kind.memory_bytes for kind in by_device])
        if any(kind.link_speed != 1 for kind in by_device):
            self._link_slowness = 1 / _least([kind.link_speed for kind in by_device])
        self.crossing = cuts.crossing / compression
        self.group_sizes = np.cumprod([level.size for level in cluster.levels])
        self.seconds_a_byte: Floats = 1 / np.array(cluster.path_bandwidths)
        self.ring_seconds_a_byte: Floats = 1 / np.array(cluster.ring_bandwidths)

    def per_replica(self) -> StageCosts:
        """The same, without M: all replicas of a stage have equal work, whatever the batch."""
        other = copy(self)
        other.num_microbatches = None
        return other

    def levels(self, first: Index, last: Index) -> Indices:
        """The level that joins two devices, elementwise; 0 for a device and itself."""
        apart = [np.asarray(first) // size != np.asarray(last) // size for size in self.group_sizes[:-1]]
        return np.asarray(sum(apart), dtype=np.intp) if apart else np.zeros(np.broadcast(first, last).shape, np.intp)

    def shape(self, r: Index, e: Index) -> StageShape:
        """What the costs need to know of r replicas with e devices to the end, elementwise."""
        r, e = np.asarray(r), np.asarray(e)
        top = self.num_devices - 1
        updates = r if self.num_microbatches is None else self.num_microbatches
        share = 1 / r if self.num_microbatches is None else -(-self.num_microbatches // r) / self.num_microbatches
        return StageShape(
            share=share if self._slowness is None else share * self._slowness[e - r, e - 1],
            limit=self._limit(e - r, e - 1),
            in_flight=self.in_flight(r, e),
            sync=self._per_byte(self.ring_seconds_a_byte, e - r, e - 1) * 2 * (r - 1) / r / updates,
            inward=self._per_byte(self.seconds_a_byte, e - r, np.minimum(e, top)) / r,
            outward=self._per_byte(self.seconds_a_byte, np.maximum(e - r - 1, 0), e - 1) / r,
        )

    def _per_byte(self, by_level: Floats, first: Index, last: Index) -> Floats:
        """Seconds a byte over the slowest link of a range of devices; slow network cards count outside a node."""
        levels = self.levels(first, last)
        seconds: Floats = by_level[levels]
        if self._link_slowness is None:
            return seconds
        return np.where(levels > 0, seconds * self._link_slowness[first, last], seconds)

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are of one kind."""
        return self._slowness is None

    def slowness(self, r: int, e: int) -> float:
        """How many times as long as the fastest device the slowest one of a stage takes."""
        return 1.0 if self._slowness is None else float(self._slowness[e - r, e - 1])

    def _limit(self, first: Index, last: Index) -> Floats | None:
        """Bytes on the smallest device of a range; None: no limit."""
        if self.memory.limit is not None:
            return np.asarray(self.memory.limit)
        return None if self._memory is None else self._memory[first, last]

    def in_flight(self, r: Index, e: Index) -> Indices:
        """Microbatches that one replica holds at once."""
        depth = -(-np.asarray(e) // r)
        if not self.rule.is_asynchronous and self.num_microbatches is not None:
            depth = np.minimum(depth, -(-self.num_microbatches // np.asarray(r)))
        return np.asarray(depth, dtype=np.intp)

    def compute(self, first: Index, last: Index, shape: StageShape) -> Floats:
        """Of the busiest replica [s a microbatch]."""
        seconds: Floats = (self.work[last] - self.work[first]) * shape.share
        return seconds

    def communication(self, first: Index, last: Index, shape: StageShape) -> Floats:
        """Synchronisation and transfers [s]."""
        weights = self.cuts.parameters[last] - self.cuts.parameters[first]
        seconds: Floats = (
            weights * shape.sync + self.crossing[first] * shape.inward + self.crossing[last] * shape.outward
        )
        return seconds

    def seconds(self, first: Index, last: Index, shape: StageShape) -> Floats:
        """Of the stage between two cuts, a microbatch [s]; infinite where it does not fit the memory."""
        worst = np.maximum(self.compute(first, last, shape), self.communication(first, last, shape))
        if shape.limit is None:
            return worst
        return np.where(self.bytes(first, last, shape.in_flight) <= shape.limit, worst, np.inf)

    def parts(self, first: Index, last: Index) -> tuple[Floats, Floats]:
        """Bytes of a stage held in any case, and for each microbatch in flight."""
        cuts = self.cuts
        weights, buffers, stash = (each[last] - each[first] for each in (cuts.parameters, cuts.buffers, cuts.stash))
        versions = self.rule.versions_kept(0)
        each_in_flight = self.rule.versions_kept(1) - versions
        fixed = weights * (versions + 1 + self.memory.optimizer) + buffers
        return fixed, stash + weights * each_in_flight

    def memory_use(self, first: int, last: int, in_flight: int) -> MemoryUse:
        """`bytes` of one stage by data structure."""
        cuts = self.cuts
        weights, buffers, stash = (
            max(0.0, float(each[last] - each[first])) for each in (cuts.parameters, cuts.buffers, cuts.stash)
        )
        return MemoryUse(
            parameters=weights * self.rule.versions_kept(in_flight),
            gradients=weights,
            optimizer=weights * self.memory.optimizer,
            buffers=buffers,
            activations=stash * in_flight,
        )

    def bytes(self, first: Index, last: Index, in_flight: Index) -> Floats:
        """On each device of the stage [bytes]."""
        fixed, each = self.parts(first, last)
        return np.asarray(fixed + each * in_flight, dtype=np.float64)


def _least(values: list[float]) -> Floats:
    """[first, last] the least of values[first..last]; infinite where the range is empty."""
    table = np.full((len(values), len(values)), np.inf)
    for first in range(len(values)):
        table[first, first:] = np.minimum.accumulate(values[first:])
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Share of the busiest replica, memory limit, microbatches in flight, seconds a byte (ring, cut before, behind)."""

    share: Floats
    limit: Floats | None
    in_flight: Indices
    sync: Floats
    inward: Floats
    outward: Floats

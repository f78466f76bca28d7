"""The dynamic program over stages: exact for the default model on any hierarchy of links, or on a coarser grain.

    best[i, e] = min over j, r of max{ seconds(i, j, r, e), best[j, e - r] }        the bottleneck after cut i (`solve`)

seconds(i, j, r, e) is the least that the stage between cuts i and j can take [s a microbatch], as far as its own range
of devices determines it. Devices are counted from the END of the pipeline: the last stage has devices 0.., so that a
stage of r replicas with e devices from itself to the end has devices e-r..e-1, its consumer those below and its
producer those above.

    stage       4 3 | 2 2 2 2 | 1 | 0 ...         here r = 4, e = 6: devices 2..5
    device      0 1 | 2 3 4 5 | 6 | 7 ...

It has the two lanes of `stage_cost`, per microbatch, and the memory of `bytes_by_in_flight`. Four things that only the
whole plan shows have their least values: messages go to the neighbour's nearest device (and to no more consumers than
there are devices after the stage); the replicas have equal shares of them; messages keep a rank as busy as those over
the quickest level of links; and gradients are summed once in U = M microbatches (where M is not given, once each
replica has had one). Microbatches in flight: ceil(e/r), the warm-up of 1F1B's order plus one, and, of a batch that is
flushed, no more than a replica's share of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ...schedules.families.registry import FAMILIES, family
from ..cluster import Cluster
from ..memory import RankPlace, bytes_by_in_flight
from ..stage_cost import StageDevices, StageSeconds, StageSums, busiest_share, least_rounds, stage_seconds
from ..topology import Floats, Index, Indices, Topology
from .cut_sums import Cut, Cuts, thinned
from .orders import own_ranks

# The families that follow PipeDream's warm-up, see `in_flight`.
SCHEDULES = tuple(sorted(each.name for each in FAMILIES.values() if each.takes_replicas))
MAX_STEPS = 6e7  # elementary ones; about 2 s
_MOST_LOOKED_AT = 16  # for each candidate that is returned
_BLOCK = 1 << 11  # pairs of replicas and devices that are looked at together
_LEAST_CUTS = 100  # that are looked at before devices are taken one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Stages of r replicas with e devices to the end, arrays of one shape.

    Arguments:
        replicas, in_flight: r, and the microbatches that each of them holds.
        share: of a batch that the busiest replica runs.
        limit: bytes for tensors on the smallest device.
        on: devices and links, of which each microbatch has its part of the sums and of the messages of a replica.
        taken: seconds a byte of messages to the next stage for that, if all devices after it were its replicas.
    """

    replicas: Indices
    in_flight: Indices
    share: Floats
    limit: Floats
    on: StageDevices
    taken: Floats


class DeviceRow:
    """Few devices in any order, from the pipeline's first to its last.

    `rings`, `exchanges`, `inward`, `arriving`, `outward`: [front, e] seconds a byte of devices front..e-1, numbered
    from the end: of sums over them, of exchanges of parts, and the least of messages to a stage that has the devices
    from e on, of those from it, and of those to one that has the last devices before `front`.
    """

    def __init__(self, topology: Topology, devices: Sequence[int]) -> None:
        self.topology, self.devices, back, size = topology, devices, devices[::-1], len(devices)
        self.rings, self.exchanges, self.inward, self.arriving, self.outward = np.zeros((5, size, size + 1))
        for a, b in combinations(range(size + 1), 2):
            self.rings[a, b] = topology.ring(sorted(back[a:b])).seconds_a_byte
            self.exchanges[a, b] = topology.exchange(sorted(back[a:b])).seconds_a_byte
        for a, b, c in combinations(range(size + 1), 3):
            stages = sorted(back[b:c]), sorted(back[a:b])
            there, home = (topology.between(*pair, tensor=1).seconds_a_byte for pair in (stages, stages[::-1]))
            self.inward[a, b] = min(self.inward[a, b] or home, home)
            self.arriving[a, b] = min(self.arriving[a, b] or there, there)
            self.outward[b, c] = min(self.outward[b, c] or there, there)


class RangeCosts:
    """The model above for one profile on one cluster.

    Arguments:
        cluster: with its devices in their order; or these in another.
        num_microbatches: of a batch, M.
        memory_limit: of every device [bytes]; None: what its kind, or the row's topology, says, if anything.
        beside: of it, what others than tensors take at least (`memory.context_bytes`) [bytes].
        optimizer_ratio: bytes of optimizer state a byte of parameters (2 for Adam).
        action_seconds: that the runtime takes of a rank around each action, messages apart [s].
    """

    def __init__(
        self,
        cuts: Cuts,
        cluster: Cluster | DeviceRow,
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
        always = self.rule.versions_kept(0)
        self.versions = (always, self.rule.versions_kept(1) - always)  # in any case, for each microbatch in flight
        self.row = row = cluster if isinstance(cluster, DeviceRow) else None
        self.topology = topology = (
            cluster.topology if isinstance(cluster, DeviceRow) else Topology(cluster, memory_limit=memory_limit)
        )
        self.num_devices = topology.num_devices
        self.is_uniform = topology.is_uniform
        self.work = cuts.seconds / topology.fastest
        self._beside = beside
        # Of a sum's seconds, what an exchange of parts takes at least: around a flat ring all is sent over its slowest
        # level, and in an exchange, to each member of another host, over that which joins both.
        beyond = [ring.seconds_a_byte for ring in topology.rings[1:]] if topology.is_flat else []
        self._part = min(beyond, default=1.0) / max(beyond, default=1.0) / 2
        self._action, self._busy = action_seconds, min(link.busy for link in topology.links)
        self._busy_a_byte = min(link.busy_a_byte for link in topology.links)
        self.seconds_a_byte: Floats = np.array([link.seconds_a_byte for link in topology.links])
        # [first, last] of a range of devices: its slowest one, its smallest one, its slowest network card
        back = (range(self.num_devices) if row is None else row.devices)[::-1]
        if not self.is_uniform:
            self._speeds = _least(topology.speeds[list(back)])
            self._memory = _least(topology.memory_bytes[list(back)] - beside)
        if not topology.has_equal_links:
            self._link_slowness = 1 / _least(topology.link_speeds[::-1])

    def per_replica(self) -> RangeCosts:
        """A copy of these costs for a batch of any size (M None): all replicas of a stage have equal work."""
        other = copy(self)
        other.num_microbatches = None
        return other

    def ranges(self, r: Index, e: Index) -> Ranges:
        """Figures that costs depend on, elementwise, for r replicas with e devices to the end."""
        r, e = np.asarray(r), np.asarray(e)
        front, back = e - r, e - 1
        slow_links = np.ones(()) if self.topology.has_equal_links else self._link_slowness[front, back]
        row = self.row
        ring = self.topology.ring_of_ranges(front, back, slow_links) if row is None else row.rings[front, e]
        sent = self.per_byte(np.maximum(front - 1, 0), back) if row is None else row.outward[front, e]
        updates = r if self.num_microbatches is None else self.num_microbatches
        ring = ring / updates
        part = ring * self._part if row is None else row.exchanges[front, e] / updates
        gradients, weights, gathers_ahead, *_ = self.cuts.rounds
        return Ranges(
            replicas=r,
            in_flight=self.in_flight(r, e),
            share=busiest_share(self.num_microbatches, r),
            limit=self.topology.memory_bytes[0] - self._beside if self.is_uniform else self._memory[front, back],
            on=StageDevices(
                speed=self.topology.fastest if self.is_uniform else self._speeds[front, back],
                inward=self.inward(front, e) / r,
                outward=sent / r,
                shared=(1.0, 0.0, 0.0) if self.topology.shares_cards else (),
                rounds=least_rounds(ring * gradients, part * gradients, part * weights, gathers_ahead=gathers_ahead),
            ),
            taken=sent / np.maximum(front, 1),
        )

    def inward(self, front: Index, begin: Index, *, arriving: bool = False) -> Floats:
        """[s/byte] from a stage with devices from `front` on, numbered from the end, to one with those from `begin`, or
        `arriving` from there."""
        if self.row is not None:
            return np.asarray((self.row.arriving if arriving else self.row.inward)[front, begin])
        return self.per_byte(front, np.minimum(begin, self.num_devices - 1))

    def per_byte(self, first: Index, last: Index) -> Floats:
        """[s/byte] over the slowest link among devices `first`..`last`, numbered from the end of the pipeline; slow
        network cards count where the range leaves a node."""
        levels = self.topology.levels_between(first, last)
        seconds: Floats = self.seconds_a_byte[levels]
        if self.topology.has_equal_links:
            return seconds
        return np.where(levels > 0, seconds * self._link_slowness[first, last], seconds)

    def in_flight(self, r: Index, e: Index) -> Indices:
        """Microbatches that each of r replicas holds at most, with e devices to the end (see the module)."""
        depth = -(-np.asarray(e) // r)
        if not self.rule.is_asynchronous and self.num_microbatches is not None:
            depth = np.minimum(depth, -(-self.num_microbatches // np.asarray(r)))
        return np.asarray(depth, dtype=np.intp)

    def stage_seconds(self, sums: StageSums, first: Cut, last: Cut, at: Ranges, *, shards: Index = 1) -> StageSeconds:
        """Seconds of the stages between cuts `first` and `last`, with `sums` of their nodes, on the ranges `at`."""
        neighbours = (np.asarray(first) > 0).astype(float) + (np.asarray(last) < len(self.cuts) - 1)
        on = replace(at.on, message_overhead=self._busy * neighbours, message_bytes=(self._busy_a_byte,) * 2)
        return stage_seconds(sums, on, shards=shards, action=self._action)

    def lanes(self, sums: StageSums, seconds: StageSeconds, at: Ranges) -> tuple[Floats, Floats]:
        """Work of the busiest replica; messages and sums of gradients, or the consumer's messages [s a microbatch]."""
        own = seconds.sending + seconds.collectives
        if self.topology.shares_cards:  # each may go over another card
            own = np.max(np.broadcast_arrays(seconds.sending, seconds.sending_shared, seconds.collectives), axis=0)
        return np.asarray(seconds.work * at.share), np.maximum(own, sums.after * at.taken)

    def bytes(self, sums: StageSums, at: Ranges) -> Floats:
        """On each device of a stage."""
        M, streams = self.num_microbatches, self.rule.is_asynchronous
        messages = np.inf if M is None else -(-M // at.replicas)
        place = RankPlace(
            stages=(0,), replicas=at.replicas, tensor=1, limit=np.inf, streams=streams, num_messages=messages
        )
        held = bytes_by_in_flight(sums, place, versions=self.versions, optimizer_ratio=self.optimizer_ratio)
        return held(at.in_flight)

    def seconds(self, first: Cut, last: Cut, at: Ranges) -> Floats:
        """Pace of the stage between two cuts [s a microbatch]; infinite where it does not fit the memory."""
        sums = self.cuts.stages(first, last)
        slower = np.maximum(*self.lanes(sums, self.stage_seconds(sums, first, last, at), at))
        if not np.isfinite(at.limit).any():
            return slower
        return np.where(self.bytes(sums, at) <= at.limit, slower, np.inf)


def _least(values: Floats) -> Floats:
    """[first, last] the least of values[first..last]; infinite where the range is empty."""
    table = np.full((len(values), len(values)), np.inf)
    for first in range(len(values)):
        table[first, first:] = np.minimum.accumulate(values[first:])
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedStage:
    """A stage between two cuts on `replicas` devices, with `devices` from itself on to the end of the pipeline."""

    first: int
    last: int
    replicas: int
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Stages in order, with the bottleneck [s a microbatch] and a lower bound of what any plan can reach."""

    stages: tuple[SolvedStage, ...]
    seconds: float
    bound: float

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)


def grain_of(costs: RangeCosts, *, straight: bool) -> tuple[int, int]:
    """How many cuts the program looks at, and of how many devices replicas are multiples. All and 1, or, where these
    are more than MAX_STEPS, fewer cuts, and whole nodes."""

    def shapes(unit: int) -> float:
        units = costs.num_devices // unit
        return units if straight else units * (units + 1) / 2

    num_cuts, unit, sizes = len(costs.cuts), 1, costs.topology.level_sizes
    if float(costs.cuts.inside.sum()) * shapes(1) <= MAX_STEPS:
        return num_cuts, 1
    least, node = min(num_cuts, _LEAST_CUTS), sizes[0] if len(sizes) > 1 else 1
    while not straight and 4 * unit <= costs.num_devices and least**2 * shapes(unit) > 2 * MAX_STEPS:
        unit = node if unit < node else 2 * unit
    return min(num_cuts, max(3, int((2 * MAX_STEPS / shapes(unit)) ** 0.5))), unit


def solve(costs: RangeCosts, *, straight: bool = False, num_candidates: int = 1) -> list[Solution]:
    """The plans with the least bottleneck, the best first; none where nothing fits the memory.

        best[i, e] = min over j, r of max{ seconds(i, j, r, e), best[j, e - r] },   best[n-1, 0] = 0

    best[i, e] is the bottleneck of all that lies after cut i, on exactly e devices. The plan is the least best[0, e];
    not all devices need be used. Further candidates begin with another first stage or use another number of devices,
    and of several with the same replicas only the best is kept.

    Ties: the fewest devices; then, from the first stage on, the longest stage (the last cut in the order of `Cuts`),
    then the fewest replicas.

    Arguments:
        straight: no replicas.
        num_candidates: plans to return, at most.

    O(n^2 D^2) elementary steps for n cuts and D devices (O(n^2 D) where straight), O(n D^2) numbers; of what is too
    large so much is looked at as `grain_of` says, and a plan is the best of that.
    """
    return _Table(costs, straight=straight).candidates(num_candidates)


def stage_ranks(
    costs: RangeCosts, solution: Solution, order: Sequence[int], cluster: Cluster
) -> tuple[tuple[int, ...], ...]:
    """The cluster's own ranks of each stage; `costs` are those of its nodes in `order`."""
    # The pipeline ends at the last device; where whole outermost groups stay idle, it moves to the first ones.
    idle = costs.num_devices - solution.stages[0].devices
    group = cluster.num_devices // cluster.levels[-1].size
    moved = idle // group * group if costs.is_uniform else 0
    size = cluster.levels[0].size
    ranks = []
    for stage in solution.stages:
        begin = costs.num_devices - stage.devices - moved
        ranks.append(own_ranks(order, size, range(begin, begin + stage.replicas)))
    return tuple(ranks)


# Pairs of replicas and devices: [pairs] devices, where each number of them begins, and the pairs' ranges.
_Block = tuple[Indices, Indices, Ranges]


class _Table:
    def __init__(self, costs: RangeCosts, *, straight: bool) -> None:
        self.costs, (most, self.unit) = costs, grain_of(costs, straight=straight)
        cuts = thinned(costs.cuts, most)
        self.inside = costs.cuts.inside & np.isin(np.arange(len(costs.cuts)), cuts)
        self.most = [1 if straight else e for e in range(costs.num_devices // self.unit + 1)]  # replicas, by devices
        self.blocks = list(self._blocks())
        self.best: Floats = np.full((len(costs.cuts), costs.num_devices + 1), np.inf)
        self.best[-1, 0] = 0.0
        for first in cuts[-2:0:-1]:
            for block in self.blocks:
                (devices, starts, _), values = block, self._values(first, block)
                self.best[first, devices[starts]] = np.minimum.reduceat(values.min(axis=0), starts)

    def _blocks(self) -> Iterator[_Block]:
        """All pairs of replicas and devices, so many at once that their figures stay in the cache."""
        first, most = 1, len(self.most) - 1
        while first <= most:
            last, size = first, self.most[first]
            while last < most and size + self.most[last + 1] <= _BLOCK:
                last += 1
                size += self.most[last]
            yield self._block(first, last)
            first = last + 1

    def _block(self, first: int, last: int) -> _Block:
        """Pairs with `first` to `last` devices, in units: by devices, then by replicas, both ascending."""
        counts = np.array(self.most[first : last + 1])
        devices = np.repeat(np.arange(first, last + 1), counts)
        starts = np.cumsum(counts) - counts
        replicas = 1 + np.arange(len(devices)) - np.repeat(starts, counts)
        replicas, devices = replicas * self.unit, devices * self.unit
        return devices, starts, self.costs.ranges(replicas, devices)

    def _lasts(self, first: int) -> Indices:
        """Cuts at which a stage from `first` may end, the last ones first."""
        return np.flatnonzero(self.inside[first])[::-1]

    def _values(self, first: int, block: _Block) -> Floats:
        """[last, pair] bottleneck of all after `first`."""
        lasts, (devices, _, at) = self._lasts(first), block
        seconds = self.costs.seconds(first, lasts[:, None], at)
        rest = np.take(self.best[lasts], devices - at.replicas, axis=1)
        return np.maximum(seconds, rest, out=rest)

    def candidates(self, limit: int) -> list[Solution]:
        lasts, looked_at = self._lasts(0), _MOST_LOOKED_AT * limit
        columns: list[tuple[Indices | Floats, ...]] = []
        for block in self.blocks:
            values = self._values(0, block)
            bar = np.partition(values, looked_at, axis=None)[looked_at] if values.size > looked_at else np.inf
            row, pair = np.nonzero(values <= bar)
            devices_of, _, ranges = block
            columns.append((ranges.replicas[pair], row, devices_of[pair], values[row, pair]))
        replica_counts, rows, device_counts, best = (np.concatenate(each) for each in zip(*columns, strict=True))
        bound = float(best.min())
        found: list[Solution] = []
        for at in np.lexsort((replica_counts, rows, device_counts, best))[:looked_at]:
            seconds = float(best[at])
            if len(found) == limit or not np.isfinite(seconds):
                break
            replicas, devices = int(replica_counts[at]), int(device_counts[at])
            begin = SolvedStage(first=0, last=int(lasts[int(rows[at])]), replicas=replicas, devices=devices)
            stages = (begin, *self._rest(begin.last, devices - replicas))
            solution = Solution(stages=stages, seconds=seconds, bound=bound)
            if all(solution.replicas != other.replicas for other in found):
                found.append(solution)
        return found

    def _rest(self, first: int, devices: int) -> list[SolvedStage]:
        """The stages after cut `first` on `devices` devices that attain `best`, by the rule for ties."""
        stages = []
        while devices:
            block = self._block(devices // self.unit, devices // self.unit)
            values = self._values(first, block)
            row, column = np.argwhere(values <= self.best[first, devices])[0]
            last, replicas = int(self._lasts(first)[row]), int(block[2].replicas[column])
            stages.append(SolvedStage(first=first, last=last, replicas=replicas, devices=devices))
            first, devices = last, devices - replicas
        return stages

"""The dynamic program over stages: exact for the default model on any hierarchy of links, or on a coarser grain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..topology import Floats, Indices
from .cut_sums import thinned
from .orders import own_ranks
from .ranges import RangeCosts, Ranges

MAX_STEPS = 6e7  # elementary ones; about 2 s
_MOST_LOOKED_AT = 16  # for each candidate that is returned
_BLOCK = 1 << 14  # pairs of replicas and devices that are looked at together
_LEAST_CUTS = 100  # that are looked at before devices are taken one by one


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

    best[i, e] is the bottleneck of all that lies behind cut i, on exactly e devices. The plan is the least best[0, e];
    not all devices need be used. Further candidates begin with another first stage or use another number of devices,
    and of several with the same replicas the best stands for all.

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
        """[last, pair] bottleneck behind `first`."""
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
        stages = []
        while devices:
            block = self._block(devices // self.unit, devices // self.unit)
            values = self._values(first, block)
            row, column = np.argwhere(values <= self.best[first, devices])[0]
            last, replicas = int(self._lasts(first)[row]), int(block[2].replicas[column])
            stages.append(SolvedStage(first=first, last=last, replicas=replicas, devices=devices))
            first, devices = last, devices - replicas
        return stages

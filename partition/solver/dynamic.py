"""The dynamic program over stages: exact for the default model on any hierarchy of links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..topology import Floats
from .ranges import RangeCosts

MAX_STEPS = 4e8  # elementary ones; about 2 s
_MOST_LOOKED_AT = 16  # for each candidate that is returned


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
        """[S] replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)


def num_steps(costs: RangeCosts, *, straight: bool) -> float:
    """Elementary steps that `solve` would take."""
    devices = costs.num_devices
    shapes = devices if straight else devices * (devices + 1) / 2
    return float(costs.cuts.inside.sum()) * shapes


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

    O(n^2 D^2) elementary steps for n cuts and D devices (O(n^2 D) where straight), O(n D^2) numbers.
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
        ranks.append(tuple(order[at // size] * size + at % size for at in range(begin, begin + stage.replicas)))
    return tuple(ranks)


class _Table:
    def __init__(self, costs: RangeCosts, *, straight: bool) -> None:
        self.costs = costs
        num_cuts, num_devices = len(costs.cuts), costs.num_devices
        pairs = [(r, e) for e in range(1, num_devices + 1) for r in range(1, 2 if straight else e + 1)]
        self.replicas, self.devices = np.array([r for r, _ in pairs]), np.array([e for _, e in pairs])
        self.before = self.devices - self.replicas
        self.starts = np.searchsorted(self.devices, np.arange(1, num_devices + 1))
        self.at = costs.ranges(self.replicas, self.devices)
        self.best: Floats = np.full((num_cuts, num_devices + 1), np.inf)
        self.best[-1, 0] = 0.0
        for first in range(num_cuts - 2, 0, -1):
            _, values = self._values(first)
            self.best[first, 1:] = np.minimum.reduceat(values.min(axis=0), self.starts)

    def _values(self, first: int) -> tuple[np.ndarray, Floats]:
        """Cuts at which a stage from `first` may end, the last ones first; [cut, pair] bottleneck behind `first`."""
        lasts = np.flatnonzero(self.costs.cuts.inside[first])[::-1]
        seconds = self.costs.seconds(first, lasts[:, None], self.at)
        return lasts, np.maximum(seconds, self.best[lasts][:, self.before])

    def candidates(self, limit: int) -> list[Solution]:
        lasts, values = self._values(0)
        row, pair = np.divmod(np.arange(values.size), values.shape[1])
        order = np.lexsort((self.replicas[pair], row, self.devices[pair], values.ravel()))
        bound = float(values.min())
        found: list[Solution] = []
        for at in order[: _MOST_LOOKED_AT * limit]:
            seconds = float(values[row[at], pair[at]])
            if len(found) == limit or not np.isfinite(seconds):
                break
            replicas, devices = int(self.replicas[pair[at]]), int(self.devices[pair[at]])
            begin = SolvedStage(first=0, last=int(lasts[row[at]]), replicas=replicas, devices=devices)
            stages = (begin, *self._rest(begin.last, devices - replicas))
            solution = Solution(stages=stages, seconds=seconds, bound=bound)
            if all(solution.replicas != other.replicas for other in found):
                found.append(solution)
        return found

    def _rest(self, first: int, devices: int) -> list[SolvedStage]:
        stages = []
        while devices:
            lasts, values = self._values(first)
            chosen = slice(self.starts[devices - 1], self.starts[devices] if devices < len(self.starts) else None)
            row, column = np.argwhere(values[:, chosen] <= self.best[first, devices])[0]
            replicas = int(self.replicas[chosen][column])
            stages.append(SolvedStage(first=first, last=int(lasts[row]), replicas=replicas, devices=devices))
            first, devices = int(lasts[row]), devices - replicas
        return stages

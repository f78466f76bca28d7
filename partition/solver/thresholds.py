"""For very many devices: search for the least bottleneck that few enough devices can keep.

Where no stage takes longer than T, fewer devices behind a cut are never worse on links of one level: the rest of the
pipeline has more of them, and its stages hold fewer microbatches. So one number a cut is enough:

    need[i] = min over j of need[j] + (fewest replicas with which the stage i..j takes at most T)

On several levels it does matter where a stage begins. Then the same search with the fastest link everywhere gives a
lower bound, and with each stage charged for the widest level that it and its neighbours touch, a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..topology import Floats, Indices
from .dynamic import Solution, SolvedStage
from .ranges import RangeCosts

_SECTIONS = 8
_ROUNDS = 20
_TOLERANCE = 1e-7  # where the plan is the best one but for this; a bound and a guess need less
_COARSE = 1e-5
_SLACK = 1e-12  # of divisions that decide how many replicas are needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Levels of links that a stage may use, and whether it must then stand where they reach."""

    chosen: tuple[int, ...]
    place: bool


FASTEST = Levels(chosen=(0,), place=False)


def solve_large(costs: RangeCosts, *, straight: bool = False) -> Solution | None:
    """A plan with its bottleneck, and a lower bound for any plan; None where nothing fits the memory.

    On one level the plan is the best to 1e-7, relative. O(n^2 L) for each threshold, of which there are 8 in each of
    about 10 rounds; n cuts, L levels; O(n^2) numbers.
    """
    search = _Search(costs, straight=straight)
    bound, fastest = search.bracket(FASTEST, low=float(costs.work[-1]) / costs.num_devices)
    if fastest is None:
        return None
    if len(costs.topology.level_sizes) == 1:
        stages = search.stages(fastest, FASTEST)
    else:
        every = Levels(chosen=tuple(range(len(costs.topology.level_sizes))), place=True)
        _, reached = search.bracket(every, low=bound)
        if reached is None:
            return None
        stages = search.stages(reached, every)
    seconds = max(
        float(costs.seconds(stage.first, stage.last, costs.ranges(stage.replicas, stage.devices))) for stage in stages
    )
    return Solution(stages=tuple(stages), seconds=seconds, bound=min(bound, seconds))


class _Search:
    def __init__(self, costs: RangeCosts, *, straight: bool) -> None:
        self.costs, self.straight = costs, straight
        self.tolerance = _TOLERANCE if len(costs.topology.level_sizes) == 1 else _COARSE
        self.group_sizes = np.cumprod(costs.topology.level_sizes)
        self.lasts = [np.flatnonzero(row) for row in costs.cuts.inside]

    def bracket(self, levels: Levels, *, low: float) -> tuple[float, float | None]:
        """A time that is too short (or `low`), and one that is enough, not far above; None where none is."""
        costs = self.costs
        slowest = max(float(costs.seconds_a_byte[-1]), costs.topology.rings[-1].seconds_a_byte)
        most = 2 * float(costs.cuts.crossing.max()) + 2 * float(costs.cuts.parameters[-1])
        runtime = float(costs.runtime(1, np.arange(len(costs.cuts))).max())
        high = 2 * (float(costs.work[-1]) + runtime + slowest * most)
        low, high = max(low, 1e-300), max(high, low, 1e-300)
        if not self._enough(np.array([high]), levels)[0]:
            return low, None
        if self._enough(np.array([low]), levels)[0]:
            return low, low
        for _ in range(_ROUNDS):
            if high <= low * (1 + self.tolerance):
                break
            grid = np.geomspace(low, high, _SECTIONS + 2)
            enough = np.append(self._enough(grid[1:-1], levels), True)
            at = int(enough.argmax())
            low, high = float(grid[at]), float(grid[at + 1]) if at < _SECTIONS else high
        return low, high

    def _enough(self, times: Floats, levels: Levels) -> np.ndarray:
        return self._need(times, levels)[:, 0] <= self.costs.num_devices

    def _need(self, times: Floats, levels: Levels) -> Floats:
        """[time, cut] the fewest devices behind each cut."""
        need = np.full((len(times), len(self.costs.cuts)), np.inf)
        need[:, -1] = 0
        for first in range(len(self.costs.cuts) - 2, -1, -1):
            lasts = self.lasts[first]
            need[:, first] = self._with_stage((first, lasts), need[:, lasts], times, levels).min(axis=1)
        return need

    def _with_stage(self, stage: tuple[int, Indices], behind: Floats, times: Floats, levels: Levels) -> Floats:
        """[time, last] devices behind `first` where the stage ends at each of `lasts`."""
        (first, lasts), costs = stage, self.costs
        time = times[:, None]
        work = costs.work[lasts] - costs.work[first] + costs.runtime(first, lasts)
        least = self._least_for_work(work, time)
        several = np.maximum(least, 2.0)  # replicas, which hold a bucket of gradients as well
        if np.isfinite(costs.limit):
            alone, together = self._least_for_memory(first, lasts, behind)
            least, several = np.maximum(least, alone), np.maximum(several, together)
        end = costs.num_devices - (first > 0)
        fewest = np.full(behind.shape, np.inf)
        for level in levels.chosen:
            replicas = self._least_for_links(stage, time, least, level)
            if self.straight:
                replicas = np.where(replicas > 1, np.inf, replicas)
            elif np.isfinite(costs.limit):
                more = self._least_for_links(stage, time, several, level)
                replicas = np.where(replicas > 1, more, replicas)
            total = behind + replicas
            total[~(total <= end)] = np.inf
            if levels.place and level < len(costs.topology.level_sizes) - 1:
                size = self.group_sizes[level]
                reach = total - (0 if first else 1)
                with np.errstate(invalid="ignore"):
                    apart = np.maximum(behind - 1, 0) // size != reach // size
                total[apart] = np.inf
            np.minimum(fewest, total, out=fewest)
        return fewest

    def _least_for_work(self, work: Floats, time: Floats) -> Floats:
        """The fewest replicas whose busiest one computes for at most `time` a microbatch."""
        batch = self.costs.num_microbatches
        if batch is None:
            return np.maximum(np.ceil(work / time * (1 - _SLACK)), 1.0)
        with np.errstate(divide="ignore"):
            most = np.floor(batch * time / work * (1 + _SLACK))  # microbatches that the busiest may have
            return np.maximum(np.ceil(batch / most), 1.0)

    def _least_for_links(self, stage: tuple[int, Indices], time: Floats, least: Floats, level: int) -> Floats:
        """The fewest replicas, at least `least`, with communication of at most `time`."""
        (first, lasts), costs = stage, self.costs
        crossing = (costs.cuts.crossing[first] + costs.cuts.crossing[lasts]) * costs.seconds_a_byte[level]
        summed = costs.cuts.weights(first, lasts) - costs.cuts.apart(first, lasts)
        ring = 2 * summed * costs.topology.rings[level].seconds_a_byte
        with np.errstate(divide="ignore", invalid="ignore"):
            if costs.num_microbatches is not None:
                # crossing/r + ring (1 - 1/r) / U <= T: a line in 1/r.
                ring = ring / costs.num_microbatches
                room = time - ring
                bound = (crossing - ring) / room
                lower = np.where(room > 0, np.ceil(bound * (1 - _SLACK)), 1.0)
                upper = np.where(room < 0, np.floor(bound * (1 + _SLACK)), np.inf)
                upper = np.where((room == 0) & (crossing > ring), 0.0, upper)
                replicas = np.maximum(least, lower)
                return np.where(replicas <= upper, replicas, np.inf)
            # crossing/r + ring (r-1)/r^2 <= T: T r^2 - (crossing + ring) r + ring >= 0, outside the roots.
            middle = (crossing + ring) / (2 * time)
            root = np.sqrt(np.maximum(middle**2 - ring / time, 0.0))
            is_enough = (least <= (middle - root) * (1 + _SLACK)) | (middle**2 < ring / time)
            return np.where(is_enough, least, np.maximum(least, np.ceil((middle + root) * (1 - _SLACK))))

    def _least_for_memory(self, first: int, lasts: Indices, behind: Floats) -> tuple[Floats, Floats]:
        """The fewest replicas with which as many microbatches as are in flight fit: one, and more than one."""
        costs = self.costs
        sums = costs.cuts.stages(first, lasts)
        found = []
        for least in (1, 2):
            fixed, each, after = costs.parts(sums, replicas=least)
            replicas = self._least_for_room(costs.limit - fixed, each, behind)
            found.append(np.where(after <= costs.limit, replicas, np.inf))
        return found[0], found[1]

    def _least_for_room(self, room: Floats, each: Floats, behind: Floats) -> Floats:
        """The same, where `room` bytes are left for microbatches of `each`."""
        costs = self.costs
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(each > 0, np.floor(room / each * (1 + _SLACK)), np.inf)
            fits = np.where(room < 0, 0.0, fits)
            replicas = np.where(behind > 0, np.ceil(behind / (fits - 1)), 1.0)  # 1 + ceil(behind / r) <= fits
            replicas = np.where((fits <= 1) & (behind > 0), np.inf, replicas)
            if not costs.rule.is_asynchronous and costs.num_microbatches is not None:
                replicas = np.minimum(replicas, np.ceil(costs.num_microbatches / fits))
        return np.where(fits < 1, np.inf, replicas)

    def stages(self, time: float, levels: Levels) -> list[SolvedStage]:
        """The plan behind a time that is enough; ties: the longest stage."""
        times = np.array([time])
        need = self._need(times, levels)
        first, stages = 0, []
        while first < len(self.costs.cuts) - 1:
            lasts = self.lasts[first]
            total = self._with_stage((first, lasts), need[:, lasts], times, levels)[0]
            chosen = int(np.flatnonzero(total <= need[0, first])[-1])
            last, devices = int(lasts[chosen]), int(need[0, first])
            stages.append(SolvedStage(first=first, last=last, replicas=devices - int(need[0, last]), devices=devices))
            first = last
        return stages

"""A configuration on the ranks of a cluster: links between its stages, rings over its replicas, its devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ...schedules.timing.costs import Ties
from ..topology import NO_TRANSFER, Topology, TransferTime
from .space import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices and links of a configuration's stages.

    Arguments:
        inward, outward: [S] links to the stage in front and behind; none at the ends.
        rings, exchanges: [P] over the replicas of a stage.
        speeds: [P] of the slowest device of a stage, times that of the profile's.
        limits: [P] memory of its smallest device [bytes].
    """

    inward: tuple[TransferTime, ...]
    outward: tuple[TransferTime, ...]
    rings: tuple[TransferTime, ...]
    exchanges: tuple[TransferTime, ...]
    speeds: tuple[float, ...]
    limits: tuple[float, ...]


class Placements:
    """Placements of configurations; equal ones are found once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._known: dict[object, Placement] = {}
        self._sums: dict[object, TransferTime] = {}

    def of(self, configuration: Configuration) -> Placement:
        """O(devices) the first time."""
        c = configuration
        key = (c.pipeline, c.data, c.tensor, c.positions, c.ranks)
        if key not in self._known:
            self._known[key] = self._find(c)
        return self._known[key]

    def ties(self, c: Configuration, tied: Iterable[tuple[tuple[int, ...], float]]) -> Ties:
        """(stages, seconds) of sums over all ranks of stages that hold the same weights; none for stages on one place.

        Arguments:
            tied: likewise, with bytes in place of seconds.
        """
        together: dict[tuple[int, ...], float] = {}
        for stages, shared in tied:
            together[stages] = together.get(stages, 0.0) + shared
        seconds = {stages: self._sum(c, stages).seconds(shared) for stages, shared in together.items() if shared > 0}
        return tuple(each for each in seconds.items() if each[1] > 0)

    def _sum(self, c: Configuration, stages: Iterable[int]) -> TransferTime:
        places = tuple(sorted({c.positions[stage] for stage in stages}))
        if len(places) == 1:
            return NO_TRANSFER
        key = (c.pipeline, c.data, c.tensor, places, c.ranks)
        if key not in self._sums:
            ranks = [rank for place in places for rank in c.stage_ranks[place][:: c.tensor]]
            self._sums[key] = self.topology.ring(ranks)
        return self._sums[key]

    def _find(self, c: Configuration) -> Placement:
        topology, ranks = self.topology, c.stage_ranks
        ways = dict.fromkeys(pairwise(c.positions), NO_TRANSFER)  # a rank sends itself nothing
        for a, b in ways:
            if a != b:
                ways[a, b] = topology.between(ranks[a], ranks[b], tensor=c.tensor)
        between = [ways[pair] for pair in pairwise(c.positions)]
        return Placement(
            inward=(NO_TRANSFER, *between),
            outward=(*between, NO_TRANSFER),
            rings=tuple(topology.ring(each[:: c.tensor]) for each in ranks),
            exchanges=tuple(topology.exchange(each[:: c.tensor]) for each in ranks),
            speeds=tuple(map(topology.speed, ranks)),
            limits=tuple(map(topology.memory, ranks)),
        )

"""A configuration on the ranks of a machine: links between its stages, rings over its replicas, its devices."""

from __future__ import annotations

from dataclasses import dataclass

from .links import NO_LINK, Link, Machine
from .space import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the stages stand.

    Arguments:
        inward, outward: [S] links to the stage in front and behind; none at the ends.
        rings: [P] over the replicas of a stage.
        speeds: [P] of the slowest device of a stage, times that of the profile's.
        limits: [P] memory of its smallest device [bytes].
    """

    inward: tuple[Link, ...]
    outward: tuple[Link, ...]
    rings: tuple[Link, ...]
    speeds: tuple[float, ...]
    limits: tuple[float, ...]


class Places:
    """Places of configurations; equal ones are found once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[object, Place] = {}

    def of(self, configuration: Configuration) -> Place:
        """O(devices) the first time."""
        c = configuration
        key = (c.pipeline, c.data, c.tensor, c.num_chunks > 1, c.num_chunks, c.ranks)
        if key not in self._known:
            self._known[key] = self._find(c)
        return self._known[key]

    def _find(self, c: Configuration) -> Place:
        machine, ranks, width = self.machine, c.stage_ranks, c.pipeline
        hops = [machine.between(ranks[p], ranks[(p + 1) % width], tensor=c.tensor) for p in range(width - 1)]
        around = [machine.between(ranks[-1], ranks[0], tensor=c.tensor)] if c.num_chunks > 1 and width > 1 else []
        between = ((hops + around) * c.num_chunks)[: c.num_stages - 1]
        return Place(
            inward=(NO_LINK, *between),
            outward=(*between, NO_LINK),
            rings=tuple(machine.across(each[:: c.tensor]) for each in ranks),
            speeds=tuple(map(machine.speed, ranks)),
            limits=tuple(map(machine.memory, ranks)),
        )

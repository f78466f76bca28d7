"""The data-parallel option: what the ranks that hold a stage divide among themselves.

              gradients                optimizer's state      weights
"replicate"   summed                   on each of them        on each of them
"zero1"       summed to their owners   divided                gathered behind each update
"fsdp"        summed to their owners   divided                divided; gathered for a batch, then let go
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...comm import World
from ...schedules import Schedule

DATA_PARALLEL = ("replicate", "zero1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What is divided.

    Arguments:
        shards: [S] ranks over which the optimizer's state of each stage is divided; 1: each rank holds all of it.
    """

    shards: tuple[int, ...]

    @property
    def is_any(self) -> bool:
        """Whether anything is divided."""
        return any(count > 1 for count in self.shards)


def check_data_parallel(data_parallel: str) -> str:
    """The option; ValueError for an unknown word."""
    if data_parallel not in DATA_PARALLEL:
        raise ValueError(f"data_parallel={data_parallel!r}: expected one of {', '.join(map(repr, DATA_PARALLEL))}")
    return data_parallel


def sharding_of(data_parallel: str, schedule: Schedule, world: World) -> Sharding:
    """The same for each stage, over all ranks that hold it."""
    return _for([1 if data_parallel == "replicate" else len(ranks) for ranks in schedule.owners], world)


def sharding_of_plan(shards: Sequence[int], world: World) -> Sharding:
    """As a plan says, by stage."""
    return _for(shards, world)


def _for(shards: Sequence[int], world: World) -> Sharding:
    """Ranks of one process share their Parameters: nothing is divided there."""
    return Sharding(shards=tuple(shards) if world.distributed else (1,) * len(shards))

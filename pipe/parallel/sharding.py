"""The data-parallel option: what the ranks that hold a stage divide among themselves.

              gradients                optimizer's state      weights
"replicate"   summed                   on each of them        on each of them
"zero1"       summed to their owners   divided                gathered behind each update
"fsdp"        summed to their owners   divided                divided; gathered for a batch, then let go
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...schedules import Schedule

DATA_PARALLEL = ("replicate", "zero1", "fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What is divided.

    Arguments:
        shards: [S] ranks over which the optimizer's state of each stage is divided; 1: each rank holds all of it.
        weights: whether the weights are, too, whenever no batch needs them.
    """

    shards: tuple[int, ...]
    weights: bool = False

    @property
    def is_any(self) -> bool:
        """Whether anything is divided."""
        return any(count > 1 for count in self.shards)


def check_data_parallel(data_parallel: str) -> str:
    """The option; ValueError for an unknown word."""
    if data_parallel not in DATA_PARALLEL:
        raise ValueError(f"data_parallel={data_parallel!r}: expected one of {', '.join(map(repr, DATA_PARALLEL))}")
    return data_parallel


def sharding_of(data_parallel: str, schedule: Schedule) -> Sharding:
    """The same for each stage, over all ranks that hold it.

    Raises ValueError for weights that would be divided while batches are under way all the time.
    """
    if data_parallel == "fsdp" and schedule.is_asynchronous:
        raise ValueError(
            f"data_parallel='fsdp' under the asynchronous schedule {schedule.name!r}: batches are under way from one "
            f"train_step to the next, so that every weight version that is kept is in use and none could be let go. "
            f"Expected data_parallel='zero1', which divides the optimizer's state, or a flush schedule such as "
            f"schedule='1f1b'"
        )
    counts = [1 if data_parallel == "replicate" else len(ranks) for ranks in schedule.owners]
    return Sharding(shards=tuple(counts), weights=data_parallel == "fsdp")


def sharding_of_plan(shards: Sequence[int]) -> Sharding:
    """As a plan says, by stage: its optimizer's state alone."""
    return Sharding(shards=tuple(shards))

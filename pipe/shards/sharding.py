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
from ...schedules import Collective, Op, Schedule
from ...schedules.kinds import Kind, at_least

DATA_PARALLEL = ("replicate", "zero1", "fsdp")
ADAPTIVE = "adaptive"
SYNC: Kind[int | str] = Kind(
    "a number of steps, at least 1, or 'adaptive'",
    lambda value: value if value == ADAPTIVE else at_least(1).read(value),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Division of a run's stages.

    Arguments:
        shards: [S] ranks over which the optimizer's state of each stage is divided; 1: each rank holds all of it.
        weights: whether the weights are, too, between two batches.
    """

    shards: tuple[int, ...]
    weights: bool = False

    @property
    def is_any(self) -> bool:
        return any(count > 1 for count in self.shards)

    def check_optimizer(self, *, has_optimizer: bool) -> None:
        if self.weights and not has_optimizer:
            raise ValueError(
                "data_parallel='fsdp' without an optimizer: between two batches each rank keeps parts of the weights "
                "alone, which only an optimizer of the pipeline can update. Expected PipelineModule(..., "
                "optimizer=lambda params: torch.optim.AdamW(params)), or data_parallel='replicate'"
            )

    def collectives(self) -> tuple[Collective, ...]:
        stages = [stage for stage, count in enumerate(self.shards) if self.weights and count > 1]
        return tuple(Collective((stage,), op, 0) for stage in stages for op in (Op.UNSHARD, Op.RESHARD))


def sharding_of(data_parallel: str, schedule: Schedule, world: World) -> Sharding:
    """The same for each stage, over all ranks that hold it."""
    if data_parallel == "fsdp" and schedule.is_asynchronous:
        raise ValueError(
            f"data_parallel='fsdp' under the asynchronous schedule {schedule.name!r}: batches are under way from one "
            f"train_step to the next, and use the weight versions that are kept, so that none could be let go. "
            f"Expected data_parallel='zero1', which divides the optimizer's state, or a flush schedule such as "
            f"schedule='1f1b'"
        )
    counts = [1 if data_parallel == "replicate" else len(ranks) for ranks in schedule.owners]
    return sharding_over(counts, world, weights=data_parallel == "fsdp")


def sharding_over(shards: Sequence[int], world: World, *, weights: bool = False) -> Sharding:
    """Ranks of one process share their Parameters: nothing is divided there."""
    if not world.distributed:
        return Sharding(shards=(1,) * len(shards))
    return Sharding(shards=tuple(shards), weights=weights and any(count > 1 for count in shards))

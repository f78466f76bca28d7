"""What an asynchronous schedule needs beside the stages: weight versions, optimizers, who adds up which gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...schedules import Schedule, check
from ...schedules.builders.late_updates import defer_updates
from ...schedules.messages import Sharing
from ..batch.batches import Batch
from ..stages.build import CutModel
from ..stages.ownership import Ownership
from ..stages.weights import WeightVersions
from .optimizers import OptimizerFactory, SchedulerFactory, StageOptimizer
from .updates import SharedGradient, Updates


def sharing_of(schedule: Schedule, ownership: Ownership, *, max_grad_norm: float | None) -> Sharing:
    """What the ranks must tell each other.

    Raises ValueError for what a rule cannot have: a global norm, or weights tied over ranks, where each stage
    updates by itself.
    """
    sums = sorted({ranks for _, ranks in ownership.tied()})
    stage_groups = {tuple(ranks) for ranks in schedule.owners}
    ties = [(name, ranks) for name, ranks in ownership.tied() if ranks not in stage_groups]
    rule = schedule.rule
    if max_grad_norm is not None and rule.why_no_norm:
        raise ValueError(f"max_grad_norm={max_grad_norm} under schedule {schedule.name!r}: {rule.why_no_norm}")
    if ties and rule.why_no_ties:
        name, ranks = ties[0]
        raise ValueError(
            f"parameter {name!r} is tied over the ranks {ranks} under schedule {schedule.name!r}: {rule.why_no_ties}"
        )
    return Sharing(loss=True, norm=max_grad_norm is not None, sums=tuple(sums))


def with_late_updates(schedule: Schedule, sharing: Sharing) -> Schedule:
    """The schedule with updates that wait for other ranks as late as they may be."""
    if not schedule.rule.updates_may_wait or not (sharing.norm or sharing.sums):
        return schedule
    late = defer_updates(schedule)
    check(late)
    return late


def make_updates(
    rank: int,
    *,
    schedule: Schedule,
    parts: CutModel,
    ownership: Ownership,
    taken: set[str],
    num_versions: int,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None,
    max_grad_norm: float | None,
    batches: dict[int, Batch],
    device: torch.device,
) -> Updates:
    """The weight versions and optimizers of one rank, made in front of its first batch.

    Arguments:
        taken: names of parameters that another rank of this process has already; this rank's are added to it.
        num_versions: that the rank must keep of each stage.
    """
    weights: dict[int, WeightVersions] = {}
    optimizers: dict[int, StageOptimizer] = {}
    for stage in schedule.placement[rank]:
        held = ownership.held_parameters(stage)
        twice = next((n for n, _ in held for other in weights.values() if n in other.names), None)
        if twice is not None:
            raise ValueError(
                f"parameter {twice!r} stands in several stages of rank {rank} under schedule {schedule.name!r}: "
                f"expected one stage a rank, or a flush schedule such as schedule='interleaved'"
            )
        weights[stage] = WeightVersions(
            name=f"stage {stage} ({parts.names[stage]})",
            module=parts.train.stages[stage].module,
            parameters=held,
            count=num_versions,
            copied={name for name, _ in held if name in taken},
        )
        own = list(zip(weights[stage].names, weights[stage].own, strict=True))
        optimizers[stage] = StageOptimizer(stage, own, optimizer, scheduler)
        optimizers[stage].refuse_if_it_cannot_stream()
        taken.update(name for name, _ in held)
    shared, counted = _shared_and_counted(rank, schedule, ownership, weights)
    return Updates(
        rank=rank,
        schedule=schedule,
        weights=weights,
        optimizers=optimizers,
        shared=shared,
        counted=counted,
        max_grad_norm=max_grad_norm,
        batches=batches,
        device=device,
    )


def _shared_and_counted(
    rank: int, schedule: Schedule, ownership: Ownership, weights: Mapping[int, WeightVersions]
) -> tuple[Sequence[SharedGradient], Sequence[tuple[int, int]]]:
    """What this rank adds up with others, by name in the same order everywhere; what counts in its norm."""
    ranks_of = dict(ownership.tied())
    places = {name: (stage, i) for stage, one in weights.items() for i, name in enumerate(one.names)}
    shared = [SharedGradient(*places[name], ranks) for name, ranks in ranks_of.items() if name in places]
    counted = [place for name, place in places.items() if rank == min(ranks_of.get(name, (rank,)))]
    return shared, counted

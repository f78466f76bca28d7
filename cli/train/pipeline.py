"""The pipeline of a training run by its options, and collectives of its processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ...partition.plans.plan import Plan
from ...pipe import Asynchronous, Auto, ErrorFeedback, Mesh, PipelineModule, StepRecord
from ...schedules import Schedule
from ...schedules.wording import count
from ..host import physical_bytes
from ..options import read_tensor_parallel
from ..own_task import Batch
from .options import DEFAULT_MICROBATCHES, TrainOptions, schedule_of
from .recipe import learning_rate_curve
from .task import Task

T = TypeVar("T")


def make_pipe(
    options: TrainOptions,
    what: Schedule | Plan | None,
    task: Task,
    model: nn.Module,
    batch: Batch,
    *,
    on_step: Callable[[StepRecord], object] | None = None,
) -> PipelineModule:
    """The pipeline that the options describe, for batches like this one."""
    samples, parts = batch.num_samples, None if what is None else what.num_microbatches
    if parts is not None:
        check_samples(batch, num_microbatches=parts, task=task)
    if (
        isinstance(what, Plan)
        and parts is not None
        and what.microbatch_size
        and samples != parts * what.microbatch_size
    ):
        raise ValueError(
            f"{task.source} gives batches of {samples}, and the plan is for {count(parts, 'microbatch')} of "
            f"{what.microbatch_size} samples: expected batches of {parts * what.microbatch_size} (--batch where --data "
            f"gives samples), or a plan for {samples}"
        )
    loss_fn = task.loss_for(batch)
    schedule = schedule_of(what)
    updates = options.steps * (1 if schedule is None else schedule.groups_per_batch)
    mesh, choice = Mesh(), dict[str, Any]()
    if isinstance(what, Plan):
        choice = {"num_microbatches": DEFAULT_MICROBATCHES if what.num_microbatches is None else None}
    elif what is None:
        choice = {"num_microbatches": options.microbatches}  # for any division of the processes by the plan
    else:
        mesh = Mesh(pipe=what.num_ranks, context=options.context, tensor=options.tensor)
        choice = {"recompute": options.recompute}
    return PipelineModule(
        model,
        schedule=_arranged(options, Auto(trials=options.trials) if what is None else what),
        mesh=replace(mesh, tensor_parallel=read_tensor_parallel(options.tensor_parallel)),
        **choice,
        loss_fn=loss_fn,
        optimizer=task.optimizer,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, learning_rate_curve(updates)),
        max_grad_norm=options.clip or None,
        example_inputs=batch.parted(loss_fn)[0],
        verify=options.verify and may_verify(model),
        seed=options.seed,
        timeout=options.timeout,
        on_step=on_step,
    )


def own_microbatches(pipe: PipelineModule, options: TrainOptions) -> int:
    """How many microbatches a batch is cut into; the members of a context group run their parts of each."""
    context = options.context if pipe.plan is None else pipe.plan.context
    return pipe.schedule.num_microbatches // context


def check_samples(batch: Batch, *, num_microbatches: int, task: Task) -> None:
    if batch.num_samples < num_microbatches:
        raise ValueError(
            f"{task.source} gives a batch of {batch.num_samples} for {count(num_microbatches, 'microbatch')}: one "
            f"would be empty; expected {num_microbatches} samples or more (a DataLoader's last batch is smaller "
            f"without drop_last=True), or --microbatches {max(1, batch.num_samples)}"
        )


def _arranged(options: TrainOptions, what: Schedule | Plan | Auto) -> Any:
    if options.flush_first or options.delay_correction not in (None, "none"):
        factor = 1.0 if options.delay_factor is None else options.delay_factor
        correction = None if options.delay_correction in (None, "none") else ErrorFeedback(factor=factor)
        return Asynchronous(what, flush_first=options.flush_first or 0, correction=correction)
    return what


def may_verify(model: nn.Module) -> bool:
    """Whether a plain copy with its gradients takes little of the machine's memory."""
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters()) < physical_bytes() / 8


def gather(own: T) -> tuple[T, ...]:
    """Values of each process, by rank; collective."""
    if not dist.is_initialized():
        return (own,)
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return tuple(found)


def first(own: T) -> T:
    """The value of process 0, in each process; collective."""
    found = [own]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]

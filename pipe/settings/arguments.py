"""Arguments of PipelineModule, and those that belong together, a record for each.

    mesh        Mesh          how many ranks along which axis, and what ranks of one stage divide among themselves
    schedule    Auto          found by measuring
                Synchronous, Asynchronous, Slices     a schedule, with what only such a schedule has
    inputs      Inputs        what a batch looks like
    precision   Precision     in which numbers units compute, and whether compiled
    weights     Weights       files with them

Each name, dict or object that stands for a record with nothing but defaults may be given in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from ...partition.plans.plan import Plan
from ...partition.profiler.optimizers import OptimizerFactory
from ...schedules.custom.user_schedules import UserScheduleLike
from ..results import StepRecord
from ..shards.tensor_option import TensorParallelLike
from .delay_correction import ErrorFeedback
from .model_loss import LossWeight
from .recompute import RecomputeLike

AUTO = "auto"
FIRST = "first"

ScheduleLike: TypeAlias = UserScheduleLike
PlanLike: TypeAlias = Plan | str | os.PathLike[str]
BatchDimsLike: TypeAlias = Mapping[str | int, int | None]
SchedulerFactory: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks along each axis, and what those side by side divide among themselves (docs/guides/parallelism.md).

    Arguments:
        pipe: P ranks along the pipeline; by default what the processes leave.
        data: D replicas. Each passes a batch of its own, and gradients and losses are those of all of them together;
            ranks in a row are replicas of a stage. In one process the one batch is shared out.
        tensor: T processes of a tensor group, which run one rank and pass the same batch.
        order: the axes from the slowest to the fastest as process numbers grow; ("pipe", "data", "tensor") by default.
        data_parallel: what the replicas of a stage divide: "replicate" nothing; "zero1" the optimizer's state and the
            sums of gradients; "fsdp" the weights, too, which are gathered for each batch (docs/guides/parallelism.md).
            Replicas in one process share their Parameters: nothing is divided there.
        tensor_parallel: how the members of a tensor group divide modules: {"blocks.*.up": "column", "blocks.*.down":
            "row"}, with styles of torch.distributed.tensor.parallel beside the words; or "auto" for attention and MLP
            blocks of the usual shapes. Needed where T > 1, and nothing where T = 1.
        sends: what goes from stage to stage where all members of a tensor group hold the same: "whole" from each of
            them; in "parts" of 1/T, which are gathered on arrival; "auto": in parts between hosts.
        sync: steps from one agreement of the replicas to the next. 1: gradients are summed in each step. H: each takes
            H steps on its own batches, with a gradient norm of its own, then their weights are averaged; flush(),
            evaluation, `save`, `full_state_dict` and `close` average, too. "adaptive": H follows how much worse weights
            do on another replica's data, between 1 and 64 (`pipe.averaging` has it).
        on_failure: of a process. "stop": the run ends on all. "reroute": in `train_step`, `eval_step`, `predict`,
            `save` and `full_state_dict`, once stages are built and the first batch is verified, others make the call
            again, with the dead one's microbatches at its replicas, and go on; they need D > 1, a schedule that
            flushes, and a launcher that lets them (`stagewright.cli.launcher.launch`). With its `restarts=` a
            killed process begins anew and joins: loop from `pipe.num_steps` on. All processes pass the same batch then,
            of D times num_microbatches microbatches, as one process does.
        compress: what packs messages for slow links, which changes what is trained: "int8", {"topk": 0.01} (a share of
            the elements; what is left out is added to the next), {"lowrank": 4} (a rank), for all boundaries between
            stages; or by link, {(0, 1): "int8", "data": {"lowrank": 4}}: stages, and sums of gradients over replicas.
            "auto": "int8" where the links, measured in the first steps, need it, and nowhere else. Evaluation and
            `verify` are exact; what "topk" still owes is not in a checkpoint. A small GPT learned as much with "int8"
            between its stages, and little with {"topk": 0.05}, which is for "data". `pipe.sent_bytes` counts.
    """

    pipe: int | None = None
    data: int = 1
    tensor: int = 1
    order: Sequence[str] | None = None
    data_parallel: str = "replicate"
    tensor_parallel: TensorParallelLike | None = None
    sends: str = "auto"
    sync: int | str = 1
    on_failure: str = "stop"
    compress: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """schedule="auto": the first batch is profiled, and the planner decides on schedule, cut, replicas, microbatches.

    Path("plan.json").write_text(pipe.plan.to_json()) keeps the plan: schedule="plan.json" takes it without measuring.

    Arguments:
        trials: plans that are tried, at most: the best one, and others that are predicted to take up to 10% longer, are
            carried out for a few steps each on a copy of the model, and the one that takes least is trained with
            (docs/guides/planning.md). 0: the one that is predicted best is taken untried.
        schedules: names of those to choose among, also of `stagewright.schedules.register`; by default the planner's.
        replan: "batch": each batch has an order of its own, found for the sizes of its microbatches in the memory of
            the plan (docs/guides/schedules.md), as `train_step(microbatches=[...])` gives them.
    """

    trials: int | None = None
    schedules: Sequence[str] | None = None
    replan: str | None = None


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """A schedule whose batches follow each other without a flush, and how it meets late gradients.

    Arguments:
        schedule: "2bw", "pipedream", a Plan with such a schedule ...
        flush_first: so many batches, the first ones of the run, are trained on with a flush behind each update
            (docs/guides/asynchronous.md).
        correction: "error-feedback": each update also gets lambda times its difference to the one before, where lambda
            is the number of updates by which gradients of the stage are late; or stagewright.ErrorFeedback(factor=,
            delay=). For any torch optimizer.
    """

    schedule: ScheduleLike | Plan | Auto = "2bw"
    flush_first: int = 0
    correction: ErrorFeedback | str | None = None


@dataclass(frozen=True, slots=True)
class Synchronous:
    """A schedule that flushes behind each batch.

    Arguments:
        schedule: "zb-h1", "1f1b", a Plan with such a schedule ...
    """

    schedule: ScheduleLike | Plan | Auto = "1f1b"


@dataclass(frozen=True, slots=True)
class Slices:
    """A schedule over slices of each microbatch along the sequence (docs/guides/schedules.md).

    Tokens must meet in causal F.scaled_dot_product_attention alone; that is tried out.

    Arguments:
        schedule: "seq1f1b", "terapipe" ...; or a plan over slices, which says how many and how long.
        num_slices: n of a microbatch; as many as `lengths` has, or the schedule's own number, or 2.
        lengths: tokens of each slice; as equal as can be by default.
        dims: dimension of the sequence in each argument, by name or position, and in the "target": 1 by default; None:
            all slices of a microbatch get the argument whole.
    """

    schedule: ScheduleLike | Plan = "seq1f1b"
    num_slices: int | None = None
    lengths: Sequence[int] | None = None
    dims: BatchDimsLike | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """A batch: how it looks.

    Arguments:
        example: one local batch: a tuple, or a dict of keywords. The stages are built for it at once.
        batch_dims: dimension of the batch in each argument, by name or position, and in the "target": 0 by default;
            None: all microbatches get the argument whole. Tensors without dimensions are shared, too.
        loss_weight: over how many items the model's own loss of a microbatch is a mean, so that microbatches make the
            mean of the batch: "samples", "labels" (the integers labels= but -100), "shifted_labels" (those but the
            first of each sequence, as causal language models count), or a function of the model's arguments. By
            default what models of transformers do; of others "samples", unless they take labels= of integers.
    """

    example: Sequence[Any] | Mapping[str, Any] | None = None
    batch_dims: BatchDimsLike | None = None
    loss_weight: LossWeight | None = None


@dataclass(frozen=True, slots=True)
class Precision:
    """In which numbers units compute (docs/guides/precision.md).

    Arguments:
        dtype: "bf16" or "fp16" (or the torch.dtype): all calls run under torch.autocast to it. None: under the
            autocast that they are called in, if any.
        grad_scaler: torch.amp.GradScaler of training in float16, which has one of its own by default. `train_step`
            scales losses, divides gradients before clipping, skips the update of all stages where a gradient of any
            overflowed, and updates the scale, as scale, unscale_, step and update of it would. An infinite loss is no
            error then. Each process makes its own, all alike.
        compile: True, or arguments of torch.compile: each cut unit runs compiled.
    """

    dtype: str | torch.dtype | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    compile: bool | Mapping[str, Any] = False


@dataclass(frozen=True, slots=True)
class Weights:
    """Where the model's weights are (docs/guides/large_models.md).

    Arguments:
        source: a file of safetensors, an index of several, a folder that has one or the other, of
            torch.distributed.checkpoint or of pipe.save; or a state dict.
        dtype: of the parameters, and buffers of floating point; that of the files by default.
    """

    source: str | os.PathLike[str] | Mapping[str, torch.Tensor]
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, str | os.PathLike | Mapping):
            raise ValueError(
                f"weights={self.source!r}: expected a file of safetensors, a folder, a state dict, or "
                f"stagewright.Weights(...)"
            )
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(
                f"Weights(dtype={self.dtype!r}): expected a type of floating point, such as torch.bfloat16"
            )


MeshLike: TypeAlias = Mesh | DeviceMesh | Mapping[str, int] | str
AnySchedule: TypeAlias = "ScheduleLike | PlanLike | Auto | Asynchronous | Synchronous | Slices"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """All that PipelineModule is given; see there."""

    model: nn.Module | Sequence[nn.Module] | None = None
    schedule: AnySchedule | None = None
    num_microbatches: int | None = None
    num_chunks: int | None = None
    loss_fn: Callable[[Any, Any], Any] | str | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerFactory | None = None
    max_grad_norm: float | None = None
    mesh: MeshLike | None = None
    cut: Sequence[str] | Mapping[str, Any] | None = None
    example_inputs: Inputs | Sequence[Any] | Mapping[str, Any] | None = None
    recompute: RecomputeLike = "none"
    precision: Precision | str | torch.dtype | None = None
    verify: bool | int | str = FIRST
    on_step: Callable[[StepRecord], object] | None = None
    seed: int = 0
    timeout: float = 300.0
    device: torch.device | str | None = None
    weights: Weights | None = None

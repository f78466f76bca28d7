"""Arguments of PipelineModule, and records of arguments that belong together.

    mesh        Mesh          ranks along each axis, and what the ranks of one stage divide
    schedule    Auto          a schedule found by measuring
                Synchronous, Asynchronous, Slices     a schedule, with the options that only its kind has
    inputs      Inputs        the form of a batch
    precision   Precision     number types of computation, and compilation
    weights     Weights       files of weights

A plain name, dict or object may be given in place of a record whose other fields keep their defaults.
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
    """Number of ranks along each axis, and what the ranks of one stage divide among themselves.

    One process runs each rank; without torchrun, one process runs all of them (docs/guides/parallelism.md).

    Arguments:
        pipe: P, the ranks along the pipeline. By default the number of processes over those of the other axes.
        data: D, the data replicas of the pipeline. Each is passed a batch of its own, and gradients and losses are
            those of all batches together. In one process the single batch is divided among the replicas.
        context: C, the replicas that are passed the same batch, and compute a part of the tokens of each sequence each.
            Attention gathers keys and values (docs/guides/parallelism.md). C divides the sequence's length; where 2 C
            does, part c is the blocks c and 2C-1-c of 2C, so that each has as much causal attention to compute.
        expert: E, the replicas that divide the experts of each layer of experts: e holds those from e n / E on, of n.
            Like data replicas each is passed a batch of its own; tokens travel to their experts and back.
        tensor: T, the processes of a tensor group, which together run one rank and are passed the same batch.
        order: the axes from the slowest to the fastest as process numbers grow; ("pipe", "data", "context", "expert",
            "tensor") by default, which makes neighbours of a tensor group, then of the replicas of a stage.
        data_parallel: what the replicas of a stage divide. "replicate": nothing. "zero1": the optimizer's state and the
            sums of gradients. "fsdp": the weights as well, which are gathered for each batch. Replicas in one process
            share their Parameters, so nothing is divided there.
        tensor_parallel: how the members of a tensor group divide modules: by name, {"blocks.*.up": "column",
            "blocks.*.down": "row"}, where a style of torch.distributed.tensor.parallel may replace a word; or "auto",
            for attention and MLP blocks of the usual shapes. Required if T > 1, without effect if T = 1.
        sends: how a tensor travels between stages if all members of a tensor group hold the same one. "whole": each
            member sends it. "parts": each sends 1/T of it, and the receivers gather. "auto": in parts between hosts.
        sync: steps from one synchronisation of the replicas to the next. 1: gradients are summed in each step. H: each
            replica makes H steps on its own batches, with its own gradient norm, then the weights are averaged, as they
            are by flush(), evaluation, `save`, `full_state_dict` and `close`. "adaptive": H, between 1 and 64, follows
            how much higher the loss of a replica's weights is on another replica's data (see `pipe.averaging`).
        on_failure: what happens when a process dies. "stop": the run ends on all ranks. "reroute": in `train_step`,
            `eval_step`, `predict`, `save` and `full_state_dict`, after stages are built and the first batch is
            verified, the other processes make the call again, with the dead one's microbatches run by its replicas.
            That needs D > 1, a flush schedule, and a launcher that does not end them
            (`stagewright.cli.launcher.launch`). With the launcher's `restarts=` a killed process starts anew and joins:
            begin the loop at `pipe.num_steps`. All processes then pass the same batch, of D times num_microbatches
            microbatches, as one process does.
        compress: lossy compression of messages for slow links: "int8"; {"topk": 0.01}, a share of the elements, where
            what is left out is added to the next message; {"lowrank": 4}, a rank. One value is for all boundaries
            between stages; a dict is by link, {(0, 1): "int8", "data": {"lowrank": 4}}, where (0, 1) are stages and
            "data" is the sums of gradients over replicas. "auto": "int8" on links that need it, by measuring the first
            steps. Evaluation and `verify` are exact. A checkpoint does not hold what "topk" has yet to send. A small
            GPT learned as much with "int8" between its stages, and little with {"topk": 0.05}, which suits "data".
            `pipe.sent_bytes` counts the bytes.
    """

    pipe: int | None = None
    data: int = 1
    context: int = 1
    expert: int = 1
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
    """Finds the schedule by measuring: schedule="auto" with options.

    The first batch is profiled on this machine, and the planner chooses schedule, cut, replicas and microbatches. To
    reuse the plan without measuring: Path("plan.json").write_text(pipe.plan.to_json()), then schedule="plan.json".

    Arguments:
        trials: number of plans to try, at most; 3 by default. The plan with the shortest predicted step, and others
            predicted to take up to 10% longer, run for a few steps each on a copy of the model; training uses the
            fastest (docs/guides/planning.md). 0: the best prediction is used without a trial.
        schedules: names to choose among, including those of `stagewright.schedules.register`; by default the planner's.
        replan: "batch": each batch gets its own order, searched for the sizes of its microbatches within the plan's
            memory (docs/guides/schedules.md); pass them as `train_step(microbatches=[...])`.
        search: "joint": cut, placement and order of a chain of layers are also searched together, with any number of
            stages on each rank, and the better plan is taken (docs/guides/planning.md). "named": schedules by name.
        seconds: of the search for a plan, and of a joint search as many more, of CPU time (20 by default).
    """

    trials: int | None = None
    schedules: Sequence[str] | None = None
    replan: str | None = None
    search: str = "named"
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """A schedule whose batches follow each other without a flush, and the treatment of its late gradients.

    Arguments:
        schedule: "2bw", "pipedream", a Plan with such a schedule ...
        flush_first: number of batches at the start of the run after which the pipeline is flushed, so that their
            gradients are not late (docs/guides/asynchronous.md).
        correction: "error-feedback": each update is increased by lambda times its difference from the update before,
            where lambda is the number of updates by which the stage's gradients are late. For any torch optimizer.
            `stagewright.ErrorFeedback(factor=, delay=)` sets lambda.
    """

    schedule: ScheduleLike | Plan | Auto = "2bw"
    flush_first: int = 0
    correction: ErrorFeedback | str | None = None


@dataclass(frozen=True, slots=True)
class Synchronous:
    """A schedule that flushes the pipeline after each batch.

    Arguments:
        schedule: "zb-h1", "1f1b", a Plan with such a schedule ...
    """

    schedule: ScheduleLike | Plan | Auto = "1f1b"


@dataclass(frozen=True, slots=True)
class Slices:
    """A schedule over slices of each microbatch along the sequence (docs/guides/schedules.md).

    Tokens may depend on each other only through causal F.scaled_dot_product_attention; the first batch tests that.

    Arguments:
        schedule: "seq1f1b", "terapipe" ...; or a plan over slices, which sets their number and lengths.
        num_slices: n, the slices of a microbatch. By default the number of `lengths`, or the schedule's own number, or
            2.
        lengths: [n] tokens of each slice; as equal as possible by default.
        dims: dimension of the sequence in each argument, by name or position, and in the "target"; 1 by default. None:
            every slice gets the whole argument.
    """

    schedule: ScheduleLike | Plan = "seq1f1b"
    num_slices: int | None = None
    lengths: Sequence[int] | None = None
    dims: BatchDimsLike | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The form of a batch: an example, the dimensions of the batch, and what a loss is a mean over.

    Arguments:
        example: one local batch, as a tuple or a dict of keywords, for which the stages are built at once.
        batch_dims: dimension of the batch in each argument, by name or position, and in the "target"; 0 by default.
            None: every microbatch gets the whole argument, as it does a tensor without dimensions.
        sequence_dims: likewise the dimension of the sequence, which a context group divides; 1 by default. None: every
            member gets the whole argument.
        loss_weight: with loss_fn="model", number of items that the model's loss of a microbatch is a mean over, which
            weights the microbatches in the mean of the batch: "samples"; "labels" (the integers in labels= except
            -100); "shifted_labels" (the same without the first of each sequence, as causal language models count); or
            a function of the model's arguments. By default that of the model's class in transformers. For other models
            "samples"; if they take labels= of integers, "labels" where these have one dimension, else it must be given.
    """

    example: Sequence[Any] | Mapping[str, Any] | None = None
    batch_dims: BatchDimsLike | None = None
    sequence_dims: BatchDimsLike | None = None
    loss_weight: LossWeight | None = None


@dataclass(frozen=True, slots=True)
class Precision:
    """Number types of computation, loss scaling and compilation (docs/guides/precision.md).

    Arguments:
        dtype: "bf16" or "fp16", or the torch.dtype: all calls run under torch.autocast to it. None: calls run under the
            autocast that is active around them, if any.
        grad_scaler: torch.amp.GradScaler for training in float16; a default one is made if None. `train_step` scales
            losses, divides gradients before clipping, skips the update of all stages if a gradient overflowed on any,
            and updates the scale, as the scaler's scale, unscale_, step and update do. An infinite loss is then no
            error. Each process makes its own scaler, all with the same settings.
        compile: True, or a dict of arguments of torch.compile: each cut unit runs compiled.
    """

    dtype: str | torch.dtype | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    compile: bool | Mapping[str, Any] = False


@dataclass(frozen=True, slots=True)
class Weights:
    """Files or tensors from which each process reads the weights of its own stages (docs/guides/large_models.md).

    Arguments:
        source: a safetensors file; an index of several; a folder that holds one or the other, or that was written by
            torch.distributed.checkpoint or pipe.save; or a state dict.
        dtype: of the parameters, and of buffers of floating point; that of the files by default.

    Raises ValueError for a source or a type of another kind.
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
    """All arguments of PipelineModule, as they were given; see there."""

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

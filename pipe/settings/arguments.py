"""Arguments of PipelineModule that belong together, a record for each, read into its options.

    mesh        Mesh          how many ranks along which axis, and what ranks of one stage divide among themselves
    schedule    Auto          found by measuring
                Synchronous, Asynchronous, Slices     a schedule, with what only such a schedule has
    inputs      Inputs        what a batch looks like
    precision   Precision     in which numbers units compute, and whether compiled
    weights     Weights       files with them

Each name, dict or object that stands for a record with nothing but defaults may be given in its place.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm.mesh import AXES
from ...partition.plans.plan import Plan
from ...schedules.custom.user_schedules import UserScheduleLike
from ..shards.tensor_option import TensorParallelLike
from .delay_correction import ErrorFeedback
from .model_loss import LossWeight
from .precision import DTYPES

AUTO = "auto"

ScheduleLike: TypeAlias = UserScheduleLike
PlanLike: TypeAlias = Plan | str | os.PathLike[str]
BatchDimsLike: TypeAlias = Mapping[str | int, int | None]


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
        replan: "batch": each batch has an order of its own, found for the sizes of its microbatches in the memory of
            the plan (docs/guides/schedules.md), as `train_step(microbatches=[...])` gives them.
    """

    trials: int | None = None
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


MeshLike: TypeAlias = "Mesh | DeviceMesh | Mapping[str, int] | str"
AnySchedule: TypeAlias = "ScheduleLike | PlanLike | Auto | Asynchronous | Synchronous | Slices"

_AXIS_OF = {"pp": "pipe", "dp": "data", "tp": "tensor"} | {axis: axis for axis in AXES}

# What the records below are read into, with None where they say nothing.
_INSIDE = (
    *("plan", "stages", "split_points", "replan", "trials", "delay_correction"),
    *("num_slices", "slice_lengths", "sequence_dims", "loss_weight", "batch_dims", "grad_scaler"),
)

# What others call it.
_MEANT = {
    "num_microbatches": "microbatches micro_batches n_microbatches gradient_accumulation_steps",
    "num_chunks": "chunks virtual_stages num_virtual_stages",
    "precision": "bf16 fp16 amp autocast dtype mixed_precision",
    "max_grad_norm": "grad_clip clip_grad_norm max_norm gradient_clipping gradient_clip_val",
    "recompute": "checkpoint checkpointing activation_checkpointing gradient_checkpointing",
    "mesh": "num_stages num_ranks world_size pp dp tp data tensor",
    "loss_fn": "loss criterion",
}


def read_arguments(given: Mapping[str, Any], edits: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Every option by its own name, as `read_options` takes them.

    Arguments:
        given: the arguments of PipelineModule; for Edits, their model.
        edits: options that edits of the model became.

    Raises ValueError for what is no record and stands for none.
    """
    given = {**given, **_of_torch(given["model"], given["schedule"], given["cut"])}
    options: dict[str, Any] = dict.fromkeys(_INSIDE)
    options |= {name: value for name, value in given.items() if name not in ("cut", "precision")}
    options |= {"split_points": given["cut"], "compile": False, "kind": None, "flush_first": 0}
    model = given["model"]
    if isinstance(model, list | tuple) or (
        isinstance(model, nn.ModuleList) and type(model).forward is nn.Module.forward
    ):
        options |= {"model": None, "stages": list(model)}
    options |= _mesh_options(given["mesh"]) | _schedule_options(given["schedule"])
    options |= _input_options(given["example_inputs"]) | _precision_options(given["precision"])
    options["weights"] = _weights(given["weights"])
    for name, value in (edits or {}).items():
        mesh = options["mesh"]
        before = mesh.tensor_parallel if name == "tensor_parallel" else options[name]
        if before not in (None, "none"):
            said = "cut" if name == "split_points" else name
            raise ValueError(f"{said}= beside edits that say the same: expected one of them")
        options |= {"mesh": replace(mesh, tensor_parallel=value)} if name == "tensor_parallel" else {name: value}
    return options


def refuse_unknown(names: Collection[str], known: Collection[str]) -> None:
    """TypeError for an argument that PipelineModule does not have, with the one that is meant."""
    for name in names:
        meant = [own for own, others in _MEANT.items() if name in others.split()]
        near = ", or ".join(f"{own}=" for own in meant or difflib.get_close_matches(name, known, n=1))
        raise TypeError(
            f"PipelineModule() got an unexpected keyword argument {name!r}: expected "
            f"{near or 'one of ' + ', '.join(known)}"
        )


def _of_torch(model: Any, schedule: Any, cut: Any) -> dict[str, Any]:
    """The same where torch.distributed.pipelining made them: Pipe, PipelineStages, split_spec, a class of schedules."""
    if _is_torchs(type(model)) and hasattr(model, "get_stage_module"):
        model = [model.get_stage_module(number) for number in range(model.num_stages)]
    stages = list(model) if isinstance(model, list | tuple) else [model]
    if stages and all(_is_torchs(type(stage)) for stage in stages):
        held, num_stages = {stage.stage_index: stage.submod for stage in stages}, stages[0].num_stages
        if sorted(held) != list(range(num_stages)):
            raise ValueError(
                f"PipelineStages {sorted(held)} of {num_stages}: expected all of them on every rank, which keeps its "
                f"own, or the whole model: PipelineModule(model, cut=[...])"
            )
        model = [held[number] for number in sorted(held)]
    if isinstance(cut, Mapping):
        for name, point in cut.items():
            if getattr(point, "name", None) != "BEGINNING":
                raise ValueError(f"cut={{{name!r}: {point}}}: expected SplitPoint.BEGINNING, of the module behind it")
        cut = list(cut)
    if _is_torchs(type(schedule)):
        said = f"{type(schedule).__name__}, num_microbatches={schedule._n_microbatches}, loss_fn=..."
        raise ValueError(f"schedule={type(schedule).__name__}(...): expected its class: schedule={said}")
    return {"model": model, "cut": cut, "schedule": schedule.__name__ if _is_torchs(schedule) else schedule}


def _is_torchs(kind: object) -> bool:
    return isinstance(kind, type) and kind.__module__.startswith("torch.distributed.pipelining")


def _mesh_options(mesh: MeshLike | None) -> dict[str, Any]:
    if isinstance(mesh, DeviceMesh):
        mesh = _mesh_of(mesh)
    if not isinstance(mesh, Mesh):
        return {"mesh": Mesh(), "sizes": mesh}
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    given = {axis: size for axis, size in sizes.items() if size is not None and (size != 1 or axis == "pipe")}
    return {"mesh": mesh, "sizes": given or None}


def _mesh_of(mesh: DeviceMesh) -> Mesh:
    """torch's mesh with the axes "pp" (or "pipe"), "dp" ("data") and "tp" ("tensor"), all processes in order."""
    names = mesh.mesh_dim_names or ()
    axes = [_AXIS_OF.get(name, name) for name in names]
    if "pipe" not in axes or len({*axes}) < len(axes) or not {*axes} <= {*AXES}:
        raise ValueError(
            f"mesh={mesh}: expected dimensions named 'pp', 'dp' and 'tp' (or 'pipe', 'data', 'tensor'), 'pp' among "
            f"them, as in init_device_mesh({mesh.device_type!r}, (2, 2), mesh_dim_names=('pp', 'dp'))"
        )
    if mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        raise ValueError(f"mesh={mesh}: expected all processes, numbered along its last dimension first")
    sizes: dict[str, Any] = dict(zip(axes, mesh.mesh.shape, strict=True))
    return Mesh(**sizes, order=[*axes, *(axis for axis in AXES if axis not in axes)])


def _schedule_options(schedule: object) -> dict[str, Any]:
    match schedule:
        case Auto():
            return {"schedule": AUTO, "trials": schedule.trials, "replan": schedule.replan}
        case Asynchronous():
            late = {"flush_first": schedule.flush_first, "delay_correction": schedule.correction}
            return _schedule_options(schedule.schedule) | late | {"kind": "asynchronous"}
        case Synchronous():
            return _schedule_options(schedule.schedule) | {"kind": "synchronous"}
        case Slices() if _is_plan(plan := schedule.schedule):
            if schedule.num_slices is not None or schedule.lengths is not None:
                raise ValueError("Slices(plan, num_slices=, lengths=): a plan says both: expected dims= alone")
            return _schedule_options(plan) | {"kind": "sliced", "sequence_dims": schedule.dims}
        case Slices():
            number = schedule.num_slices
            if number is None:
                number = len(schedule.lengths) if isinstance(schedule.lengths, Sequence) else None
            cut = {"num_slices": number, "slice_lengths": schedule.lengths, "sequence_dims": schedule.dims}
            return {"schedule": schedule.schedule, "kind": "sliced", **cut}
        case _:
            if not _is_plan(schedule):
                return {"schedule": schedule}
            if isinstance(schedule, Plan):
                lengths = schedule.slice_lengths
            else:  # `read_plan` looks at the rest
                lengths = json.loads(Path(str(schedule)).read_text()).get("slice_lengths")
            return {"schedule": None, "plan": schedule, "slice_lengths": lengths or None}


def _is_plan(schedule: object) -> bool:
    """Whether it is a plan, or a file of one: an object with `stages`."""
    if not isinstance(schedule, str | os.PathLike) or not str(schedule).endswith(".json"):
        return isinstance(schedule, Plan)
    try:
        record = json.loads(Path(schedule).read_text())
    except (OSError, ValueError):  # the reader of schedules says what is wrong with it
        return False
    return isinstance(record, dict) and "stages" in record


def _input_options(inputs: object) -> dict[str, Any]:
    if not isinstance(inputs, Inputs):
        return {"example_inputs": inputs}
    named = {field.name: getattr(inputs, field.name) for field in fields(Inputs)}
    return {"example_inputs": named.pop("example"), **named}


def _weights(weights: object) -> Weights | None:
    if weights is None:
        return None
    told = weights if isinstance(weights, Weights) else Weights(weights)  # type: ignore[arg-type]
    if not isinstance(told.source, str | os.PathLike | Mapping):
        raise ValueError(
            f"weights={told.source!r}: expected a file of safetensors, a folder, a state dict, or "
            f"stagewright.Weights(...)"
        )
    if told.dtype is not None and not (isinstance(told.dtype, torch.dtype) and told.dtype.is_floating_point):
        raise ValueError(f"Weights(dtype={told.dtype!r}): expected a type of floating point, such as torch.bfloat16")
    return told


def _precision_options(precision: object) -> dict[str, Any]:
    if precision is None:
        return {"autocast": None}
    record = precision if isinstance(precision, Precision) else Precision(dtype=precision)  # type: ignore[arg-type]
    dtype = DTYPES.get(record.dtype, record.dtype) if isinstance(record.dtype, str) else record.dtype
    if dtype not in (None, *DTYPES.values()):
        raise ValueError(
            f"precision={precision!r}: expected 'bf16' or 'fp16', or stagewright.Precision(dtype=, grad_scaler=, "
            f"compile=)"
        )
    return {"autocast": dtype, "grad_scaler": record.grad_scaler, "compile": record.compile}

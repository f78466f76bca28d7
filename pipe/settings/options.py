"""Options of PipelineModule: its arguments, read and checked in a fixed order."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from ...comm import Compress, own_device, read_compress
from ...comm.mesh import AXES
from ...partition.deferred.recipes import device_where_built
from ...partition.deferred.recording import DeferredParameter
from ...partition.model.batch_dims import BatchDims, check_batch_dims
from ...partition.plans.plan import Plan
from ...partition.plans.record import SEARCHES
from ...partition.profiler.optimizers import NamedFactory
from ...schedules import canonical_name
from ...schedules.kinds import Kind, above_zero, at_least, one_of, option
from ..shards.tensor_option import SENDS
from ..telling import tell_of_gpus
from .arguments import (
    AUTO,
    FIRST,
    AnySchedule,
    Asynchronous,
    Auto,
    GivenOptions,
    Inputs,
    Mesh,
    MeshLike,
    Precision,
    ScheduleLike,
    Slices,
    Synchronous,
)
from .delay_correction import ErrorFeedback, read_correction
from .given import CallReader, Given, signature_of
from .model_loss import ModelLoss, more_keywords, read_loss_option
from .precision import read_compile, read_dtype, read_grad_scaler, refuse_float16_parameters

_LONGEST = 365 * 86400.0  # [s] taken as no limit by backends

_CALLED = {  # options that are called: number of arguments, and an example
    "loss_fn": (2, "lambda output, target: F.mse_loss(output, target)"),
    "optimizer": (1, "lambda params: torch.optim.AdamW(params)"),
    "lr_scheduler": (1, "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)"),
    "on_step": (1, "lambda record: print(record.loss)"),
}
_READ = ("model", "schedule", "cut", "mesh", "recompute", "loss_fn", "device")  # the others are kept as given
_APPLIED = ("lr_scheduler", "correction", "max_grad_norm", "grad_scaler", "flush_first")
_VERIFY: Kind[float] = Kind(
    "'first' (the first batch, where a copy of the model fits), True (the first batch), a whole number N of at least 1 "
    "(the first batch and every N-th after it), or False",
    lambda value: (
        math.inf if value is True or value == FIRST else value if value is False or at_least(1).read(value) else None
    ),
)
_SEED = Kind("a whole number", lambda value: int(value) if isinstance(value, Integral) else None)
_LENGTHS: Kind[Sequence[int]] = Kind(
    "a list with the number of tokens of each slice, as in [96, 32]",
    lambda value: (
        value if isinstance(value, list | tuple) and value and all(type(n) is int and n > 0 for n in value) else None
    ),
)
_AXIS_OF = {"pp": "pipe", "dp": "data", "cp": "context", "ep": "expert", "tp": "tensor"} | {axis: axis for axis in AXES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(GivenOptions):
    """The arguments after they are read. Raises ValueError for values that make no sense."""

    model: nn.Module | None = None  # None: it is given as stages
    stages: Sequence[nn.Module] | None = None
    schedule: ScheduleLike | Plan | None = None  # None: the default
    kind: type | None = None  # of what was given as the schedule, such as Slices
    slices: Slices = field(default_factory=Slices)
    sequence_dims: BatchDims = field(default_factory=dict)
    auto: Auto = field(default_factory=Auto)
    correction: ErrorFeedback | None = None
    flush_first: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    sizes: Mapping[str, int] | None = None  # of the mesh, by axis; None if the number of processes decides
    # Reads the arguments of `train_step` and similar calls.
    calls: CallReader = field(default_factory=partial(CallReader, None, has_target=True, batch_dims={}))
    loss_fn: Callable[[Any, Any], Any] | None = None  # a ModelLoss if the model returns its own loss
    grad_scaler: GradScaler | None = None
    compile: Mapping[str, Any] | None = None
    device: torch.device

    def __post_init__(self) -> None:
        seconds = option("timeout", self.timeout, above_zero("seconds above 0"))
        object.__setattr__(self, "timeout", min(seconds, _LONGEST))  # float("inf") too
        if self.max_grad_norm is not None:
            option("max_grad_norm", self.max_grad_norm, above_zero("a number above 0, or None"))
        batches = option("flush_first", self.flush_first, at_least(0, "a number of batches, at least 0"))
        object.__setattr__(self, "flush_first", batches)
        object.__setattr__(self, "seed", option("seed", self.seed, _SEED))
        for name in _CALLED:
            _check_called(name, getattr(self, name))
        for name in _APPLIED:
            value = getattr(self, name)
            if value not in (None, False, 0) and self.optimizer is None:
                raise ValueError(
                    f"{name}={value!r} without an optimizer: expected optimizer= as well, since train_step applies "
                    f"both; with an optimizer of your own, call clip_grad_norm_ and step the scheduler yourself"
                )
        if self.auto.trials is not None:
            option("trials", self.auto.trials, at_least(0, "a number of plans, 0 to try none"))
        asked = self.auto.schedules
        if asked is not None and not asked:
            raise ValueError(f"schedules={asked!r}: expected at least one name, or None")
        for name in [asked] if isinstance(asked, str) else asked or ():
            canonical_name(name)  # ValueError before anything is measured
        if option("search", self.auto.search, one_of(SEARCHES)) == "joint" and self.auto.replan is not None:
            raise ValueError(
                f"Auto(search='joint', replan={self.auto.replan!r}): expected one of them: a joint plan has one order"
            )
        if self.auto.seconds is not None:
            option("seconds", self.auto.seconds, above_zero("seconds above 0, or None"))
        option("verify", self.verify, _VERIFY)
        _ = self.example  # ValueError where it is none
        option("sends", self.mesh.sends, one_of(SENDS))
        _ = self.compress

    @property
    def root(self) -> nn.Module:
        """Module that holds all modules of the model or of the stages."""
        return nn.ModuleList(self.stages or []) if self.model is None else self.model

    @property
    def example(self) -> Given | None:
        given = self.example_inputs.example if isinstance(self.example_inputs, Inputs) else self.example_inputs
        return None if given is None else self.calls.example(given)

    @property
    def autocast(self) -> torch.dtype | None:
        return read_dtype(self.precision)

    @property
    def compress(self) -> Compress | None:
        return read_compress(self.mesh.compress)

    @property
    def verify_every(self) -> float | None:
        """Batches from one verification to the next; None: no copy of the model is kept."""
        return option("verify", self.verify, _VERIFY) or None

    @property
    def user_code(self) -> list[object]:
        """The user's loss and maker of optimizers; runs besides training restore what these can reach."""
        loss, optimizer = self.loss_fn, self.optimizer
        found = [
            vars(loss) if isinstance(loss, ModelLoss) else loss,
            optimizer.make if isinstance(optimizer, NamedFactory) else optimizer,
        ]
        return [each for each in found if each is not None]

    @property
    def model_loss(self) -> ModelLoss | None:
        """The loss of a model that returns its own; None for other losses, and without one."""
        return self.loss_fn if isinstance(self.loss_fn, ModelLoss) else None

    def require_optimizer(self) -> None:
        if self.optimizer is None:
            raise ValueError(
                "train_step needs an optimizer: expected PipelineModule(..., optimizer=lambda params: "
                "torch.optim.AdamW(params)), or call forward_backward and step an optimizer of your own"
            )

    def require_loss(self) -> None:
        if self.loss_fn is None:
            raise ValueError(
                "training needs a loss: expected PipelineModule(..., loss_fn=lambda output, target: ...), "
                'which returns a scalar mean or (sum, count); or loss_fn="model" for a model that returns its own'
            )


def read_options(given: GivenOptions, edits: Mapping[str, Any]) -> Options:
    """Options from the arguments and from edits of the model. Raises ValueError for the first wrong one."""
    model, stages, around, cut = _of_torch(given.model, given.schedule, given.cut)
    mesh, sizes = _read_mesh(given.mesh)
    schedule, slices = _read_schedule(around)
    late = around if isinstance(around, Asynchronous) else Asynchronous()
    inputs = given.example_inputs if isinstance(given.example_inputs, Inputs) else Inputs()
    autocast = read_dtype(given.precision)
    precision = given.precision if isinstance(given.precision, Precision) else Precision()
    recompute, cut = _with_edits(edits, "recompute", given.recompute), _with_edits(edits, "cut", cut)
    mesh = replace(mesh, tensor_parallel=_with_edits(edits, "tensor_parallel", mesh.tensor_parallel))
    check_model(model, stages, cut)
    root = nn.ModuleList(stages or []) if model is None else model
    loss_fn = read_loss_option(given.loss_fn, inputs.loss_weight, model)
    signature, has_target = signature_of(model), loss_fn is not None and not isinstance(loss_fn, ModelLoss)
    parts = schedule.context if isinstance(schedule, Plan) else (sizes or {}).get("context", 1)
    dims, more = check_batch_dims(inputs.batch_dims, signature), more_keywords(loss_fn, parts)
    calls = CallReader(model, has_target=has_target, batch_dims=dims, more=more)
    correction = read_correction(late.correction)
    scaler, device = read_grad_scaler(precision.grad_scaler), device_of(root, given.device)
    if scaler is None and autocast is torch.float16 and given.optimizer is not None:
        scaler = GradScaler(device.type)
    if loss_fn is not None:
        refuse_float16_parameters(root, loss_fn)
    dims = check_batch_dims(slices.dims, signature, option="dims", shared_by="slices of a microbatch")
    members = "members of a context group"
    sequence_dims = check_batch_dims(inputs.sequence_dims, signature, option="sequence_dims", shared_by=members)
    if slices.lengths is not None:
        option("lengths", slices.lengths, _LENGTHS)
    return Options(
        model=model,
        stages=stages,
        cut=cut,
        schedule=AUTO if isinstance(schedule, Auto) else schedule,
        kind=type(around),
        slices=replace(slices, dims=dims),
        sequence_dims={**dims, **sequence_dims},
        auto=schedule if isinstance(schedule, Auto) else Auto(),
        correction=correction,
        flush_first=late.flush_first,
        mesh=mesh,
        sizes=sizes,
        recompute=recompute,
        calls=calls,
        loss_fn=loss_fn,
        grad_scaler=scaler,
        compile=read_compile(precision.compile),
        device=device,
        **{each.name: getattr(given, each.name) for each in fields(GivenOptions) if each.name not in _READ},
    )


def _of_torch(
    model: Any, schedule: Any, cut: Any
) -> tuple[nn.Module | None, Sequence[nn.Module] | None, AnySchedule | None, Sequence[str] | None]:
    """Model or stages, schedule and cut, also from torch's Pipe, PipelineStages, split_spec and schedule classes."""
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
                raise ValueError(f"cut={{{name!r}: {point}}}: expected SplitPoint.BEGINNING of the next module")
        cut = list(cut)
    if _is_torchs(type(schedule)):
        said = f"{type(schedule).__name__}, num_microbatches={schedule._n_microbatches}, loss_fn=..."
        raise ValueError(f"schedule={type(schedule).__name__}(...): expected its class: schedule={said}")
    schedule = schedule.__name__ if _is_torchs(schedule) else schedule
    is_list = isinstance(model, list | tuple) or (
        isinstance(model, nn.ModuleList) and type(model).forward is nn.Module.forward
    )
    return None if is_list else model, list(model) if is_list else None, schedule, cut


def _is_torchs(kind: object) -> bool:
    return isinstance(kind, type) and kind.__module__.startswith("torch.distributed.pipelining")


def _read_mesh(mesh: MeshLike | None) -> tuple[Mesh, Mapping[str, int] | None]:
    """The record, and the given sizes by axis. Raises ValueError for another word than "auto"."""
    if isinstance(mesh, str) and mesh != AUTO:
        raise ValueError(f'mesh={mesh!r}: expected "auto", or sizes by axis, as in mesh={{"pipe": 2}}')
    if mesh is not None and not isinstance(mesh, str | Mapping | Mesh | DeviceMesh):
        meant = mesh if isinstance(mesh, int) else 2
        raise ValueError(f'mesh={mesh!r}: expected sizes by axis, as in mesh={{"pipe": {meant}}}')
    if not isinstance(mesh, Mesh | DeviceMesh):
        return Mesh(), None if isinstance(mesh, str) else mesh
    record = _mesh_of(mesh) if isinstance(mesh, DeviceMesh) else mesh
    sizes = {axis: getattr(record, axis) for axis in AXES}
    given = {axis: size for axis, size in sizes.items() if size is not None and (size != 1 or axis == "pipe")}
    return record, given or None


def _mesh_of(mesh: DeviceMesh) -> Mesh:
    """torch's mesh with axes "pp" ("pipe"), "dp" ("data"), "cp" ("context"), "ep" ("expert"), "tp" ("tensor") over all
    processes in order."""
    names = mesh.mesh_dim_names or ()
    axes = [_AXIS_OF.get(name, name) for name in names]
    if "pipe" not in axes or len({*axes}) < len(axes) or not {*axes} <= {*AXES}:
        raise ValueError(
            f"mesh={mesh}: expected dimensions named 'pp', 'dp', 'cp', 'ep', 'tp' (or {', '.join(map(repr, AXES))}), "
            f"'pp' among them, as in init_device_mesh({mesh.device_type!r}, (2, 2), mesh_dim_names=('pp', 'dp'))"
        )
    if mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        raise ValueError(f"mesh={mesh}: expected all processes, numbered along its last dimension first")
    sizes: dict[str, Any] = dict(zip(axes, mesh.mesh.shape, strict=True))
    return Mesh(**sizes, order=[*axes, *(axis for axis in AXES if axis not in axes)])


def _read_schedule(around: AnySchedule | None) -> tuple[ScheduleLike | Plan | Auto | None, Slices]:
    """The schedule or plan without its record, and its slices."""
    schedule: Any = around.schedule if isinstance(around, Asynchronous | Synchronous | Slices) else around
    slices = around if isinstance(around, Slices) else Slices()
    if (plan := _read_plan(schedule)) is None:
        if slices.num_slices is None and isinstance(slices.lengths, Sequence):
            slices = replace(slices, num_slices=len(slices.lengths))
        return schedule, slices
    if slices.num_slices is not None or slices.lengths is not None:
        raise ValueError("Slices(plan, num_slices=, lengths=): a plan fixes both: expected dims= alone")
    return plan, replace(slices, lengths=plan.slice_lengths or None)


def _read_plan(schedule: object) -> Plan | None:
    if not isinstance(schedule, str | os.PathLike) or not str(schedule).endswith(".json"):
        return schedule if isinstance(schedule, Plan) else None
    try:
        record = json.loads(Path(schedule).read_text())
    except (OSError, ValueError):  # the reader of schedules raises an error for it
        return None
    return Plan.load(Path(schedule)) if isinstance(record, dict) and "stages" in record else None


def _with_edits(edits: Mapping[str, Any], name: str, given: Any) -> Any:
    if name in edits and given not in (None, "none"):
        raise ValueError(f"{name}= together with edits that set it: expected only one of them")
    return edits.get(name, given)


_FSDP = 'mesh=stagewright.Mesh(data=D, data_parallel="fsdp")'
_DDP = 'mesh={"pipe": P, "data": D}'
_INSTEAD = {"FSDPModule": _FSDP, "FullyShardedDataParallel": _FSDP, "DistributedDataParallel": _DDP}
_INSTEAD["ReplicateModule"] = _DDP


def check_model(model: nn.Module | None, stages: Sequence[nn.Module] | None, cut: Sequence[str] | None) -> None:
    if (model is None) == (stages is None):
        raise ValueError("expected a model, or a list of modules, one per stage: PipelineModule(model, ...)")
    if stages is not None and cut is not None:
        raise ValueError("cut= is for a model: expected none with a list of stages, which is cut already")
    if cut is not None and (not isinstance(cut, list | tuple) or not all(isinstance(name, str) for name in cut)):
        such = cut if isinstance(cut, str) else "layers.2"
        raise ValueError(f"cut={cut!r:.60}: expected a list of names, such as [{such!r}]")
    if stages is not None and not stages:
        raise ValueError("PipelineModule([]): expected a list of modules, one per stage")
    for part in [model] if stages is None else stages:
        if not isinstance(part, nn.Module):
            such = f", made of the class: {part.__name__}(...)" if isinstance(part, type) else ""
            raise ValueError(f"{part!r:.60} is {type(part).__name__}: expected a torch.nn.Module{such}")
        _refuse_wrapped(part)


def _refuse_wrapped(root: nn.Module) -> None:
    if hasattr(root, "_orig_mod"):
        raise ValueError(
            "torch.compile(model) is one piece: expected the model itself, and "
            "precision=stagewright.Precision(compile=True), which compiles each of its units"
        )
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"module {path!r}" if path else "the model"
            raise ValueError(
                f"{what} is TorchScript: expected the nn.Module that it was made of (Precision(compile=True))"
            )
        kind = next((each.__name__ for each in type(module).__mro__ if each.__name__ in _INSTEAD), None)
        if kind is not None and (kind != "DistributedDataParallel" or module.process_group.size() > 1):
            raise ValueError(
                f"{f'module {path!r}' if path else 'the model'} is a {kind} already: expected plain modules, and "
                f"{_INSTEAD[kind]}, which does the same for each stage"
            )


def device_of(root: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Device of a run: the given one, or that of all the model's parameters. Raises ValueError for several."""
    if device is not None:
        try:
            torch.empty(0, device=(found := own_device(torch.device(device))))
        except (AssertionError, RuntimeError, TypeError) as error:
            problem = str(error).partition("\n")[0]
            raise ValueError(f"device={device!r}: {problem}. Expected a device of this host, such as 'cpu'") from None
        return found
    for name, parameter in root.named_parameters():
        if parameter.is_meta and type(parameter) not in (nn.Parameter, DeferredParameter):
            raise ValueError(
                f"parameter {name!r} is a meta tensor, without values: expected a model made anew; over processes a "
                f"PipelineModule leaves each of them the weights of its own stages (full_state_dict() has them all)"
            )
    devices = {device_where_built(p) for p in root.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise ValueError(f"the model's parameters are on {sorted(map(str, devices))}: expected one device, or device=")
    if (found := devices.pop()).type == "cpu":
        tell_of_gpus()
    return found


def _check_called(name: str, value: object) -> None:
    if value is None:
        return
    num_arguments, such = _CALLED[name]
    kind = type(value).__name__
    if isinstance(value, torch.optim.Optimizer | LRScheduler):
        shown, problem = f"{kind}(...)", "expected a function that makes one for each stage"
        if isinstance(value, torch.optim.Optimizer):
            such = f"lambda params: {kind}(params, lr={value.defaults.get('lr', '...')})"
        else:
            such = f"lambda optimizer: {kind}(optimizer, ...)"
    elif isinstance(value, type) and issubclass(value, nn.Module):
        shown, problem, such = value.__name__, "a class: expected a module of it", f"{value.__name__}()"
    elif not callable(value):
        shown, problem = " ".join(repr(value).split())[:60], "expected a callable"
    else:
        function = value.make if isinstance(value, NamedFactory) else value
        try:
            inspect.signature(function).bind(*[None] * num_arguments)
            return
        except TypeError as error:
            shown = getattr(function, "__qualname__", kind)
            problem = f"called with {num_arguments} argument{'s' * (num_arguments > 1)}, it fails ({error})"
        except ValueError:  # it has no signature, as some functions in C
            return
    raise ValueError(f"{name}={shown}: {problem}; {name}={such}")

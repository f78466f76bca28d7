"""Options of PipelineModule: read, and checked in one order."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.lr_scheduler import LRScheduler

from ...comm import Compress, own_device, read_compress
from ...partition.deferred.parameters import DeferredParameter
from ...partition.deferred.recipes import device_where_built
from ...partition.model.batch_dims import BatchDims, check_batch_dims
from ...partition.profiler.optimizers import NamedFactory, OptimizerFactory
from ...schedules import Schedule
from ...schedules.kinds import Kind, above_zero, at_least, one_of, option
from ...schedules.transform import schedule_without
from ..results import StepRecord
from ..shards.tensor_option import SENDS
from ..telling import tell_of_gpus
from .arguments import AUTO, Mesh, PlanLike, ScheduleLike, Weights
from .compiled import read_compile
from .delay_correction import ErrorFeedback, read_delay_correction
from .given import CallReader, Given, signature_of
from .model_loss import ModelLoss, read_loss_option
from .precision import read_grad_scaler, refuse_float16_parameters
from .recompute import RecomputeLike

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]

REROUTE = "reroute"
_LONGEST = 365 * 86400.0  # [s] what backends take for ever
TRIALS = 3  # of plans under schedule="auto", at most

_CALLED = {  # options that are called: with how many arguments, and such a one
    "loss_fn": (2, "lambda output, target: F.mse_loss(output, target)"),
    "optimizer": (1, "lambda params: torch.optim.AdamW(params)"),
    "lr_scheduler": (1, "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)"),
    "on_step": (1, "lambda record: print(record.loss)"),
}


_APPLIED = ("lr_scheduler", "delay_correction", "max_grad_norm", "grad_scaler", "flush_first")
FIRST = "first"
_VERIFY: Kind[float] = Kind(
    "'first' (the first batch, where a copy of the model fits), True (the first batch), a whole number N of at least 1 "
    "(the first batch and every N-th behind it), or False",
    lambda value: (
        math.inf if value is True or value == FIRST else value if value is False or at_least(1).read(value) else None
    ),
)
_SEED = Kind("a whole number", lambda value: int(value) if isinstance(value, Integral) else None)


_LENGTHS: Kind[Sequence[int]] = Kind(
    "a list of tokens, one number a slice, as in [96, 32]",
    lambda value: value if isinstance(value, list | tuple) and value and all(map(_is_length, value)) else None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that PipelineModule is told; see there. Raises ValueError for what makes no sense.

    Arguments:
        model: None: it is given as stages.
        calls: reads what `train_step` and its likes are given.
        example: a batch to build the stages for at once.
        schedule: None: the default, or a plan's.
        kind: of the schedule, where the user says it: synchronous, asynchronous, sliced.
        sizes: of the mesh, by axis, or a word; the rest of it stands in `mesh`.
        compress: that of the mesh, as it was read.
        loss_fn: of a model that returns its own: a ModelLoss.
        sequence_dims: dimension of the sequence in each argument, and in the target.
        verify: as it was given; `verify_every` has the number.
    """

    model: nn.Module | None = None
    stages: Sequence[nn.Module] | None = None
    calls: CallReader = field(default_factory=partial(CallReader, None, has_target=True, batch_dims={}))
    example: Given | None = None
    schedule: ScheduleLike | None = None
    plan: PlanLike | None = None
    kind: str | None = None
    mesh: Mesh = field(default_factory=Mesh)
    sizes: Mapping[str, int] | str | None = None
    compress: Compress | None = None
    num_microbatches: int | None = None
    num_chunks: int | None = None
    num_slices: int | None = None
    slice_lengths: Sequence[int] | None = None
    sequence_dims: BatchDims = field(default_factory=dict)
    split_points: Sequence[str] | None = None
    recompute: RecomputeLike = "none"
    replan: str | None = None
    trials: int = 0
    loss_fn: Callable[[Any, Any], Any] | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerFactory | None = None
    max_grad_norm: float | None = None
    grad_scaler: GradScaler | None = None
    autocast: torch.dtype | None = None
    compile: Mapping[str, Any] | None = None
    delay_correction: ErrorFeedback | None = None
    flush_first: int = 0
    on_step: Callable[[StepRecord], object] | None = None
    verify: bool | int | str = False
    weights: Weights | None = None
    seed: int = 0
    device: torch.device
    timeout: float

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
                    f"{name}={value!r} without an optimizer: expected optimizer= beside it, since train_step applies "
                    f"both; with an optimizer of your own, call clip_grad_norm_ and step the scheduler yourself"
                )

    @property
    def root(self) -> nn.Module:
        """Above all modules of the model or of the stages."""
        return nn.ModuleList(self.stages or []) if self.model is None else self.model

    @property
    def mesh_sizes(self) -> Mapping[str, int] | None:
        """By axis; None where the number of processes decides. ValueError for another word than "auto"."""
        if isinstance(self.sizes, str):
            if self.sizes != AUTO:
                raise ValueError(f'mesh={self.sizes!r}: expected "auto", or sizes by axis, as in mesh={{"pipe": 2}}')
            return None
        return self.sizes

    @property
    def verify_every(self) -> float | None:
        """Batches from one that is verified to the next; None: no copy of the model is kept to verify with."""
        return option("verify", self.verify, _VERIFY) or None

    @property
    def user_code(self) -> list[object]:
        """The user's own loss, and what makes the optimizers: what runs beside training puts back what they reach."""
        loss, optimizer = self.loss_fn, self.optimizer
        found = [
            vars(loss) if isinstance(loss, ModelLoss) else loss,
            optimizer.make if isinstance(optimizer, NamedFactory) else optimizer,
        ]
        return [each for each in found if each is not None]

    @property
    def model_loss(self) -> ModelLoss | None:
        """The loss of a model that returns its own; None for any other, and where there is none."""
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

    def refuse_flush(self, schedule: str) -> None:
        """ValueError for options of an asynchronous schedule under one that flushes."""
        if self.flush_first:
            raise ValueError(
                f"flush_first={self.flush_first} under the schedule {schedule!r}, which flushes behind every batch: "
                f"expected an asynchronous schedule such as '2bw', or flush_first=0"
            )
        if self.delay_correction is not None:
            self.delay_correction.refuse_flush(schedule)

    def check_kind(self, schedule: Schedule) -> None:
        """ValueError for a schedule of another kind than the record around it says."""
        late, sliced = schedule.is_asynchronous, schedule.num_slices > 1
        corrected = self.flush_first or self.delay_correction is not None  # has words of its own
        is_so = {"synchronous": not late, "asynchronous": late or corrected, "sliced": sliced}
        if self.kind is not None and not is_so[self.kind]:
            record, such = _KINDS[self.kind]
            raise ValueError(
                f"stagewright.{record} around the schedule {schedule.name!r}, which is not {self.kind}: expected "
                f"{record}({such!r}) or another of its kind, or the schedule by itself"
            )

    def check_replan(self) -> None:
        if self.replan not in (None, "batch"):
            raise ValueError(
                f'replan={self.replan!r}: expected "batch", a schedule for each batch; or None, one for all'
            )

    def refuse_reroute(self) -> None:
        """ValueError for options under which no rank's work can be another's, or a step cannot be done again."""
        given = {
            "a loss scale, which moves with each try": self.grad_scaler is not None,
            "an optimizer of your own": self.optimizer is None,
        }
        for what, is_given in given.items():
            if is_given:
                raise ValueError(f'Mesh(on_failure="reroute") beside {what}: expected none, or on_failure="stop"')

    def check_reroute(self, schedule: Schedule, *, num_replicas: int, tensor: int) -> None:
        """ValueError for a mesh without replicas that could take over, and for what only one rank has."""
        said, mesh = 'mesh=Mesh(on_failure="reroute")', self.mesh
        if num_replicas < 2:
            raise ValueError(f"{said} with data={num_replicas}: nobody could take over. Expected data=2 or more")
        if tensor > 1 or mesh.data_parallel != "replicate" or mesh.order is not None:
            raise ValueError(
                f"{said} beside tensor={tensor}, data_parallel={mesh.data_parallel!r}, order={mesh.order}: "
                f'expected tensor=1, "replicate" and no order, so that each replica of a stage has all of it'
            )
        if self.compress is not None:
            raise ValueError(f"{said} beside compress={self.compress!r}: expected one of them")
        schedule_without(schedule, range(1, num_replicas))  # says what else it cannot do

    def refuse_decided(self) -> None:
        """ValueError for an option that the plan decides on: the one that was given, or that "auto" finds."""
        mesh, is_found = self.mesh, self.plan is None
        given = {
            "num_chunks=": self.num_chunks is not None,
            "num_slices=": self.num_slices is not None,
            "cut=": self.split_points is not None,
            "a list of stages": self.stages is not None,
            "recompute=": self.recompute not in (None, "none"),
            "data_parallel=": mesh.data_parallel not in (None, "replicate"),
            "Mesh(sync=)": mesh.sync not in (None, 1),
            "Mesh(on_failure=)": mesh.on_failure not in (None, "stop"),
            "mesh=": self.mesh_sizes is not None and not is_found,
            "Mesh(order=)": mesh.order is not None,
        }
        for said, is_given in given.items():
            if is_given:
                what = 'schedule="auto"' if is_found else "a plan"
                raise ValueError(f"{said} beside {what}: expected one of them, since the plan decides on it")


_KINDS = {
    "synchronous": ("Synchronous", "zb-h1"),
    "asynchronous": ("Asynchronous", "2bw"),
    "sliced": ("Slices", "seq1f1b"),
}


def read_options(given: Mapping[str, Any]) -> Options:
    """Options by the names that their records have; ValueError for the first one that makes no sense."""
    model, loss_fn, example, mesh = given["model"], given["loss_fn"], given["example_inputs"], given["mesh"]
    check_model(model, given["stages"], given["split_points"])
    root = nn.ModuleList(given["stages"] or []) if model is None else model
    loss = read_loss_option(loss_fn, given["loss_weight"], model)
    signature = signature_of(model)
    has_target = loss is not None and not isinstance(loss, ModelLoss)
    calls = CallReader(model, has_target=has_target, batch_dims=check_batch_dims(given["batch_dims"], signature))
    correction = read_delay_correction(given["delay_correction"])
    scaler, device = read_grad_scaler(given["grad_scaler"]), device_of(root, given["device"])
    if scaler is None and given["autocast"] is torch.float16 and given["optimizer"] is not None:
        scaler = GradScaler(device.type)
    if loss_fn is not None:
        refuse_float16_parameters(root, loss_fn)
    shared_by, lengths = "slices of a microbatch", given["slice_lengths"]
    dims = check_batch_dims(given["sequence_dims"], signature, option="dims", shared_by=shared_by)
    if lengths is not None:
        option("lengths", lengths, _LENGTHS)
    read = {
        "calls": calls,
        "loss_fn": loss,
        "delay_correction": correction,
        "grad_scaler": scaler,
        "device": device,
        "sequence_dims": dims,
        "compile": read_compile(given["compile"]),
    }
    names = {each.name for each in fields(Options)} - {"trials"}
    told = Options(**{name: value for name, value in {**given, **read}.items() if name in names})
    trials = given["trials"]
    trials = TRIALS if trials is None else option("trials", trials, at_least(0, "a number of plans, 0 to try none"))
    option("verify", told.verify, _VERIFY)
    read_example = None if example is None else calls.example(example)
    option("sends", mesh.sends, one_of(SENDS))
    return replace(told, trials=trials, example=read_example, compress=read_compress(mesh.compress))


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_FSDP = 'mesh=stagewright.Mesh(data=D, data_parallel="fsdp")'
_DDP = 'mesh={"pipe": P, "data": D}'
_INSTEAD = {"FSDPModule": _FSDP, "FullyShardedDataParallel": _FSDP, "DistributedDataParallel": _DDP}
_INSTEAD["ReplicateModule"] = _DDP


def check_model(
    model: nn.Module | None, stages: Sequence[nn.Module] | None, split_points: Sequence[str] | None
) -> None:
    """ValueError unless there is either a model or a list of stages, and names to cut it at only where they can be."""
    if (model is None) == (stages is None):
        raise ValueError("expected a model, or a list of modules, one a stage: PipelineModule(model, ...)")
    if stages is not None and split_points is not None:
        raise ValueError("cut= is for a model: expected none beside a list of stages, which is cut already")
    if split_points is not None and (
        not isinstance(split_points, list | tuple) or not all(isinstance(name, str) for name in split_points)
    ):
        such = split_points if isinstance(split_points, str) else "layers.2"
        raise ValueError(f"cut={split_points!r:.60}: expected a list of names, such as [{such!r}]")
    if stages is not None and (not isinstance(stages, list | tuple | nn.ModuleList) or not stages):
        shown = f"{type(stages).__name__}(...)" if isinstance(stages, nn.Module) else repr(stages)[:60]
        raise ValueError(f"PipelineModule({shown}): expected a list of modules, one a stage")
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
    """Where a run is: on the device that is wanted, or else where the model is, with all its parameters."""
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


def warn_of_evaluation_mode(root: nn.Module) -> None:
    """Tell of a model to be trained without dropout, or whose BatchNorm stands still, as from_pretrained leaves it.

    Where only some modules are in evaluation mode, the user has put them there.
    """
    acts = (_DropoutNd, _NormBase)
    if any(isinstance(each, acts) for each in root.modules()) and not any(each.training for each in root.modules()):
        warnings.warn(
            "the model is in evaluation mode and trains as it is, without dropout and with BatchNorm's running "
            "statistics: expected model.train() before PipelineModule(model), unless that is meant",
            stacklevel=4,
        )

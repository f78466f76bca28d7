"""Checks of what PipelineModule is given to train: a model or stages, where it is, what goes together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..partition.graph.batch_dims import check_batch_dims, parameter_names
from ..partition.graph.model_loss import MODEL
from .batch.given import CallReader, signature_of
from .batch.model_loss import ModelLoss
from .batch.sequence import SequenceOptions

_FSDP, _DDP = 'mesh={"pipe": P, "data": D} with data_parallel="fsdp"', 'mesh={"pipe": P, "data": D}'
_INSTEAD = {"FSDPModule": _FSDP, "FullyShardedDataParallel": _FSDP, "DistributedDataParallel": _DDP}
_INSTEAD["ReplicateModule"] = _DDP


def check_model(
    model: nn.Module | None, stages: Sequence[nn.Module] | None, split_points: Sequence[str] | None
) -> None:
    """ValueError unless there is either a model or a list of stages, and names to cut it at only where they can be."""
    if (model is None) == (stages is None):
        raise ValueError("expected either a model or stages=[...], not both and not neither")
    if stages is not None and split_points is not None:
        raise ValueError("split_points= cut a model: expected none beside stages=, which is cut already")
    if split_points is not None and (
        not isinstance(split_points, list | tuple) or not all(isinstance(name, str) for name in split_points)
    ):
        raise ValueError(f"split_points={split_points!r}: expected a list of names, such as [{split_points!r:.60}]")
    if stages is not None and (not isinstance(stages, list | tuple | nn.ModuleList) or not stages):
        shown = f"{type(stages).__name__}(...)" if isinstance(stages, nn.Module) else repr(stages)[:60]
        raise ValueError(f"stages={shown}: expected a list of modules, one a stage")
    for part in [model] if stages is None else stages:
        if not isinstance(part, nn.Module):
            such = f", made of the class: {part.__name__}(...)" if isinstance(part, type) else ""
            raise ValueError(f"{part!r:.60} is {type(part).__name__}: expected a torch.nn.Module{such}")
        _refuse_wrapped(part)


def _refuse_wrapped(root: nn.Module) -> None:
    """ValueError for a module whose gradients or weights something else shares out among processes."""
    for path, module in root.named_modules():
        kind = next((each.__name__ for each in type(module).__mro__ if each.__name__ in _INSTEAD), None)
        if kind is not None and (kind != "DistributedDataParallel" or module.process_group.size() > 1):
            raise ValueError(
                f"{f'module {path!r}' if path else 'the model'} is a {kind} already: expected plain modules, and "
                f"{_INSTEAD[kind]}, which does the same for each stage"
            )


def refuse_float16_parameters(*modules: object) -> None:
    """ValueError for a float16 parameter of what is to be trained, by name."""
    for module in modules:
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            if parameter.dtype is torch.float16:
                raise ValueError(
                    f"parameter {name!r} is torch.float16: expected float32 parameters under "
                    f"torch.autocast(..., torch.float16) with grad_scaler=torch.amp.GradScaler(...), which divides no "
                    f"float16 gradients, or torch.bfloat16 (predict, without loss_fn=, runs)"
                )


def refuse_float16_autocast(device: torch.device, *, scales_loss: bool) -> None:
    """ValueError for a batch to train on within torch.autocast to float16 without a loss scale."""
    if (
        not scales_loss
        and torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type) is torch.float16
    ):
        raise ValueError(
            f"torch.autocast({device.type!r}, dtype=torch.float16) around training, where small gradients become 0 "
            f"without a loss scale: expected PipelineModule(..., grad_scaler=torch.amp.GradScaler({device.type!r})), "
            f"or torch.bfloat16, which needs none"
        )


def check_flag(name: str, value: object) -> bool:
    """The value of an option that is True or False; ValueError for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected True or False")
    return value


def read_verify(option: object) -> float:
    """Batches from one check of `verify=` to the next; infinite where at most the first one is checked."""
    if isinstance(option, bool):
        return math.inf
    if not isinstance(option, int) or option < 1:
        raise ValueError(
            f"verify={option!r}: expected True (the first batch), a whole number N of at least 1 (the first batch and "
            f"every N-th behind it), or False"
        )
    return option


def read_loss_option(
    loss_fn: Callable[[Any, Any], Any] | str | None, loss_weight: object, model: nn.Module | None
) -> Callable[[Any, Any], Any] | None:
    """The loss that `loss_fn=` names; ValueError for another word, and for a weight of what is weighted otherwise."""
    if isinstance(loss_fn, str):
        if loss_fn != MODEL:
            raise ValueError(
                f"loss_fn={loss_fn!r}: expected a function of (output, target), or {MODEL!r} for a model that returns "
                f"its own loss"
            )
        return ModelLoss(model, loss_weight)
    if loss_weight is not None:
        raise ValueError(
            f"loss_weight={loss_weight!r} without loss_fn={MODEL!r}: expected it for a model that returns its own "
            f"loss; a loss_fn returns (sum, count) instead"
        )
    return loss_fn


def call_reader(model: nn.Module | None, loss: object, batch_dims: object) -> CallReader:
    """The reader of what `train_step` and its likes are given; ValueError for wrong `batch_dims`."""
    has_target = loss is not None and not isinstance(loss, ModelLoss)
    return CallReader(model, has_target=has_target, batch_dims=check_batch_dims(batch_dims, signature_of(model)))


def sequence_options(model: nn.Module | None, lengths: Sequence[int] | None, dims: object) -> SequenceOptions:
    """How sequences are cut; ValueError for wrong `slice_lengths` or `sequence_dims`."""
    signature = signature_of(model)
    read = check_batch_dims(dims, signature, option="sequence_dims", shared_by="slices of a microbatch")
    return SequenceOptions(lengths=lengths, dims=read, names=parameter_names(signature))


def refuse_beside(what: str, others: Mapping[str, object]) -> None:
    """ValueError for an option that a plan decides on."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}= beside {what}: expected one of them, since the plan decides on it")


def device_of(root: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Where a run is: on the device that is wanted, or else where the model is, with all its parameters."""
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError, TypeError) as error:
            problem = str(error).partition("\n")[0]
            raise ValueError(f"device={device!r}: {problem}. Expected a device of this host, such as 'cpu'") from None
        return torch.device(device)
    for name, parameter in root.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is a meta tensor, without values: expected a model made anew; over processes a "
                f"PipelineModule leaves each of them the weights of its own stages (full_state_dict() has them all)"
            )
    devices = {p.device for p in root.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise ValueError(f"the model's parameters are on {sorted(map(str, devices))}: expected one device, or device=")
    return devices.pop()

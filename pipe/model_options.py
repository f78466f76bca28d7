"""Checks of what PipelineModule is given to train: a model or stages, where it is, what goes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


def check_model(
    model: nn.Module | None, stages: Sequence[nn.Module] | None, split_points: Sequence[str] | None
) -> None:
    """ValueError unless there is either a model or a list of stages, and names to cut it at only where they can be."""
    if (model is None) == (stages is None):
        raise ValueError("expected either a model or stages=[...], not both and not neither")
    if stages is not None and split_points is not None:
        raise ValueError("split_points= cut a model: expected none beside stages=, which is cut already")
    if isinstance(split_points, str):
        raise ValueError(f"split_points={split_points!r}: expected a list of names, such as [{split_points!r}]")
    if stages is not None and not isinstance(stages, list | tuple | nn.ModuleList):
        raise ValueError(f"stages={stages!r:.60}: expected a list of modules, one a stage")
    for part in [model] if stages is None else stages:
        if not isinstance(part, nn.Module):
            raise ValueError(f"{part!r:.60} is {type(part).__name__}: expected a torch.nn.Module")


def check_flag(name: str, value: object) -> bool:
    """The value of an option that is True or False; ValueError for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected True or False")
    return value


def refuse_beside(what: str, others: Mapping[str, object]) -> None:
    """ValueError for an option that a plan decides on."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}= beside {what}: expected one of them, since the plan decides on it")


def device_of(root: nn.Module) -> torch.device:
    """Where the model is: all its parameters must be on one device."""
    devices = {p.device for p in root.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise ValueError(f"the model's parameters are on {sorted(map(str, devices))}: expected one device, or device=")
    return devices.pop()

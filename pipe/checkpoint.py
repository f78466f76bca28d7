"""Checkpoints: one file a stage, and a manifest that makes them valid.

    checkpoint.json     version, step, stages       (written last: without it there is no checkpoint)
    stage-0.pt ...      model: name -> tensor; optimizer: name -> its state; options: name -> lr, betas, ...
                        versions: number -> name -> tensor, the older weights that an asynchronous schedule still uses

Everything stands under the model's original names, so a checkpoint loads on any other number of ranks or stages.
Files are read with `weights_only=True`: loading executes no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..comm import Collectives
from .stages.ownership import Ownership
from .stages.weights import WeightVersions
from .update.optimizers import StageOptimizer

_VERSION = 1
_MANIFEST = "checkpoint.json"


def save(
    folder: str | os.PathLike[str],
    *,
    step: int,
    ownership: Ownership,
    optimizers: Mapping[int, StageOptimizer],
    weights: Mapping[int, WeightVersions],
    local_stages: Sequence[int],
    num_stages: int,
    collectives: Collectives,
) -> None:
    """Write this process's stages; the first process completes the checkpoint. Collective over the processes."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    manifest = path / _MANIFEST
    first = 0 in local_stages
    if first:
        manifest.unlink(missing_ok=True)  # what stands there is no longer whole
    collectives.gather(None, what=f"beginning the checkpoint {path}")
    state = ownership.state_dict()
    for stage in local_stages:
        model = {name: value.detach() for name, value in state.items() if stage in ownership.stages[name]}
        content: dict[str, Any] = {"model": model, "optimizer": {}, "options": {}, "scheduler": None}
        one = optimizers.get(stage)
        if one is not None and one.optimizer is not None:
            for group in one.optimizer.param_groups:
                for parameter in group["params"]:
                    name = one.names[id(parameter)]
                    content["optimizer"][name] = dict(one.optimizer.state.get(parameter, {}))
                    content["options"][name] = {key: value for key, value in group.items() if key != "params"}
            content["scheduler"] = None if one.scheduler is None else one.scheduler.state_dict()
        if stage in weights:
            content["versions"] = weights[stage].older()
        partial = path / f"stage-{stage}.pt.partial"
        torch.save(content, partial)
        partial.replace(path / f"stage-{stage}.pt")
    collectives.gather(None, what=f"completing the checkpoint {path}")
    if first:
        partial = manifest.with_suffix(".partial")
        partial.write_text(json.dumps({"version": _VERSION, "step": step, "num_stages": num_stages}), encoding="utf-8")
        partial.replace(manifest)
    collectives.gather(None, what=f"completing the checkpoint {path}")


def load(
    folder: str | os.PathLike[str],
    *,
    ownership: Ownership,
    optimizers: Sequence[StageOptimizer],
    weights: Sequence[WeightVersions],
    updates_per_step: int,
    device: torch.device,
) -> int:
    """Load what this process holds; returns the step. Raises ValueError for no whole checkpoint of this model."""
    path = Path(folder)
    manifest = _read_manifest(path)
    model: dict[str, torch.Tensor] = {}
    states: dict[str, Any] = {}
    options: dict[str, Any] = {}
    scheduler: Any = None
    versions: dict[int, dict[str, torch.Tensor]] = {}
    for stage in range(manifest["num_stages"]):
        content = _read_stage(path / f"stage-{stage}.pt")
        model.update(content["model"])
        states.update(content["optimizer"])
        options.update(content["options"])
        scheduler = scheduler or content["scheduler"]
        for number, tensors in content.get("versions", {}).items():
            versions.setdefault(number, {}).update(tensors)
    ownership.load_state_dict(model)
    for stage_weights in weights:
        for own, name in zip(stage_weights.own, stage_weights.names, strict=True):
            own.data.copy_(model[name])
        stage_weights.restore(manifest["step"] * updates_per_step, versions)
    for one in optimizers:
        if one.optimizer is None:
            continue
        names = one.names
        missing = [names[id(p)] for g in one.optimizer.param_groups for p in g["params"] if names[id(p)] not in states]
        if missing:
            raise ValueError(
                f"checkpoint {path} has no optimizer state of {missing[:3]}: expected one saved with an optimizer"
            )
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                one.optimizer.state[parameter] = {
                    key: _like(value, parameter, device) for key, value in states[name].items()
                }
                group.update(options[name])
        if one.scheduler is not None and scheduler is not None:
            one.scheduler.load_state_dict(scheduler)
    return int(manifest["step"])


def _like(value: Any, parameter: torch.Tensor, device: torch.device) -> Any:
    """A state tensor where its parameter is; a step count stays where it was."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device).clone() if value.shape == parameter.shape else value.clone()


def _read_manifest(path: Path) -> dict[str, int]:
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path} is no checkpoint: expected a folder with {_MANIFEST} from pipe.save") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path / _MANIFEST} is unreadable: {error}") from None
    keys = {"version", "step", "num_stages"}
    if not isinstance(manifest, dict) or set(manifest) != keys or not all(type(manifest[k]) is int for k in keys):
        raise ValueError(f"{path / _MANIFEST}: expected whole numbers for {sorted(keys)}, found {manifest!r:.200}")
    if manifest["version"] != _VERSION or manifest["num_stages"] < 1 or manifest["step"] < 0:
        raise ValueError(f"{path / _MANIFEST} has {manifest}: expected version {_VERSION} and at least one stage")
    return manifest


def _read_stage(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if not isinstance(content, dict) or set(content) - {"versions"} != {"model", "optimizer", "options", "scheduler"}:
        raise ValueError(f"{path}: expected model, optimizer, options and scheduler, as pipe.save(dir) leaves them")
    return content

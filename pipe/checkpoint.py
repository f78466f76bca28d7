"""State of training in checkpoints: weights, optimizers, learning-rate schedulers, step.

    stage's file    model: name -> tensor; optimizer: name -> its state; options: name -> lr, betas, ...
                    versions: number -> name -> tensor, the older weights that an asynchronous schedule still uses
    rule: weight rule and updates a step by which they are numbered; another one begins with the newest weights
    loader (stage 0's file alone): where the data loader stands

Everything stands under the model's original names, so a checkpoint loads on any other number of ranks or stages.
`checkpoint_files` brings it to the disk and back.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ..comm import Collectives
from ..schedules import Schedule
from .checkpoint_files import Manifest, StageFile, complete, new_name, read, write_stage
from .stages.ownership import Ownership
from .update.interface import StageState
from .update.optimizers import StageOptimizer


class HasState(Protocol):
    """A data loader that can say where it stands and go on from there, as `pipe.loader` makes them."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors, numbers and text, in dicts and lists."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> object:
        """Go on from there; ValueError where that cannot be done."""


def save(
    folder: str | os.PathLike[str],
    *,
    step: int,
    ownership: Ownership,
    stages: Mapping[int, StageState],
    written_stages: Sequence[int],
    schedule: Schedule,
    collectives: Collectives,
    loader: Mapping[str, Any] | None,
) -> None:
    """Write this process's stages beside the last checkpoint; stage 0's process completes the new one.

    Collective over the processes. Raises ValueError where the folder is a file.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: expected a folder, an existing or a new one, to save checkpoints in")
    name = collectives.gather(new_name(step), what=f"beginning the checkpoint {path}")[0]
    state = ownership.state_dict()
    written: dict[int, StageFile] = {}
    for stage in written_stages:
        model = {key: value.detach() for key, value in state.items() if stage in ownership.stages[key]}
        kept = stages.get(stage)
        content = {"model": model, **_optimizer_content(None if kept is None else kept.optimizer)}
        if kept is not None and kept.versions is not None:
            content["versions"] = kept.versions.older()
            content["rule"] = _rule(schedule)
        if stage == 0 and loader is not None:
            content["loader"] = dict(loader)
        written[stage] = write_stage(path, name, stage, content)
    everywhere: dict[int, StageFile] = {}
    for elsewhere in collectives.gather(written, what=f"writing the checkpoint {path}"):
        everywhere |= elsewhere
    if 0 in written_stages:
        files = tuple(everywhere[stage] for stage in range(schedule.num_stages))
        complete(path, Manifest(name=name, step=step, files=files))
    collectives.gather(None, what=f"completing the checkpoint {path}")


def _optimizer_content(stage: StageOptimizer | None) -> dict[str, Any]:
    states: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if stage is None or stage.optimizer is None:
        return {"optimizer": states, "options": options, "scheduler": None}
    for group in stage.optimizer.param_groups:
        for parameter in group["params"]:
            name = stage.names[id(parameter)]
            states[name] = dict(stage.optimizer.state.get(parameter, {}))
            options[name] = {key: value for key, value in group.items() if key != "params"}
    scheduler = None if stage.scheduler is None else stage.scheduler.state_dict()
    return {"optimizer": states, "options": options, "scheduler": scheduler}


def load(
    folder: str | os.PathLike[str],
    *,
    ownership: Ownership,
    stages: Sequence[StageState],
    schedule: Schedule,
    device: torch.device,
    loader: HasState | None,
) -> int:
    """Load what this process holds; returns the step.

    Everything is checked before anything is changed. Raises ValueError for no whole checkpoint of this model.
    """
    path = Path(folder)
    manifest, contents = read(path)
    model: dict[str, torch.Tensor] = {}
    states: dict[str, Any] = {}
    options: dict[str, Any] = {}
    versions: dict[int, dict[str, torch.Tensor]] = {}
    for content in contents:
        model.update(content["model"])
        states.update(content["optimizer"])
        options.update(content["options"])
        is_alike = content.get("rule") == _rule(schedule)
        for number, tensors in content.get("versions", {}).items() if is_alike else ():
            versions.setdefault(number, {}).update(tensors)
    scheduler = next((content["scheduler"] for content in contents if content["scheduler"]), None)
    used = [one.optimizer for one in stages if one.optimizer.optimizer is not None]
    needed = [
        one.names[id(p)] for one in used if one.optimizer for g in one.optimizer.param_groups for p in g["params"]
    ]
    missing = sorted(set(needed) - states.keys())
    if missing:
        raise ValueError(
            f"checkpoint {path} has no optimizer state of {missing[:3]}: expected one saved with an optimizer"
        )
    _load_loader(path, contents[0].get("loader"), loader)
    ownership.load_state_dict(model)  # checks all names and shapes first
    for stage_weights in (one.versions for one in stages if one.versions is not None):
        for own, name in zip(stage_weights.own, stage_weights.names, strict=True):
            own.data.copy_(model[name])
        stage_weights.restore(manifest.step * schedule.groups_per_batch, versions)
    for one in used:
        assert one.optimizer is not None
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                name = one.names[id(parameter)]
                state = {key: _like(value, parameter, device) for key, value in states[name].items()}
                one.optimizer.state[parameter] = state
                group.update(options[name])
        if one.scheduler is not None and scheduler is not None:
            one.scheduler.load_state_dict(scheduler)
    return manifest.step


def _load_loader(path: Path, state: Mapping[str, Any] | None, loader: HasState | None) -> None:
    """Give a loader its place; a warning where nobody takes it."""
    if loader is not None:
        if state is None:
            raise ValueError(f"checkpoint {path} has no place in the data: expected one from pipe.save(..., loader=)")
        loader.load_state_dict(state)
    elif state is not None:
        warnings.warn(
            f"checkpoint {path} knows where the data loader stood ({dict(state)!r:.120}), and nobody takes it: data "
            f"begins from the start. Type pipe.load(folder, loader=loader)",
            stacklevel=6,
        )


def _rule(schedule: Schedule) -> list[str | int]:
    return [schedule.weight_rule, schedule.groups_per_batch]


def _like(value: Any, parameter: torch.Tensor, device: torch.device) -> Any:
    """A state tensor where its parameter is; a step count stays where it was."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device).clone() if value.shape == parameter.shape else value.clone()

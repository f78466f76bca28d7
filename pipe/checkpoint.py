"""State of training in checkpoints: weights, optimizers, learning-rate schedulers, step.

    stage's file    model: name -> tensor; state and optimizers: see `checkpoint_optimizers`
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
from .checkpoint_optimizers import SavedOptimizers, optimizer_content
from .stages.ownership import Ownership
from .update.interface import StageState


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
        content = {"model": model, **optimizer_content(None if kept is None else kept.optimizers)}
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
    versions: dict[int, dict[str, torch.Tensor]] = {}
    for content in contents:
        model.update(content["model"])
        is_alike = content.get("rule") == _rule(schedule)
        for number, tensors in content.get("versions", {}).items() if is_alike else ():
            versions.setdefault(number, {}).update(tensors)
    saved = SavedOptimizers.of(contents, where=str(path))
    for one in stages:
        saved.check(one.optimizers)
    _load_loader(path, contents[0].get("loader"), loader)
    ownership.load_state_dict(model)  # checks all names and shapes first
    for stage_weights in (one.versions for one in stages if one.versions is not None):
        for own, name in zip(stage_weights.own, stage_weights.names, strict=True):
            own.data.copy_(model[name])
        stage_weights.restore(manifest.step * schedule.groups_per_batch, versions)
    for one in stages:
        saved.load_into(one.optimizers, device)
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

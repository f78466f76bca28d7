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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..comm import Collectives
from ..schedules import Schedule
from .checkpoint_files import Manifest, OwnCheckpoints, StageFile, complete, new_name, read, write_stage
from .checkpoint_optimizers import SavedOptimizers, optimizer_content
from .stages.ownership import Ownership
from .update.interface import StageState


class HasState(Protocol):
    """A data loader that can say where it stands and go on from there, as `pipe.loader` makes them."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors, numbers and text, in dicts and lists."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> object:
        """Go on from there; ValueError where that cannot be done."""


class Answer(NamedTuple):
    """A rank's finding: a checkpoint's name and place, or why it cannot be loaded."""

    name: str
    place: Path
    problem: str


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
    own: OwnCheckpoints,
) -> None:
    """Write this process's stages beside the last checkpoint; stage 0's process completes the new one.

    Collective over the processes. Raises ValueError where the folder is a file.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: expected a folder, an existing or a new one, to save checkpoints in")
    name = collectives.gather(new_name(step), what=f"beginning the checkpoint {path}")[0]
    own.begin(name)
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
        complete(path, Manifest(name=name, step=step, files=files), own)
    collectives.gather(None, what=f"completing the checkpoint {path}")


def load(
    folder: str | os.PathLike[str],
    *,
    ownership: Ownership,
    stages: Sequence[StageState],
    schedule: Schedule,
    device: torch.device,
    loader: HasState | None,
    own: OwnCheckpoints,
    agree: Callable[[Answer], None],
) -> int:
    """Load what this process holds; returns the step.

    Everything is checked before anything is changed, on every rank: `agree` is told what was found, and raises
    where ranks would not load the same. Raises ValueError for no whole checkpoint of
    this model.
    """
    path = Path(folder)
    try:
        found = _read(path, ownership=ownership, stages=stages, schedule=schedule)
    except ValueError as error:
        agree(Answer("", path, str(error)))
        raise
    agree(Answer(found.manifest.name, found.place, ""))
    step = found.manifest.step
    _load_loader(path, found.loader, loader)
    ownership.load_state_dict(found.model)
    for stage_weights in (one.versions for one in stages if one.versions is not None):
        for parameter, name in zip(stage_weights.own, stage_weights.names, strict=True):
            parameter.data.copy_(found.model[name])
        stage_weights.restore(step * schedule.groups_per_batch, found.versions)
    for one in stages:
        found.optimizers.load_into(one.optimizers, device)
    own.adopt(found.place)
    return step


def refuse_differing(answers: Sequence[Answer]) -> None:
    """ValueError unless all ranks, in order, have read one checkpoint."""
    for rank, answer in enumerate(answers):
        if answer.problem:
            raise ValueError(f"rank {rank} cannot load the checkpoint, so no rank does: {answer.problem}")
        if answer.name != answers[0].name:
            raise ValueError(
                f"rank 0 read {answers[0].place} and rank {rank} read {answer.place}: expected one folder that all "
                f"ranks see and nobody saves into meanwhile, or pipe.load of one checkpoint in it"
            )


class _Read(NamedTuple):
    """A checkpoint that fits, before anything is changed."""

    place: Path
    manifest: Manifest
    model: Mapping[str, torch.Tensor]
    versions: Mapping[int, Mapping[str, torch.Tensor]]
    optimizers: SavedOptimizers
    loader: Mapping[str, Any] | None


def _read(path: Path, *, ownership: Ownership, stages: Sequence[StageState], schedule: Schedule) -> _Read:
    place, manifest, contents = read(path)
    model: dict[str, torch.Tensor] = {}
    versions: dict[int, dict[str, torch.Tensor]] = {}
    for content in contents:
        model.update(content["model"])
        is_alike = content.get("rule") == _rule(schedule)
        for number, tensors in content.get("versions", {}).items() if is_alike else ():
            versions.setdefault(number, {}).update(tensors)
    optimizers = SavedOptimizers.of(contents, where=str(path))
    for one in stages:
        optimizers.check(one.optimizers)
    ownership.check_state_dict(model)
    return _Read(place, manifest, model, versions, optimizers, contents[0].get("loader"))


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

"""Going on from a checkpoint: weights, optimizers, learning-rate schedulers, step.

    stage's file    model: name -> tensor; state and optimizers: see `optimizers`
                    versions: number -> name -> tensor, the older weights that an asynchronous schedule still uses
    rule: weight rule and updates a step by which they are numbered; another one begins with the newest weights
    loader (stage 0's file alone): where the data loader stands; loss_scale (likewise): of float16, by age of version

Everything stands under the model's original names, so a checkpoint loads on any other number of ranks or stages.
`persist` and `files` bring it to the disk and back.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...schedules import Schedule
from ..stages.ownership import Ownership
from ..update.interface import StageState
from ..update.loss_scale import LossScale
from .files import Manifest, OwnCheckpoints, read
from .optimizers import SavedOptimizers
from .snapshot import HasState, rule_of


class Answer(NamedTuple):
    """A rank's finding: a checkpoint's name and place, or why it cannot be loaded."""

    name: str
    place: Path
    problem: str


def load(
    folder: str | os.PathLike[str],
    *,
    ownership: Ownership,
    stages: Sequence[StageState],
    schedule: Schedule,
    device: torch.device,
    loader: HasState | None,
    loss_scales: Sequence[LossScale],
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
    for scale in loss_scales:
        if found.loss_scale is not None:
            scale.load(step * schedule.groups_per_batch, found.loss_scale)
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
    loss_scale: Mapping[int, Sequence[float]] | None


def _read(path: Path, *, ownership: Ownership, stages: Sequence[StageState], schedule: Schedule) -> _Read:
    place, manifest, contents = read(path)
    model: dict[str, torch.Tensor] = {}
    versions: dict[int, dict[str, torch.Tensor]] = {}
    for content in contents:
        model.update(content["model"])
        is_alike = content.get("rule") == rule_of(schedule)
        for number, tensors in content.get("versions", {}).items() if is_alike else ():
            versions.setdefault(number, {}).update(tensors)
    optimizers = SavedOptimizers.of(contents, where=str(path))
    for one in stages:
        optimizers.check(one.optimizers)
    ownership.check_state_dict(model)
    scale = contents[0].get("loss_scale")
    if scale is not None and contents[0].get("rule") != rule_of(schedule):
        scale = {0: scale[0]}
    return _Read(place, manifest, model, versions, optimizers, contents[0].get("loader"), scale)


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

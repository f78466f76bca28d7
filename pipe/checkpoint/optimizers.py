"""Optimizers and learning-rate schedules in checkpoints: by parameter name, so that another cut may take them.

tensors     optimizer/ENTRY/NAME: what an optimizer keeps for a parameter under ENTRY
values      optimizer/ENTRY/NAME: the same where it is no tensor
            optimizers, by process: stage, class, groups (names, options), scheduler (class, state), in order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..parallel.shard import Shard
from ..stages.ownership import Ownership
from ..update.optimizers import StageOptimizers
from .values import Json, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldEntry:
    """State that an optimizer keeps for a parameter under `entry`.

    Arguments:
        shard: of a tensor; None for any other value.
        is_like_parameter: whether the shard is that of the parameter here; else each process has all of it.
    """

    name: str
    entry: str
    value: Any
    shard: Shard | None
    is_like_parameter: bool = False


def state_shard(stage: StageOptimizers, name: str, ownership: Ownership) -> Shard:
    """Part of a parameter for which the stage's optimizer here keeps state."""
    return stage.shard(name, ownership.shard(name))


def held_state(stage: StageOptimizers, ownership: Ownership) -> Iterator[HeldEntry]:
    """All that a stage's optimizers keep here.

    Raises ValueError for a tensor that is neither like its parameter nor whole on each process.
    """
    for optimizer in stage.optimizers:
        for parameter, state in optimizer.state.items():
            name = stage.names[id(parameter)]
            shard = state_shard(stage, name, ownership)
            for entry, value in state.items():
                if not isinstance(entry, str):
                    raise ValueError(
                        f"optimizer {type(optimizer).__name__} keeps {entry!r:.40} for {name!r}: expected text as the "
                        f"key of each entry of its state"
                    )
                if not isinstance(value, torch.Tensor):
                    yield HeldEntry(name=name, entry=entry, value=value, shard=None)
                elif tuple(value.shape) == shard.local:
                    yield HeldEntry(name=name, entry=entry, value=value, shard=shard, is_like_parameter=True)
                elif shard.is_whole or value.numel() == 1:
                    yield HeldEntry(name=name, entry=entry, value=value, shard=Shard.whole(tuple(value.shape)))
                else:
                    raise ValueError(
                        f"optimizer {type(optimizer).__name__} keeps {entry!r} of shape {tuple(value.shape)} for "
                        f"{name!r}, of which this process has a part of shape {shard.local}: expected state of the "
                        f"parameter's shape, which another number of processes can divide anew, or whole parameters"
                    )


def optimizer_content(stage: StageOptimizers) -> list[Json]:
    """Optimizers of a stage, without what they keep for each parameter.

    Raises ValueError for a tensor without a name in the model.
    """
    written: list[Json] = []
    for position, optimizer in enumerate(stage.optimizers):
        kind = type(optimizer).__name__
        groups = [
            {
                "names": stage.names_in(optimizer, group),
                "options": encode(options_of_group(group), what=f"an option of {kind}"),
            }
            for group in optimizer.param_groups
        ]
        scheduler = stage.schedulers[position] if stage.schedulers else None
        kept = None
        if scheduler is not None:
            state = encode(scheduler.state_dict(), what=f"the state of {type(scheduler).__name__}")
            kept = {"class": type(scheduler).__name__, "state": state}
        written.append({"stage": stage.stage, "class": kind, "groups": groups, "scheduler": kept})
    return written


def options_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}

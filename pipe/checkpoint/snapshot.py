"""Snapshots: what this process holds of a run's state, before it is on the disk.

Taking one is collective only in that a stream is drained before; it reads weights, and copies none until `to_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ...schedules import Schedule
from ..stages.ownership import Ownership
from ..update.interface import StageState
from ..update.loss_scale import LossScale
from .optimizers import optimizer_content


class HasState(Protocol):
    """A data loader that can say where it stands and go on from there, as `pipe.loader` makes them."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors, numbers and text, in dicts and lists."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> object:
        """Go on from there; ValueError where that cannot be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State behind `step` steps.

    Arguments:
        num_stages: S of the run.
        stages: content of each stage's file that this process writes.
    """

    step: int
    num_stages: int
    stages: Mapping[int, Mapping[str, Any]]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [leaf for leaf in pytree.tree_leaves(dict(self.stages)) if isinstance(leaf, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def to_host(self, copy: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Snapshot:
        """The same state in memory of its own, which training does not change.

        Arguments:
            copy: a tensor -> its copy in host memory, if there is a faster way than one after the other.
        """
        made = copy or _host_copy
        stages = pytree.tree_map_only(torch.Tensor, made, dict(self.stages))
        return Snapshot(step=self.step, num_stages=self.num_stages, stages=stages)


def take_snapshot(
    *,
    step: int,
    ownership: Ownership,
    stages: Mapping[int, StageState],
    written_stages: Sequence[int],
    schedule: Schedule,
    loader: Mapping[str, Any] | None,
    loss_scales: Sequence[LossScale],
) -> Snapshot:
    """State of this process's stages; the tensors are those that train.

    Raises ValueError for a tensor of an optimizer that has no name in the model.
    """
    state = ownership.state_dict()
    contents: dict[int, dict[str, Any]] = {}
    for stage in written_stages:
        model = {key: value.detach() for key, value in state.items() if stage in ownership.stages[key]}
        kept = stages.get(stage)
        content = {"model": model, **optimizer_content(None if kept is None else kept.optimizers)}
        if kept is not None and kept.versions is not None:
            content["versions"] = kept.versions.older()
            content["rule"] = rule_of(schedule)
        if stage == 0 and loader is not None:
            content["loader"] = dict(loader)
        if stage == 0 and loss_scales:
            content["loss_scale"] = loss_scales[0].content()
        contents[stage] = content
    return Snapshot(step=step, num_stages=schedule.num_stages, stages=contents)


def rule_of(schedule: Schedule) -> list[str | int]:
    """The weight rule, and updates a step by which versions are numbered."""
    return [schedule.weight_rule, schedule.groups_per_batch]


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)

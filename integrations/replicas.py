"""Data replicas of a pipeline as the processes that Trainer and accelerate share data among."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ..pipe import PipelineModule


@contextmanager
def seen_as(states: tuple[Any, ...], index: int, count: int) -> Iterator[None]:
    """Within, accelerate takes this process for one of so many."""
    before = [(state.process_index, state.num_processes) for state in states]
    try:
        for state in states:
            state.process_index, state.num_processes = index, count
        yield
    finally:
        for state, (own, number) in zip(states, before, strict=True):
            state.process_index, state.num_processes = own, number


def read_pipeline(pipeline: object) -> dict[str, Any]:
    """Arguments of PipelineModule. Raises ValueError for what is none, and for names that it does not have."""
    known = inspect.signature(PipelineModule).parameters
    if not isinstance(pipeline, Mapping | None) or not all(isinstance(name, str) for name in pipeline or {}):
        raise ValueError(
            f'pipeline={pipeline!r:.60}: expected arguments of PipelineModule, as in {{"schedule": "1f1b"}}'
        )
    for name in pipeline or {}:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or list(known)[1:-1]
            raise ValueError(f"pipeline={{{name!r}: ...}}: expected {', '.join(map(repr, near))}")
    return dict(pipeline or {})


def from_all(value: object, replica: int) -> list[Any]:
    """Values of processes, by data replica or another share of a batch; None is nothing. Collective."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (replica, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)))
    return [each for _, each in sorted(dict(pair for pair in found if pair[1] is not None).items())]

"""Data replicas of a pipeline as the processes that Trainer and accelerate share data among."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree


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


def from_all(value: object, replica: int) -> list[Any]:
    """What processes have, by data replica or another share of a batch; None is nothing. Collective."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (replica, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)))
    return [each for _, each in sorted(dict(pair for pair in found if pair[1] is not None).items())]

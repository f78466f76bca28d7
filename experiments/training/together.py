"""Exchange between the ranks of a run beside the pipeline."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(own: T) -> tuple[T, ...]:
    """Values of each process, by rank; collective."""
    if not dist.is_initialized():
        return (own,)
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return tuple(found)


def first(text: str) -> str:
    """The text of process 0, in each process; collective."""
    if not dist.is_initialized():
        return text
    texts = [text]
    dist.broadcast_object_list(texts)
    return texts[0]

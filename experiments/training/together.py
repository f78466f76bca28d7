"""Exchange between the ranks of a run beside the pipeline."""

from __future__ import annotations

import torch.distributed as dist


def gather(number: int) -> tuple[int, ...]:
    """One number from each process, by rank; collective."""
    if not dist.is_initialized():
        return (number,)
    numbers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return tuple(numbers)


def first(text: str) -> str:
    """The text of process 0, in each process; collective."""
    if not dist.is_initialized():
        return text
    texts = [text]
    dist.broadcast_object_list(texts)
    return texts[0]

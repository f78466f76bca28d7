"""A checksum of what a rank passes to a step: ranks of one pipeline must have passed the same batch.

Rank 0 computes with the inputs and the last rank with the target. If a data loader shuffles by itself on each rank, an
input meets the target of another one, and training goes on as if the labels were noise.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch
from torch.utils import _pytree as pytree

# Elements of each tensor, evenly spread: an order or a sample that differs shows, at no cost to speak of.
_SAMPLED = 4096
UNKNOWN = -1.0  # of a rank that passes shapes alone


def checksum(value: object) -> float:
    """A whole number of 32 bits over shapes, types and up to 4,096 elements of each tensor in `value`.

    UNKNOWN where a tensor is on the meta device. Of sparse and nested tensors shapes and types count alone, of other
    objects nothing. On CUDA it waits for the tensors to be there.

    >>> checksum((torch.arange(6), "name")) == checksum((torch.arange(6), "other"))
    True
    >>> checksum(torch.arange(6)) == checksum(torch.arange(6).flip(0))
    False
    """
    if is_shape_alone(value):
        return UNKNOWN
    number = 0
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            continue
        shape = "nested" if leaf.is_nested else tuple(leaf.shape)
        number = zlib.crc32(f"{shape} {leaf.dtype}{' wants a gradient' * leaf.requires_grad}".encode(), number)
        if leaf.is_nested or leaf.layout is not torch.strided:
            continue
        some = leaf.detach()
        if leaf.numel() > _SAMPLED:
            places = _places(leaf.numel()).to(leaf.device)
            some = some.view(-1)[places] if leaf.is_contiguous() else some[torch.unravel_index(places, leaf.shape)]
        some = torch.view_as_real(some.resolve_conj()) if some.is_complex() else some
        if some.numel():
            flat = some.contiguous().as_strided((some.numel(),), (1,))  # bytes need this stride
            number = zlib.crc32(flat.view(torch.uint8).cpu().numpy().tobytes(), number)
    return float(number)


def is_shape_alone(value: object) -> bool:
    """Whether a tensor in `value` is on the meta device."""
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value))


@lru_cache(maxsize=64)  # sequences may have any number of lengths
def _places(size: int) -> torch.Tensor:
    """One element of each of 4,096 equal runs, each at another place of its run: equal columns must not be all."""
    run = size / _SAMPLED
    number = torch.arange(_SAMPLED, dtype=torch.float64)
    return ((number + (number * 0.6180339887498949) % 1.0) * run).to(torch.int64).clamp_(max=size - 1)

"""A call as ranks of one pipeline must have it alike: which one it is, and a checksum of the batch passed to it.

Rank 0 computes with the inputs and the last rank with the target. If a data loader shuffles by itself on each rank, an
input meets the target of another one, and training goes on as if the labels were noise.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

# Elements of each tensor, evenly spread: an order or a sample that differs shows, at no cost to speak of.
_SAMPLED = 4096
UNKNOWN = -1.0  # of a rank that passes shapes alone

CALLS = ("train_step", "forward_backward", "eval_step", "predict", "verify")  # that take a batch
Call = Literal["train_step", "forward_backward", "eval_step", "predict", "verify"]

_ONE_PIPELINE = (
    "Ranks of one pipeline must pass the same batch, since the first computes with its inputs and the last with its "
    "targets; most often a DataLoader(shuffle=True) or a sampler draws another order on each rank."
)


class Identity(NamedTuple):
    """A call with a batch: which of CALLS, its number among those of the pipeline; checksums of the batch's inputs and
    targets and of what the stages run for it, UNKNOWN where they are not to be compared; and the size of the tensor
    group, since groups of other sizes run other programs."""

    call: float
    number: float
    inputs: float = UNKNOWN
    targets: float = UNKNOWN
    program: float = UNKNOWN
    group: float = UNKNOWN

    def refuse_other(self, other: Identity, *, step: int, name: str, its_name: str, why: str = _ONE_PIPELINE) -> None:
        """ValueError, which names both, unless another process has made the same call with the same batch."""
        if self[:2] != other[:2]:
            mine, its = (f"{CALLS[int(one.call)]} (call {int(one.number)} with a batch)" for one in (self, other))
            raise ValueError(
                f"{name} is in {mine}, and {its_name} in {its}: expected the same calls, in the same order, on every "
                f"rank"
            )
        for what, one, its_one in zip(("inputs", "targets"), self[2:], other[2:], strict=False):
            if one != its_one and UNKNOWN not in (one, its_one):
                raise ValueError(
                    f"{name} passed other {what} to step {step} than {its_name}. {why} Expected "
                    f"pipe.loader(dataset, batch_size=...), or DataLoader(..., "
                    f"generator=torch.Generator().manual_seed(0)) alike on every rank"
                )
        are_known = UNKNOWN not in (self.program, other.program)
        if are_known and self.group == other.group and self.program != other.program:
            raise ValueError(
                f"{name} runs another forward in step {step} than {its_name}: expected the same flags among the "
                f"arguments, and a model whose attributes change alike on every rank, and whose code does the same "
                f"there (sorted(...) around sets)"
            )


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

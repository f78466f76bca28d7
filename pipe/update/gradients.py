"""Gradients between the last backward and the update: adding up, tied parameters, the global norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ...comm import Collectives
from ...partition.stage_memory import BUCKET_BYTES
from ..stages.ownership import Ownership
from .optimizers import clip_factor, scale_gradients, squared_norm


class Gradients:
    """The `.grad`s of this process's parameters.

    What a batch adds is kept apart from what was there before where it must be changed by itself: scaled
    (losses given as sum and count) or summed over the ranks that hold a parameter (replicas, tied weights).
    Making it is collective over the processes (it makes their groups).

    Arguments:
        ranks: of this process. Where all that hold a parameter are in it, its gradients add up by themselves.
    """

    def __init__(
        self, ownership: Ownership, collectives: Collectives, *, ranks: Sequence[int], device: torch.device
    ) -> None:
        self._parameters = [p for _, p in ownership.named_parameters() if p.requires_grad]
        self._counted = [p for p in ownership.counted_parameters(ranks) if p.requires_grad]
        self._collectives = collectives
        self._device = device
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._before: list[torch.Tensor | None] = []
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}  # ranks that hold a parameter -> those parameters
        local = dict(ownership.named_parameters())
        for name, holders in ownership.tied():
            collectives.subgroup(holders)
            if not set(holders).isdisjoint(ranks) and not set(holders) <= set(ranks):
                self._shared.setdefault(holders, []).append(local[name])

    def begin(self) -> None:
        """A batch begins: put aside what is there."""
        self._before = [p.grad for p in self._parameters]
        if any(grad is not None for grad in self._before):
            for parameter in self._parameters:
                parameter.grad = None

    def abandon(self) -> None:
        """The batch failed: what was there before is there again."""
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            parameter.grad = grad
        self._before = []

    def finish(self, *, scale: float) -> None:
        """The batch is through: scale its gradients, sum what several ranks hold, and add what was there before."""
        if scale != 1.0:
            scale_gradients(self._parameters, scale)
        for ranks, parameters in self._shared.items():
            self._sum(parameters, ranks)
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            if grad is None:
                continue
            if parameter.grad is not None:
                grad += parameter.grad
            parameter.grad = grad
        self._before = []

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before."""
        total = squared_norm([p.grad for p in self._counted], device=self._device)
        self._collectives.all_reduce(total, what="summing the gradient norm")
        norm = float(total.sqrt())
        factor = clip_factor(norm, max_norm)
        if factor < 1.0:
            scale_gradients(self._parameters, factor)
        return norm

    def _sum(self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...]) -> None:
        """All-reduce each type, several gradients at once in a buffer; a rank to which nothing came gives zeros.

        Where no rank has a gradient there is none behind it either: optimizers leave such a parameter alone.
        """
        what = "summing shared gradients (replicas, tied weights)"
        present = torch.tensor([float(p.grad is not None) for p in parameters], device=self._device)
        self._collectives.all_reduce(present, what=what, ranks=ranks)
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter, count in zip(parameters, present.tolist(), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_type.setdefault(parameter.dtype, []).append(parameter.grad)
        for dtype, gradients in by_type.items():
            for bucket in _buckets(gradients):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    self._collectives.all_reduce(bucket[0], what=what, ranks=ranks)
                    continue
                sizes = [gradient.numel() for gradient in bucket]
                flat = self._buffer(dtype, sum(sizes))
                torch.cat([gradient.reshape(-1) for gradient in bucket], out=flat)
                self._collectives.all_reduce(flat, what=what, ranks=ranks)
                parts = torch.split(flat, sizes)
                torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])

    def _buffer(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Kept from batch to batch: on a CPU fresh memory costs more than the copy into it."""
        known = self._buffers.get(dtype)
        if known is None or known.numel() < size:
            known = self._buffers[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return known[:size]


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In order, together at most BUCKET_BYTES each; a larger gradient stands alone."""
    bucket: list[torch.Tensor] = []
    held = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if bucket and held + size > BUCKET_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(gradient)
        held += size
    if bucket:
        yield bucket

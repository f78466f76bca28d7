"""Gradients between the last backward and the update: adding up, tied parameters, the global norm."""

from __future__ import annotations

import torch
from torch import nn

from ..comm import Collectives
from .optimizers import clip_factor, scale_gradients, squared_norm
from .ownership import Ownership


class Gradients:
    """The `.grad`s of this process's parameters.

    What a batch adds is kept apart from what was there before where it must be changed by itself: scaled
    (losses given as sum and count) or summed over the ranks that hold a tied parameter.
    Making it is collective over the processes (it makes the groups of tied parameters).
    """

    def __init__(self, ownership: Ownership, collectives: Collectives, *, rank: int, device: torch.device) -> None:
        self._parameters = [p for _, p in ownership.named_parameters() if p.requires_grad]
        self._counted = [p for p in ownership.counted_parameters() if p.requires_grad]
        self._collectives = collectives
        self._device = device
        self._tied: list[tuple[str, nn.Parameter, tuple[int, ...]]] = []
        self._before: list[torch.Tensor | None] = []
        local = dict(ownership.named_parameters())
        for name, ranks in ownership.tied():
            collectives.subgroup(ranks)
            if rank in ranks:
                self._tied.append((name, local[name], ranks))

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
        """The batch is through: scale its gradients, sum those of tied parameters, and add what was there before."""
        if scale != 1.0:
            scale_gradients(self._parameters, scale)
        for name, parameter, ranks in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._collectives.all_reduce(parameter.grad, what=f"summing the gradient of tied {name!r}", ranks=ranks)
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            if grad is None:
                continue
            if parameter.grad is not None:
                grad += parameter.grad
            parameter.grad = grad
        self._before = []

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before."""
        total = squared_norm(self._counted, device=self._device)
        self._collectives.all_reduce(total, what="summing the gradient norm")
        norm = float(total.sqrt())
        factor = clip_factor(norm, max_norm)
        if factor < 1.0:
            scale_gradients(self._parameters, factor)
        return norm

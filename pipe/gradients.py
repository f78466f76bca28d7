"""Gradients between the last backward and the update: adding up, tied parameters, the global norm."""

from __future__ import annotations


from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ..comm import World
from ..comm.groups import backend_for
from .optimizers import clip_factor, scale_gradients, squared_norm
from .ownership import Ownership


class Gradients:
    """The `.grad`s of this process's parameters.

    What a batch adds is kept apart from what was there before where it must be changed by itself: scaled
    (losses given as sum and count) or summed over the ranks that hold a tied parameter.
    Making it is collective over the processes (it makes the groups of tied parameters).
    """

    def __init__(self, ownership: Ownership, world: World, *, device: torch.device, timeout: float) -> None:
        self._parameters = [p for _, p in ownership.named_parameters() if p.requires_grad]
        self._counted = [p for p in ownership.counted_parameters() if p.requires_grad]
        self._world = world
        self._device = device
        self._tied: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self._before: list[torch.Tensor | None] = []
        local = dict(ownership.named_parameters())
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for name, ranks in ownership.tied() if world.distributed else ():
            if ranks not in groups:
                limit = timedelta(seconds=timeout)
                groups[ranks] = dist.new_group(list(ranks), backend=backend_for(device), timeout=limit)
            if world.rank in ranks:
                self._tied.append((local[name], groups[ranks]))

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
        for parameter, group in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
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
        if self._world.distributed:
            dist.all_reduce(total)
        norm = float(total.sqrt())
        factor = clip_factor(norm, max_norm)
        if factor < 1.0:
            scale_gradients(self._parameters, factor)
        return norm



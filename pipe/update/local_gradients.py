"""The gradients of one process behind a flush: those of the batch, apart from those that were there before."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import nn

from ...comm import Collectives
from ..stages.ownership import Ownership
from .gradients import clip_gradients, norm_of, norm_part, scale_gradients
from .loss_scale import unscale
from .shards import Shards


class LocalGradients:
    """The `.grad`s of this process's parameters.

    What a batch adds is kept apart from what was there before, since it must be changed by itself: scaled (losses
    given as sum and count), or summed over the ranks that hold a parameter. Where all that hold a parameter are in this
    process, its gradients add up by themselves.

    Arguments:
        local: ranks of this process.
        shards: parameters whose updates several ranks divide among themselves: each has the gradients of its part.
    """

    def __init__(
        self,
        ownership: Ownership,
        local: Sequence[int],
        shards: Shards,
        collectives: Collectives,
        *,
        device: torch.device,
    ) -> None:
        self._named = {name: p for name, p in ownership.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        self.counted = [p for p in ownership.counted_parameters(local) if p.requires_grad]
        self._shards, self._collectives, self._device = shards, collectives, device
        self._tensor_group = ownership.group
        self._wholes = {id(part.whole) for part in shards.parts.values()}
        self._counted_parts = shards.counted(ownership)
        self._before: list[torch.Tensor | None] = []

    def name_of(self, parameter: object) -> str | None:
        """Name of a parameter; None of another's."""
        return next((name for name, each in self._named.items() if each is parameter), None)

    def put_aside(self) -> None:
        """A batch begins: those that are there wait for its end."""
        self._before = [p.grad for p in self.parameters]
        if any(grad is not None for grad in self._before):
            for parameter in self.parameters:
                parameter.grad = None

    def put_back(self) -> None:
        """The batch failed: those that were there are there again."""
        for parameter, grad in zip(self.parameters, self._before, strict=True):
            parameter.grad = grad
        for part in self._shards.parts.values():
            part.parameter.grad = None
        self._before = []

    def drop(self) -> None:
        """Forget all of them (after an error)."""
        for parameter in [*self.parameters, *(part.parameter for part in self._shards.parts.values())]:
            parameter.grad = None
        self._before = []

    def summed(self, *, scale: float) -> None:
        """The batch's are summed over all ranks: scale them, and add what was there before, but for divided ones."""
        self._tensor_group.compare_gradients({name: p.grad for name, p in self._named.items()})
        scale_gradients([p.grad for p in self._updated()], scale)
        self._add_before(divided=False)

    def add_before_to_parts(self) -> None:
        """Add to the parts of divided parameters the gradients that were there before the batch."""
        before = {id(p): grad for p, grad in zip(self.parameters, self._before, strict=True) if grad is not None}
        for part in self._shards.parts.values():
            grad = before.get(id(part.whole))
            if grad is not None and not part.is_empty:
                part.parameter.grad = _sum(part.of(grad), part.parameter.grad)
        self._before = []

    def gather(self, present: Collection[str]) -> None:
        """All of each divided parameter's gradient, with what was there before, in place of this rank's part.

        Arguments:
            present: divided parameters of which the batch made a gradient.
        """
        for stage in self._shards.stages.values():
            stage.gather_gradients(present)
        self._add_before(divided=True)
        self._before = []

    def unscale(self, factor: float) -> bool:
        """Divide by a loss scale; whether one of any stage or replica overflowed, the same on all ranks."""
        found = unscale([p.grad for p in self._updated()], factor, device=self._device)
        self._collectives.all_reduce(found, what="looking for gradients that overflowed")
        return bool(found > 0)

    def clip(self, max_norm: float, *, norm_type: float, only_finite: bool) -> float:
        """Scale all so that their global norm is at most `max_norm`; see Update.clip."""
        return self._clip(self.counted, self.parameters, max_norm, norm_type=norm_type, only_finite=only_finite)

    def clip_updated(self, max_norm: float) -> float:
        """The same in front of the updates, where of divided parameters each rank has the gradients of its parts."""
        counted = [p for p in self.counted if id(p) not in self._wholes]
        counted += [part.parameter for part in self._counted_parts]
        return self._clip(counted, self._updated(), max_norm, norm_type=2.0, only_finite=False)

    def _clip(
        self,
        counted: Sequence[nn.Parameter],
        changed: Sequence[nn.Parameter],
        max_norm: float,
        *,
        norm_type: float,
        only_finite: bool,
    ) -> float:
        part = norm_part([p.grad for p in counted], norm_type=norm_type, device=self._device)
        largest = math.isinf(norm_type)
        self._collectives.all_reduce(part, what="summing the gradient norm", largest=largest)
        norm = norm_of(part, norm_type=norm_type)
        if math.isfinite(norm) or not only_finite:
            clip_gradients([p.grad for p in changed], norm=norm, max_norm=max_norm)
        return norm

    def _updated(self) -> list[nn.Parameter]:
        """The parameters with the gradients that updates are made of: of divided ones the parts."""
        whole = [p for p in self.parameters if id(p) not in self._wholes]
        return whole + [part.parameter for part in self._shards.parts.values()]

    def _add_before(self, *, divided: bool) -> None:
        for parameter, grad in zip(self.parameters, self._before, strict=True):
            if grad is not None and (id(parameter) in self._wholes) == divided:
                parameter.grad = _sum(grad, parameter.grad)


def _sum(before: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    """Gradients that were there, in place, with what was added."""
    return before if added is None else before.add_(added)

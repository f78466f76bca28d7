"""Optimizers that clip gradients in front of their step, so that what a profile measures of an update has it in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..partition.profiler.optimizers import NamedParameters, OptimizerFactory, make_optimizers, named
from .update.gradients import clip_gradients, norm_of, norm_part


def clipping(factory: OptimizerFactory, max_grad_norm: float | None) -> OptimizerFactory:
    """The same optimizers; a step of the first clips all gradients to this norm before, unless that is None or 0."""
    if not max_grad_norm:
        return factory
    limit = max_grad_norm

    def make(parameters: NamedParameters) -> list[torch.optim.Optimizer]:
        optimizers = make_optimizers(factory, parameters, where="a unit")
        if optimizers:
            _clip_before(optimizers, limit)
        return optimizers

    return named(make)


def _clip_before(optimizers: Sequence[torch.optim.Optimizer], limit: float) -> None:
    step = optimizers[0].step

    def clip_and_step(*arguments: Any, **options: Any) -> Any:
        parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        norm = norm_of(norm_part(gradients, device=parameters[0].device))
        clip_gradients(gradients, norm=norm, max_norm=limit)
        return step(*arguments, **options)

    optimizers[0].step = clip_and_step  # type: ignore[method-assign]

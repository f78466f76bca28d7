"""Stages whose backward a schedule splits, and that have little to split."""

from __future__ import annotations

import re
import warnings

from torch import nn

from ...partition.graph.split_backward import WeightGradients

_SHOWN = 3


class Halves:
    """Looks at the first backward of a stage that came in two halves, and tells of one that hardly did.

    Arguments:
        module: what the stage runs in training.
        stage: for people.
    """

    def __init__(self, module: nn.Module, *, stage: str) -> None:
        self._module: nn.Module | None = module
        self._stage = stage

    def look_at(self, weights: WeightGradients) -> None:
        """I is through, the weights are still bound. Warns where I made more of the weights' gradients than W will.

        Biases and norms do not count: they take no time.
        """
        module, self._module = self._module, None
        if module is None:
            return
        later = {id(weight) for weight in weights.weights}
        matrices = {name: p for name, p in module.named_parameters() if p.requires_grad and p.dim() > 1}
        left = sum(p.numel() for p in matrices.values() if id(p) in later)
        made = {name: p for name, p in matrices.items() if id(p) not in later and p.grad is not None}
        if sum(p.numel() for p in made.values()) <= left:
            return
        shown = [re.sub(r"^units\.\d+\.", "", name) for name in list(made)[:_SHOWN]]
        names = ", ".join(map(repr, shown)) + (", ..." if len(made) > _SHOWN else "")
        warnings.warn(
            f"the schedule splits the backward of {self._stage}, but the gradients of {names} come with those of its "
            f"inputs, in I, so that W has little to do and I takes longer than planned. W takes those of linears, "
            f"embeddings, convolutions and matrix products whose weight is a parameter itself, without hooks on it, "
            f"outside of compiled and scripted code. Expected a stage of those, or a schedule with whole backwards, "
            f"such as schedule='1f1b'",
            stacklevel=2,
        )

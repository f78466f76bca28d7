"""One stage: a piece of the model with its forward, backward and recomputation of each microbatch.

    forward(k):  inputs -> leaves -> module -> outputs (detached copies travel on; the graph stays here)
    backward(k): gradients of the outputs -> graph -> gradients of the leaves (travel back)

The last stage computes the loss inside its forward. Under recompute="full" a forward keeps its inputs only, and the
backward runs it again with the same random numbers and the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ...partition.graph.trace import ValueRef
from ..update.versions import WeightVersions

Tensors = tuple[torch.Tensor, ...]
LossValue = tuple[torch.Tensor, torch.Tensor | None]  # (mean, None) or (sum, count)

LossOf = Callable[[Tensors, object, bool], LossValue]

RECOMPUTE = ("none", "full")


@dataclass(slots=True, kw_only=True)
class Face:
    """A stage in one mode (training or evaluation): what it runs and what it takes.

    Arguments:
        module: called with flat tensors; returns a tuple of tensors.
        inputs: where each comes from.
        num_outputs: how many tensors it returns (found by shape inference).
        clone_inputs: whether it changes an input in place (found by shape inference): it then gets a copy, since
            the input belongs to the stage before, or to the user.
    """

    module: nn.Module
    inputs: tuple[ValueRef, ...]
    num_outputs: int = 0
    clone_inputs: bool = False

    def run(self, inputs: Tensors) -> Tensors:
        """The outputs."""
        outputs: Tensors = self.module(*(x.clone() for x in inputs) if self.clone_inputs else inputs)
        return outputs


@dataclass(slots=True)
class _Live:
    """What a microbatch leaves behind between its forward and its backward."""

    leaves: Tensors
    outputs: Tensors | None
    target: object
    version: int
    buffers: dict[str, torch.Tensor] | None = None


class Stage:
    """Runs one stage of the model on its rank.

    Arguments:
        index: s.
        name: for people: the modules in it.
        loss_of: on the last stage: (flat outputs, target, training) -> (loss, count or None).
        recompute: "none" or "full".
        weights: the versions of its parameters, under an asynchronous schedule.
    """

    def __init__(
        self,
        *,
        index: int,
        name: str,
        train: Face,
        evaluate: Face,
        loss_of: LossOf | None,
        recompute: str,
        weights: WeightVersions | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.train = train
        self.evaluate = evaluate
        self.recompute = recompute
        self.weights = weights
        self._loss_of = loss_of
        self._live: dict[int, _Live] = {}
        self._moving: tuple[str, ...] | None = None  # names of buffers that a forward changes

    @property
    def num_live(self) -> int:
        """Microbatches between their forward and their backward."""
        return len(self._live)

    def forward(
        self,
        key: int,
        inputs: Sequence[torch.Tensor],
        wants_grad: Sequence[bool],
        target: object,
        *,
        version: int = 0,
    ) -> tuple[Tensors, LossValue | None]:
        """Run microbatch `key` for training.

        Arguments:
            inputs: by slot, without a graph.
            wants_grad: by slot: which inputs want a gradient.
            target: of this microbatch, for the loss on the last stage.
            version: of the weights, where there are several.

        Returns the detached outputs (none where the loss is computed) and the detached loss.
        """
        if self.weights is None:
            return self._forward(key, inputs, wants_grad, target, version)
        self.weights.bind(version)
        try:
            return self._forward(key, inputs, wants_grad, target, version)
        finally:
            self.weights.release()

    def _forward(
        self, key: int, inputs: Sequence[torch.Tensor], wants_grad: Sequence[bool], target: object, version: int
    ) -> tuple[Tensors, LossValue | None]:
        leaves = tuple(x.detach().requires_grad_(wants) for x, wants in zip(inputs, wants_grad, strict=True))
        live = _Live(leaves, None, target, version)
        if self.recompute == "full":
            live.buffers = self._snapshot_before_forward()
            with torch.no_grad():
                outputs, loss = self._run(leaves, target)
            self._learn_moving_buffers(live.buffers)
        else:
            with torch.enable_grad():
                outputs, loss = self._run(leaves, target)
            live.outputs = outputs
        self._live[key] = live
        if loss is not None:
            value, count = loss
            return (), (value.detach(), None if count is None else count.detach())
        return tuple(o.detach() for o in outputs), None

    def evaluate_forward(self, inputs: Sequence[torch.Tensor], target: object) -> tuple[Tensors, LossValue | None]:
        """Run a microbatch without a graph, in evaluation mode; the last stage returns outputs and loss."""
        with torch.no_grad():
            outputs = self.evaluate.run(tuple(inputs))
            loss = self._loss_of(outputs, target, False) if self._loss_of is not None else None
        return outputs, loss

    def backward(
        self, key: int, gradients: Sequence[torch.Tensor | None], *, group: int = 0
    ) -> list[torch.Tensor | None]:
        """Backward of microbatch `key`; parameter gradients add up in `.grad`, or in `weights` by update group.

        Arguments:
            gradients: by output slot (None: none comes); on a stage with a loss, its one weight.
            group: the update group, where there are several.

        Returns the gradient of each input that wants one, by slot (None for the others).
        """
        live = self._live.pop(key)
        if self.weights is None:
            return self._backward(live, gradients)
        self.weights.begin_backward(live.version, group)
        try:
            return self._backward(live, gradients)
        finally:
            self.weights.end_backward(live.version, group)

    def _backward(self, live: _Live, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        outputs = live.outputs
        if outputs is None:
            with torch.enable_grad(), self._buffers_as(live.buffers or {}):
                outputs, _ = self._run(live.leaves, live.target)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return [(torch.zeros_like(x) if x.grad is None else x.grad) if x.requires_grad else None for x in live.leaves]

    def drop(self) -> None:
        """Forget all microbatches in flight (after an error)."""
        self._live.clear()

    def _run(self, leaves: Tensors, target: object) -> tuple[Tensors, LossValue | None]:
        """The module and, on the last stage, the loss; with a loss the only output is its value."""
        outputs = self.train.run(leaves)
        if self._loss_of is None:
            return outputs, None
        loss = self._loss_of(outputs, target, True)
        if torch.is_grad_enabled() and not loss[0].requires_grad and any(o.requires_grad for o in outputs):
            raise ValueError(
                "loss_fn returned a loss that does not depend on the model's output: expected one that is computed "
                "from it, without detach(), item() or torch.no_grad()"
            )
        return (loss[0],), loss

    # Buffers under recomputation: the forward runs twice and must change them once, and the second run must see
    # what the first one saw.

    def _snapshot_before_forward(self) -> dict[str, torch.Tensor]:
        buffers = dict(self.train.module.named_buffers())
        names = buffers if self._moving is None else self._moving
        return {name: buffers[name].clone() for name in names if name in buffers}

    def _learn_moving_buffers(self, before: dict[str, torch.Tensor]) -> None:
        if self._moving is None:
            now = dict(self.train.module.named_buffers())
            self._moving = tuple(name for name in before if not _same(before[name], now[name]))
            for name in set(before) - set(self._moving):
                del before[name]

    @contextmanager
    def _buffers_as(self, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Other tensors stand in for these buffers (the graph may keep them; the real ones are not touched)."""
        places = []
        for name, value in values.items():
            path, _, leaf = name.rpartition(".")
            owner = self.train.module.get_submodule(path)
            places.append((owner, leaf, owner._buffers[leaf]))
            owner._buffers[leaf] = value
        try:
            yield
        finally:
            for owner, leaf, real in places:
                owner._buffers[leaf] = real


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)

"""Results of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...schedules import Timeline

Together = Callable[[], AbstractContextManager[None]]  # see `Guard.together`


class Known(NamedTuple):
    """Result of a batch, once a rank knows it; the norm is the global one before clipping.

    skipped: whether its update was left out, since gradients overflowed in float16.
    later: of an update that other ranks may still speak against: waits for what became of it, within a guard.
    """

    step: int
    loss: float
    grad_norm: float | None
    skipped: bool = False
    later: Callable[[Together], Known] | None = None

    def outcome(self, together: Together) -> Known:
        return self if self.later is None else self.later(together)


_NOTHING = Known(-1, math.nan, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One `train_step` or `forward_backward`, on every rank.

    Under an asynchronous schedule the batch is still under way: loss and norm are those of the newest batch that this
    rank knows of (`loss_step`), and None before there is one.

    Arguments:
        loss: of the batch; sum_k (n_k/N) loss_k.
        loss_step: the step that it belongs to.
        is_compared: whether other ranks had passed the same batch is known. Ranks of the last stage wait for nobody:
            behind the first batch, which all compare before it runs, they are told by their next call.
    """

    loss: float | None
    loss_step: int | None
    is_compared: bool = True
    _timeline: Callable[[], Timeline] = field(repr=False, compare=False)
    _update: Callable[[], Known] = field(repr=False, compare=False, default=lambda: _NOTHING)

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm before clipping; None without max_grad_norm. Under post_validation=True it waits for
        the other ranks' parts, if they are not there yet."""
        return self._update().grad_norm

    @property
    def skipped(self) -> bool:
        """Whether all ranks left out that step's update, since a gradient overflowed (grad_scaler=). Its loss may then
        be infinite or not a number. It waits as `grad_norm` does."""
        return self._update().skipped

    def __repr__(self) -> str:
        loss, step, norm, skipped = self.loss, self.loss_step, self.grad_norm, self.skipped
        return f"StepResult(loss={loss!r}, loss_step={step!r}, grad_norm={norm!r}, skipped={skipped!r})"

    def timeline(self) -> Timeline:
        """The measured Timeline of this step, on every rank. Collective over the processes."""
        return self._timeline()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One `eval_step`.

    Arguments:
        loss: on every rank; None without a loss_fn.
        output: of the whole batch in the model's own type, on the ranks of the last stage; None elsewhere. Where that
            stage has replicas, each has the part of its own microbatches. What is neither tensor nor constant (a cache)
            is None, and a model's own loss is the batch's. Microbatches are joined along the one dimension whose size
            follows that of the batch, wherever it stands (one that is a multiple of it, such as batch * sequence,
            counts). Of a tensor without dimensions there are the values of all microbatches, [M]; of any other, where
            no dimension or several follow the batch, the list of all M > 1 tensors; and so where microbatches differ
            elsewhere, too.
    """

    loss: float | None
    output: object

    def __repr__(self) -> str:
        def shape(leaf: object) -> object:
            return _Shown(f"Tensor{list(leaf.shape)}") if isinstance(leaf, torch.Tensor) else leaf

        return f"EvalResult(loss={self.loss!r}, output={pytree.tree_map(shape, self.output)!r})"


class _Shown(str):
    """A text whose repr has no quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

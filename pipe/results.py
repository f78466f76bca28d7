"""Results of a step, and records for `on_step`: one of every training step, once its loss is known."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..partition.model.forms import Unquoted
from ..schedules import Timeline


class Known(NamedTuple):
    """Result of a batch, once a rank knows it; the norm is the global one before clipping.

    skipped: whether its update was left out, since gradients overflowed in float16.
    """

    step: int
    loss: float
    grad_norm: float | None
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One `train_step` or `forward_backward`, on every rank.

    Under an asynchronous schedule the batch is still under way: loss and norm are those of the newest batch that this
    rank knows of (`loss_step`), and None before there is one.

    Arguments:
        loss: of the batch; sum_k (n_k/N) loss_k.
        loss_step: the step that it belongs to.
        grad_norm: global gradient norm before clipping; None without max_grad_norm.
        skipped: whether all ranks left out that step's update, since a gradient overflowed (grad_scaler=). Its loss may
            then be infinite or not a number.
        is_compared: whether other ranks had passed the same batch is known. Ranks of the last stage wait for nobody:
            behind the first batch, which all compare before it runs, they are told by their next call.
    """

    loss: float | None
    loss_step: int | None
    grad_norm: float | None = None
    skipped: bool = False
    is_compared: bool = field(repr=False, default=True)
    _timeline: Callable[[], Timeline] = field(repr=False, compare=False)

    def __repr__(self) -> str:
        if self.loss is None:
            return "StepResult(loss=None: batches overlap, and this rank knows none yet; later calls and flush() do)"
        figures = ((name, getattr(self, name)) for name in ("loss", "loss_step", "grad_norm", "skipped"))
        return f"StepResult({', '.join(f'{name}={value!r}' for name, value in figures)})"

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
    output: Any

    def __repr__(self) -> str:
        def shape(leaf: object) -> object:
            return Unquoted(f"Tensor{list(leaf.shape)}") if isinstance(leaf, torch.Tensor) else leaf

        return f"EvalResult(loss={self.loss!r}, output={pytree.tree_map(shape, self.output)!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One `train_step`, as its process saw it.

    Arguments:
        step: number of the step, from 0; a run that goes on from a checkpoint goes on counting.
        loss: of this step's batch, the same on every rank.
        grad_norm: global gradient norm before clipping; None without max_grad_norm.
        seconds: of the call of `train_step` that the batch was passed to. Under an asynchronous schedule that call also
            worked on the batches before.
        learning_rates: the different ones among this process's parameter groups when the call began.
        num_samples: of the batch; with data replicas, of all of them together, each taken to have as many as this one.
        peak_memory_bytes: most that this process has held so far: on CUDA what was allocated on its device, else its
            resident memory.
        rank: of the process.
        skipped: whether all ranks left out its update, since a gradient overflowed (grad_scaler=).
        replan_seconds: those of `seconds` that the batch's own schedule took to find, agree on and lower, under
            replan="batch".
    """

    step: int
    loss: float
    grad_norm: float | None
    seconds: float
    learning_rates: tuple[float, ...]
    num_samples: int
    peak_memory_bytes: int
    rank: int
    skipped: bool = False
    replan_seconds: float = 0.0


class StepReports:
    """Tells `on_step` of each step once, in order; nothing without it."""

    def __init__(self, on_step: Callable[[StepRecord], object] | None, *, rank: int, device: torch.device) -> None:
        self._on_step = on_step
        self._rank = rank
        self._device = device
        self._passed: dict[int, Callable[..., StepRecord]] = {}  # steps that were run, and whose loss may not be known

    def passed(self, step: int, **figures: Any) -> None:
        """A step has run, with figures of its record; those that count from it on were lost, and come again."""
        if self._on_step is None:
            return
        self._passed = {number: one for number, one in self._passed.items() if number < step}
        self._passed[step] = partial(StepRecord, step=step, rank=self._rank, **figures)

    def tell(self, known: Iterable[Known]) -> None:
        """Losses are known; those that were told before, and those of steps that nobody asked for, are left out."""
        if self._on_step is None:
            return
        for one in sorted(known, key=lambda one: one.step):
            record = self._passed.pop(one.step, None)
            if record is not None:
                peak = _peak_memory_bytes(self._device)
                self._on_step(
                    record(loss=one.loss, grad_norm=one.grad_norm, skipped=one.skipped, peak_memory_bytes=peak)
                )


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, which depends on the system
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

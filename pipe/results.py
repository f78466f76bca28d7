"""Results of steps and evaluations, and the records of training steps that `on_step` gets."""

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
    """Result of a batch on a rank that knows it; `grad_norm` is the global norm before clipping."""

    step: int
    loss: float
    grad_norm: float | None
    skipped: bool = False  # whether the update was left out because gradients overflowed in float16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one `train_step` or `forward_backward`, on every rank.

    Under an asynchronous schedule the batch is still in flight: loss and norm are those of the newest batch whose loss
    this rank knows (`loss_step`), and None before there is one.

    Arguments:
        loss: of the batch, the mean sum_k (n_k/N) loss_k over its microbatches.
        loss_step: number of the step that the loss is of.
        grad_norm: global gradient norm before clipping; None without max_grad_norm.
        skipped: whether all ranks left out the update of that step because a gradient overflowed (grad_scaler=). Its
            loss may then be infinite or not a number.
        is_compared: whether this rank knows that the others passed the same batch. All ranks compare the first batch
            before it runs. Afterwards ranks of the last stage do not wait, and learn it in their next call.
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
        """The measured Timeline of this step, on every rank. Collective."""
        return self._timeline()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Result of one `eval_step`.

    Arguments:
        loss: of the batch, on every rank; None without a loss_fn.
        output: of the whole batch, in the model's own type, on the ranks of the last stage; None on others. If that
            stage has replicas, each has the part of its own microbatches. Microbatches are joined along the one
            dimension whose size follows that of the batch (or is a multiple of it, such as batch * sequence). A tensor
            without dimensions becomes the values of all microbatches, [M]; any other of which no dimension or several
            follow the batch, or whose microbatches differ in another dimension, becomes the list of the tensors of all
            M > 1 microbatches. A value that is neither tensor nor constant, such as a cache, is None, and a model's own
            loss is the batch's.
    """

    loss: float | None
    output: Any

    def __repr__(self) -> str:
        def shape(leaf: object) -> object:
            return Unquoted(f"Tensor{list(leaf.shape)}") if isinstance(leaf, torch.Tensor) else leaf

        return f"EvalResult(loss={self.loss!r}, output={pytree.tree_map(shape, self.output)!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One `train_step`, as its process measured it.

    Arguments:
        step: number of the step, from 0; a run that resumes from a checkpoint continues counting.
        loss: of this step's batch, the same on every rank.
        grad_norm: global gradient norm before clipping; None without max_grad_norm.
        seconds: of the call of `train_step` that the batch was passed to [s]. Under an asynchronous schedule that call
            also worked on earlier batches.
        learning_rates: the distinct ones among this process's parameter groups when the call began.
        num_samples: of the batch; with data replicas, of all of them, as if each had as many as this one.
        peak_memory_bytes: the most that this process has held so far [bytes]: on CUDA allocated on its device, else
            resident memory.
        rank: of the process.
        skipped: whether all ranks left out the update because a gradient overflowed (grad_scaler=).
        replan_seconds: the part of `seconds` in which the batch's own schedule was found, agreed on and lowered, under
            replan="batch" [s].
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
    """Passes each step to `on_step` once, in order."""

    def __init__(self, on_step: Callable[[StepRecord], object] | None, *, rank: int, device: torch.device) -> None:
        self._on_step = on_step
        self._rank = rank
        self._device = device
        self._passed: dict[int, Callable[..., StepRecord]] = {}  # steps that have run; their losses may be unknown yet

    def passed(self, step: int, **figures: Any) -> None:
        """Notes figures of a step that has run; later steps noted before were lost and will run again."""
        if self._on_step is None:
            return
        self._passed = {number: one for number, one in self._passed.items() if number < step}
        self._passed[step] = partial(StepRecord, step=step, rank=self._rank, **figures)

    def tell(self, known: Iterable[Known]) -> None:
        """Reports steps whose losses are known now, except those reported before."""
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

"""Options of PipelineModule about training, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from ..partition.profiler.optimizers import NamedFactory, OptimizerFactory
from .batch.model_loss import ModelLoss
from .batch.sequence import NO_SEQUENCE, SequenceOptions
from .measure.steps import StepRecord
from .update.delay_correction import ErrorFeedback
from .update.optimizers import SchedulerFactory

_CALLED = {  # options that are called: with how many arguments, and such a one
    "loss_fn": (2, "lambda output, target: F.mse_loss(output, target)"),
    "optimizer": (1, "lambda params: torch.optim.AdamW(params)"),
    "lr_scheduler": (1, "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)"),
    "on_step": (1, "lambda record: print(record.loss)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options that do not say what runs where; see PipelineModule. Raises ValueError for what makes no sense."""

    loss_fn: Callable[[Any, Any], Any] | None  # of a model that returns its own: a ModelLoss
    optimizer: OptimizerFactory | None
    device: torch.device
    timeout: float
    lr_scheduler: SchedulerFactory | None = None
    max_grad_norm: float | None = None
    grad_scaler: GradScaler | None = None
    seed: int = 0
    sequence: SequenceOptions = NO_SEQUENCE
    compile: Mapping[str, Any] | None = None
    post_validation: bool = False
    delay_correction: ErrorFeedback | None = None
    flush_first: int = 0
    on_step: Callable[[StepRecord], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.timeout, Real) or not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r}: expected seconds above 0")
        limit = self.max_grad_norm
        if limit is not None and (isinstance(limit, bool) or not (isinstance(limit, Real) and limit > 0)):
            raise ValueError(f"max_grad_norm={limit!r}: expected a number above 0, or None")
        first = self.flush_first
        if isinstance(first, bool) or not isinstance(first, Integral) or first < 0:
            raise ValueError(f"flush_first={first!r}: expected a number of batches, at least 0")
        object.__setattr__(self, "flush_first", int(first))  # numpy's numbers are shown otherwise
        if not isinstance(self.seed, Integral):
            raise ValueError(f"seed={self.seed!r}: expected a whole number")
        for name in _CALLED:
            _check_called(name, getattr(self, name))
        for name in (
            "lr_scheduler",
            "delay_correction",
            "max_grad_norm",
            "grad_scaler",
            "post_validation",
            "flush_first",
        ):
            value = getattr(self, name)
            if value not in (None, False, 0) and self.optimizer is None:
                raise ValueError(
                    f"{name}={value!r} without an optimizer: expected optimizer= beside it, since train_step applies "
                    f"both; with an optimizer of your own, call clip_grad_norm_ and step the scheduler yourself"
                )

    def refuse_flush(self, schedule: str) -> None:
        """ValueError for options of an asynchronous schedule under one that flushes."""
        if self.flush_first:
            raise ValueError(
                f"flush_first={self.flush_first} under the schedule {schedule!r}, which flushes behind every batch: "
                f"expected an asynchronous schedule such as '2bw', or flush_first=0"
            )
        if self.delay_correction is not None:
            self.delay_correction.refuse_flush(schedule)

    @property
    def user_code(self) -> list[object]:
        """The user's own loss, and what makes the optimizers: what runs beside training puts back what they reach."""
        loss, optimizer = self.loss_fn, self.optimizer
        found = [
            vars(loss) if isinstance(loss, ModelLoss) else loss,
            optimizer.make if isinstance(optimizer, NamedFactory) else optimizer,
        ]
        return [each for each in found if each is not None]

    @property
    def model_loss(self) -> ModelLoss | None:
        """The loss of a model that returns its own; None for any other, and where there is none."""
        return self.loss_fn if isinstance(self.loss_fn, ModelLoss) else None

    def require_optimizer(self) -> OptimizerFactory:
        """The optimizer; ValueError without one."""
        if self.optimizer is None:
            raise ValueError(
                "train_step needs an optimizer: expected PipelineModule(..., optimizer=lambda params: "
                "torch.optim.AdamW(params)), or call forward_backward and step an optimizer of your own"
            )
        return self.optimizer

    def require_loss(self) -> None:
        """ValueError without a loss."""
        if self.loss_fn is None:
            raise ValueError(
                "training needs a loss: expected PipelineModule(..., loss_fn=lambda output, target: ...), "
                'which returns a scalar mean or (sum, count); or loss_fn="model" for a model that returns its own'
            )


def _check_called(name: str, value: object) -> None:
    """ValueError for what cannot be called as this option is, such as an optimizer that is made already."""
    if value is None:
        return
    num_arguments, such = _CALLED[name]
    kind = type(value).__name__
    if isinstance(value, torch.optim.Optimizer | LRScheduler):
        shown, problem = f"{kind}(...)", "expected a function that makes one for each stage"
        if isinstance(value, torch.optim.Optimizer):
            such = f"lambda params: {kind}(params, lr={value.defaults.get('lr', '...')})"
        else:
            such = f"lambda optimizer: {kind}(optimizer, ...)"
    elif isinstance(value, type) and issubclass(value, nn.Module):
        shown, problem, such = value.__name__, "a class: expected a module of it", f"{value.__name__}()"
    elif not callable(value):
        shown, problem = " ".join(repr(value).split())[:60], "expected a callable"
    else:
        function = value.make if isinstance(value, NamedFactory) else value
        try:
            inspect.signature(function).bind(*[None] * num_arguments)
            return
        except TypeError as error:
            shown = getattr(function, "__qualname__", kind)
            problem = f"called with {num_arguments} argument{'s' * (num_arguments > 1)}, it fails ({error})"
        except ValueError:  # it has no signature, as some functions in C
            return
    raise ValueError(f"{name}={shown}: {problem}; {name}={such}")

"""What PipelineModule was told about training, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .update.optimizers import OptimizerFactory, SchedulerFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of PipelineModule that do not say what runs where; see there."""

    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: OptimizerFactory | None
    lr_scheduler: SchedulerFactory | None
    max_grad_norm: float | None
    seed: int
    device: torch.device
    timeout: float

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
                "which returns a scalar mean or (sum, count)"
            )

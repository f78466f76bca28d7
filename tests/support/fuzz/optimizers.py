"""A case's optimizers and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Joined(torch.optim.SGD):
    """Divides gradients by the norm of all, which no stage has by itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = 1 + torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else 1.0
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


def make_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "adam-foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
        "decay": lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1),
        "joined": lambda parameters: Joined(parameters, lr=0.05),
    }
    return kinds[name]


def grouped(named: Sequence[tuple[str, Tensor]]) -> list[torch.optim.Optimizer | None]:
    """Two optimizers, one of two groups."""
    matrices = [p for _, p in named if p.ndim > 1]
    biases = [p for name, p in named if p.ndim <= 1 and name.endswith("bias")]
    others = [p for name, p in named if p.ndim <= 1 and not name.endswith("bias")]
    groups = [{"params": biases, "lr": 0.02}, {"params": others, "weight_decay": 0.1}]
    groups = [group for group in groups if group["params"]]
    return [
        torch.optim.SGD(matrices, lr=0.05, momentum=0.5) if matrices else None,
        torch.optim.SGD(groups, lr=0.1) if groups else None,
    ]


def make_optimizers(name: str, named: Sequence[tuple[str, Tensor]]) -> list[torch.optim.Optimizer]:
    """All of a model."""
    if name == "grouped":
        return [one for one in grouped(named) if one is not None]
    return [make_optimizer(name)([parameter for _, parameter in named])]


def make_scheduler(name: str | None) -> Callable[[torch.optim.Optimizer], Any] | None:
    lr = torch.optim.lr_scheduler
    if name is None:
        return None
    return {
        "plateau": lambda optimizer: lr.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.1),
        "step": lambda optimizer: lr.StepLR(optimizer, 1, gamma=0.5),
        "lambda": lambda optimizer: lr.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    }[name]

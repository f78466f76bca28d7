"""A model whose optimizers are divided over data replicas, and what its tests share."""

from typing import Any

import torch
from torch import nn


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def even() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).double()


X, Y = (torch.randn(4, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2))

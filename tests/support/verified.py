"""Models for `verify`: one with a place for what tracing loses, and a chain around a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

TRACED = pytest.mark.filterwarnings("ignore::stagewright.partition.graph.model_units.TracedModelWarning")


class Reverse(torch.autograd.Function):
    """Gradient reversal: the identity forwards, and -1 backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


class Net(nn.Module):
    """Traced, since it has a hook itself: what is changed in `odd` is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.odd, self.back = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = 1.0
        self.register_buffer("seen", torch.zeros(4))
        self.middle: Callable[[Tensor], Tensor] = lambda x: x
        self.register_forward_hook(lambda module, given, output: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.middle(self.odd(self.front(x).tanh())))  # type: ignore[no-any-return]


def chain(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4), nn.Linear(4, 4))

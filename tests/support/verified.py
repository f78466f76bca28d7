"""Models for `verify`: one that does something else in a copy of it, and a chain around a module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


class Net(nn.Module):
    """Does in `middle` what a pipeline could lose: it is told the model, whose copy is the plain module of `verify`."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.odd, self.back = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.middle: Callable[[Any, Tensor], Tensor] = lambda model, x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.middle(self, self.odd(self.front(x).tanh())))  # type: ignore[no-any-return]


def chain(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4), nn.Linear(4, 4))

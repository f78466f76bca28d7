"""What all blocks have, and the register that each goes into."""

import re

import torch
from torch import Tensor, nn

D = 4  # width
Y = 2 * D


BLOCKS: dict[str, type["Block"]] = {}  # by name: NoGrad is "no-grad"


class Block(nn.Module):
    """What changes between steps may change: attributes, options, a class attribute, the function."""

    alpha = 1.0

    def __init_subclass__(cls) -> None:
        BLOCKS[re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()] = cls

    def __init__(self) -> None:
        super().__init__()
        self.options = {"beta": [1.0]}
        self.function = torch.tanh
        self.fails = False
        self.make()

    def make(self) -> None:
        self.fc = nn.Linear(D, D)

    def body(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("a fault of the user's own")
        return self.body(x) * self.alpha * self.options["beta"][0]

"""What all blocks have, and the register that each goes into."""

import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

D = 4  # width
Y = 2 * D


BLOCKS: dict[str, type["Block"]] = {}  # by name: NoGrad is "no-grad"


class Block(nn.Module):
    """What changes between steps may change: attributes, options, a class attribute, the function.

    Its parts are named in the line that declares it, as those of `support.parts`; `make` adds what else it has.
    """

    alpha = 1.0
    makers: ClassVar[dict[str, Any]] = {"fc": lambda: nn.Linear(D, D)}

    def __init_subclass__(cls, **makers: Any) -> None:
        BLOCKS[re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()] = cls
        cls.makers = makers or cls.makers

    def __init__(self) -> None:
        super().__init__()
        self.options = {"beta": [1.0]}
        self.function = torch.tanh
        self.fails = False
        for name, make in self.makers.items():
            part = make()
            self.register_buffer(name, part) if type(part) is Tensor else setattr(self, name, part)
        self.make()

    def make(self) -> None:
        """Hooks and the like."""

    def body(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("a fault of the user's own")
        return self.body(x) * self.alpha * self.options["beta"][0]

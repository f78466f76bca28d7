"""Modules whose parts are named in the line that declares them."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

GIVEN: Any = object()


class Parts(nn.Module):
    """Makes its parts in their order, anew for each instance; a tensor is a buffer.

    class Gate(Parts, act=GIVEN, first=linear, scale=lambda: nn.Parameter(torch.ones(3)), seen=0):
        def forward(self, x: Tensor) -> Tensor: ...

    An instance is given what is GIVEN, in this order, and by keyword what it has instead of a part: `Gate(F.relu)`,
    `Gate(F.relu, seen=3)`.
    """

    _makers: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **makers: Any) -> None:
        super().__init_subclass__()
        cls._makers = makers or cls._makers

    def __init__(self, *given: Any, **instead: Any) -> None:
        super().__init__()
        order = [name for name, make in self._makers.items() if make is GIVEN]
        instead |= dict(zip(order, given, strict=False))
        assert len(given) <= len(order), f"{type(self).__name__} takes {order}"
        assert set(order) <= instead.keys() <= self._makers.keys(), f"{type(self).__name__} takes {order}"
        for name, make in self._makers.items():
            part = instead[name] if name in instead else make() if callable(make) else make
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


class Does(Parts, function=GIVEN):
    """Does what it is given."""

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


class Backwards(torch.autograd.Function):
    """The value as it is, whose gradient goes through a function: `Backwards.apply(x, lambda grad: 2 * grad)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:
        return ctx.change(gradient), None

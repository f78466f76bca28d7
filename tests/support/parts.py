"""Modules whose parts are named in the line that declares them."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn


class Parts(nn.Module):
    """Makes its parts in their order, anew for each instance; a tensor is a buffer.

    class Gate(Parts, first=linear, scale=lambda: nn.Parameter(torch.ones(3)), seen=0):
        def forward(self, x: Tensor) -> Tensor: ...
    """

    _makers: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **makers: Any) -> None:
        super().__init_subclass__()
        cls._makers = makers or cls._makers

    def __init__(self) -> None:
        super().__init__()
        for name, make in self._makers.items():
            part = make() if callable(make) else make
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

"""Caches in modules that several units call: rotary tables of all layers, masks by length. No tensor of theirs is
passed from unit to unit: over processes, each makes its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .fakes import original_of
from .made_up import is_made_up
from .memory import memory_of, written


class Caches:
    """Tensors that were made of numbers and of constant buffers alone, and in which module's forward."""

    def __init__(self) -> None:
        self._maker: dict[object, nn.Module | None] = {}  # by memory
        self._kept: list[object] = []  # memory stays one tensor's

    def note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> None:
        """An operation within a unit is through."""
        if draws(function) or is_made_up() or not all(map(self._is_fixed, flat((args, kwargs)))):
            for x in written(function, args, kwargs):
                self._maker.pop(memory_of(x), None)
            return
        made = [x for x in flat(result) if isinstance(x, torch.Tensor)]
        maker = _running_module() if made else None
        for x in made:
            self._maker.setdefault(memory_of(x), maker)
        self._kept += made

    def makes(self, unit: nn.Module, tensor: torch.Tensor) -> bool:
        """Whether a unit would make a tensor that it finds, since it calls the module that made it."""
        maker = self._maker.get(memory_of(tensor))
        return maker is not None and any(part is maker for part in unit.modules())

    def _is_fixed(self, x: Any) -> bool:
        if not isinstance(x, torch.Tensor):
            return True
        if x.requires_grad or isinstance(x, nn.Parameter):
            return False
        is_made = not isinstance(x, FakeTensor) or memory_of(x) in self._maker
        return is_made or (not x._version and original_of(x) is not None)  # a buffer


@cache
def draws(function: Any) -> bool:
    """Whether an operation draws from torch's generators."""
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def flat(value: Any) -> list[Any]:
    """The parts of an operation's arguments or results, at a twentieth of the cost of a pytree."""
    if not isinstance(value, _CONTAINERS):
        return [value]
    found: list[Any] = []
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, _CONTAINERS):
            found += flat(part)
        else:
            found.append(part)
    return found


_CONTAINERS = (tuple, list, dict)


def _running_module() -> nn.Module | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return module
        frame = frame.f_back
    return None

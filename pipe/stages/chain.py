"""Stages of a plain chain: the children of an nn.Sequential, or the modules that the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .randomness import Seeder

NOT_TENSORS = "expected tensors (in tuples, lists or dicts)"


class Unit(NamedTuple):
    """A module that is not cut further, with its number over the whole model (for its random numbers)."""

    name: str
    module: nn.Module
    number: int


def sequential_units(model: nn.Sequential) -> list[Unit]:
    """The children of a Sequential, in order (a child that stands there twice counts twice)."""
    return [Unit(name, child, i) for i, (name, child) in enumerate(model._modules.items()) if child is not None]


def stage_units(stages: Sequence[nn.Module]) -> list[list[Unit]]:
    """The units of each given stage; a stage that is an nn.Sequential counts each of its children."""
    number = 0
    result = []
    for index, stage in enumerate(stages):
        plain = sequential_units(stage) if isinstance(stage, nn.Sequential) and type(stage) is nn.Sequential else []
        parts = [(f"{index}.{unit.name}", unit.module) for unit in plain]  # a subclass may have its own forward
        units = [Unit(name, module, number + i) for i, (name, module) in enumerate(parts or [(str(index), stage)])]
        number += len(units)
        result.append(units)
    return result


class Chain(nn.Module):
    """Units one after the other, with flat tensors at both ends.

    What comes in is put together again as the stage before gave it: `spread` passes a tuple as
    several arguments (stages of the user's own), otherwise it is one argument (nn.Sequential).
    """

    def __init__(self, units: Sequence[Unit], seeder: Seeder, *, spread: bool) -> None:
        super().__init__()
        self._units = [(unit.number, unit.module) for unit in units]
        self.units = nn.ModuleList([unit.module for unit in units])
        self._seeder = seeder
        self._spread = spread
        self.in_spec: pytree.TreeSpec | None = None  # None: the model's inputs
        self.out_spec: pytree.TreeSpec | None = None

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments: tuple[Any, ...] = flat
        if self.in_spec is not None:
            value = pytree.tree_unflatten(list(flat), self.in_spec)
            arguments = tuple(value) if self._spread and isinstance(value, tuple | list) else (value,)
        for number, module in self._units:
            self._seeder.enter(number)
            arguments = (module(*arguments),)
        leaves, spec = pytree.tree_flatten(arguments[0])
        if spec != self.out_spec:  # setting an attribute of a module is not cheap
            self.out_spec = spec
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise ValueError(
                    f"{type(self._units[-1][1]).__name__} returns a {type(leaf).__name__} ({leaf!r:.60}) at the end "
                    f"of a stage: {NOT_TENSORS}"
                )
        return tuple(leaves)

"""Arguments of a call with references in the places of tensors, and the Python that puts them together again.

Ref         a value that the model's inputs or an earlier call gave
Slot        an entry of a module's table of parameters or buffers, looked up when the call is made
Constant    the object itself: numbers, types, functions, tensors of the user's own that no module owns
MadeObject  an object that the forward made, such as a cache: made anew, once in each run of a stage
Parts       a tuple, list, dict, slice or any container that torch's pytrees know, of templates
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

_NUMBERS = int | float | complex | str | bytes | None
_FIXED = (
    _NUMBERS
    | type
    | enum.Enum
    | nn.Module
    | np.ndarray
    | torch.Generator
    | torch.dtype
    | torch.device
    | torch.Size
    | torch.layout
    | torch.memory_format
)


@dataclass(frozen=True, slots=True)
class Ref:
    number: int


@dataclass(frozen=True, slots=True)
class Slot:
    module: nn.Module
    table: str
    key: str

    def tensor(self) -> torch.Tensor:
        value = getattr(self.module, self.table)[self.key]
        assert isinstance(value, torch.Tensor)
        return value


@dataclass(frozen=True, slots=True)
class Constant:
    value: object


@dataclass(frozen=True, slots=True)
class MadeObject:
    """An object with attributes, in the state in which it was first seen, or a dict or list of a class of its own."""

    number: int
    kind: type
    attributes: Mapping[str, Template]
    items: Template | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """A tuple, list, dict or slice, or any container that `spec` makes."""

    kind: type | None
    parts: tuple[Template, ...]
    keys: tuple[Any, ...] = ()
    spec: pytree.TreeSpec | None = None


Template = Ref | Slot | Constant | MadeObject | Parts
T = TypeVar("T", Ref | Slot | Constant | MadeObject | Parts, Parts)


def make_template(value: object, leaf: Callable[[object], Template]) -> Template:
    """The template of a value; `leaf` makes those of tensors and of non-containers."""
    kind = type(value)
    if isinstance(value, tuple | list) and kind in (tuple, list):
        return Parts(kind, tuple(make_template(each, leaf) for each in value))
    if isinstance(value, dict) and kind is dict:
        return Parts(dict, tuple(make_template(each, leaf) for each in value.values()), tuple(value))
    if isinstance(value, slice):
        return Parts(slice, tuple(make_template(each, leaf) for each in (value.start, value.stop, value.step)))
    if kind in pytree.SUPPORTED_NODES or (isinstance(value, tuple) and hasattr(value, "_fields")):
        leaves, spec = pytree.tree_flatten(value)
        return Parts(None, tuple(make_template(each, leaf) for each in leaves), spec=spec)
    return leaf(value)


def walk(template: Template) -> Iterator[Template]:
    yield template
    parts: Sequence[Template] = ()
    if isinstance(template, Parts):
        parts = template.parts
    elif isinstance(template, MadeObject):
        parts = [*template.attributes.values(), *([] if template.items is None else [template.items])]
    for part in parts:
        yield from walk(part)


def renumbered(template: T, numbers: Mapping[int, int]) -> T:
    def other(part: Any) -> Any:
        if isinstance(part, Ref):
            return Ref(numbers[part.number])
        if isinstance(part, Parts):
            return replace(part, parts=tuple(map(other, part.parts)))
        if isinstance(part, MadeObject):
            attributes = {key: other(each) for key, each in part.attributes.items()}
            return replace(part, attributes=attributes, items=None if part.items is None else other(part.items))
        return part

    found: T = other(template)
    return found


def is_fixed(value: object) -> bool:
    return isinstance(value, _FIXED) or callable(value)


def is_written_out(value: object) -> bool:
    """Whether a constant's text in Python makes it again. Of these types alone: a subclass writes what it likes."""
    if type(value) is int:  # Python reads none of thousands of digits
        return abs(value) < 1 << 64
    return math.isfinite(value) if type(value) is float else value is None or type(value) is str or type(value) is bool

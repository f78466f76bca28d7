"""Values that hold tensors, such as arguments and outputs of modules: rebuilt with others in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def mapped(value: Any, change: Callable[[Any], Any], *, kind: type = torch.Tensor, objects: bool = True) -> Any:
    """A copy of a value with `change(leaf)` for each leaf of a kind; an object that is in it twice stays one.
    `objects`: whether objects that code may change, such as caches, are copied, too."""
    return _mapped(value, change, kind, objects, {})


def _mapped(value: Any, change: Callable[[Any], Any], kind: type, objects: bool, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)][1]

    def into(copy: Any) -> Any:
        known[id(value)] = value, copy  # the value itself, so that nothing else gets its id
        return copy

    def inner(part: Any) -> Any:
        return _mapped(part, change, kind, objects, known)

    if isinstance(value, kind):
        return into(change(value))
    own = id(value)  # tree_flatten keeps the function, in a circle, until Python's collector runs
    parts, form = pytree.tree_flatten(value, is_leaf=lambda part: id(part) != own)
    if not form.is_leaf():
        return into(pytree.tree_unflatten(map(inner, parts), form))
    is_whole = isinstance(value, torch.Tensor | nn.Module | type) or callable(value)
    if not objects or is_whole or not hasattr(value, "__dict__"):
        return value
    maker: Any = type(value)
    copy = into(maker.__new__(maker))
    vars(copy).update((key, inner(part)) for key, part in vars(value).items())
    if isinstance(value, dict):
        dict.update(copy, {key: inner(part) for key, part in value.items()})
    elif isinstance(value, list):
        list.extend(copy, map(inner, value))
    return copy

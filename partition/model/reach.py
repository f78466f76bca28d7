"""Objects that objects hold, and that functions know of: followed from one to the next."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import CellType, CodeType, MethodType, ModuleType
from typing import Any

MOST = 10_000  # entries of a container that are looked into
USUAL = {bool, int, float, type(None), str, type}  # most of what is met, known without looking at base classes
_FIXED: tuple[Any, ...] = (bool, int, float, type(None), str, bytes, type, ModuleType, *weakref.ProxyTypes)


def walk(
    roots: Iterable[Any], held: Callable[[Any], Iterable[Any]], known: Collection[int] = frozenset()
) -> Iterator[Any]:
    """These and all that they hold, each once; without what is known by id, and what cannot be changed."""
    seen: dict[int, object] = {}  # kept alive, so that an id stays one object's
    pending = list(roots)
    while pending:
        value = pending.pop()
        if type(value) in USUAL:
            continue
        key = id(value)
        if key not in seen and key not in known and not isinstance(value, _FIXED):
            seen[key] = value
            yield value
            pending += held(value)


def parts(value: Any) -> Collection[Any] | None:
    """Parts of a container, a partial or a bound method; None: it is another object."""
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return () if len(value) > MOST else value.values() if isinstance(value, dict) else value
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values(), *vars(value).values()
    return (value.__self__, value.__func__) if isinstance(value, MethodType) else None


def content(cell: CellType) -> Collection[Any]:
    """The one value that a closure's cell holds; none where it is not bound yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def closed_over(function: Any) -> list[Any]:
    return [x for cell in getattr(function, "__closure__", None) or () for x in content(cell)]


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)

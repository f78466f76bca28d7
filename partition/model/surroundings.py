"""What a model's code finds around it, and may change: its process's own, in which other code lives, too.

globals            that functions of the model's classes name, and through them: entries of dicts, lists and sets,
                   attributes of the user's objects, classes and Python modules, thread-locals
context variables  all
torch              settings that decide how operations compute

Kept are entries, by identity: a list that is put back holds the same objects as before. What libraries hold stays.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from dis import get_instructions
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .untouched import StateSnapshot, content, is_users_module

_MOST = 1000  # entries of a container that are looked into
_DEEP = 3  # objects within objects
_TABLES = 2000
MISSING: Any = object()
_Wrapper = functools._lru_cache_wrapper


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """Entries that code may read and change: `put` and `drop` change one. `where`: the line that names it."""

    name: str
    read: Callable[[], Mapping[Any, Any]]
    put: Callable[[Any, Any], object]
    drop: Callable[[Any], object]
    where: str = ""
    is_dict: bool = False

    def set(self, key: Any, value: Any) -> None:
        if value is not MISSING:
            self.put(key, value)
        elif key in self.read():
            self.drop(key)


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What holds around a call: a value by name, and what makes it hold again."""

    name: str
    value: object
    within: Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """An entry of a table that is another one now."""

    table: Table
    key: Any
    before: Any
    now: Any

    @property
    def name(self) -> str:
        return self.table.name if self.key is None or not self.table.name else f"{self.key!r} of {self.table.name}"

    @property
    def leaves(self) -> list[object]:
        return pytree.tree_leaves(list(self.now) if isinstance(self.now, _Content) else self.now)

    @property
    def setting(self) -> Setting:
        return Setting(self.name, self.now, self._within)

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Within, the entry is as it is now; what is another one at the end stays."""
        before = self.table.read().get(self.key, MISSING)
        self.table.set(self.key, self.now)
        try:
            yield
        finally:
            if _is_same(self.table.read().get(self.key, MISSING), self.now):
                self.table.set(self.key, before)


class Surroundings:
    """What some classes and functions of the user's find around them, as it is when this is made."""

    def __init__(self, kinds: Collection[type], functions: Collection[FunctionType]) -> None:
        self._tables = [_torch_settings(), _context_variables(), *_Search(kinds, functions).tables]
        self._first = self._read()
        self._base = [dict(entries) for entries in self._first]

    @classmethod
    def of(cls, kept: StateSnapshot) -> Surroundings:
        """Of the code of all classes and functions in a snapshot."""
        return cls(kept.kinds, kept.functions)

    def _read(self) -> list[Mapping[Any, Any]]:
        return [table.read() for table in self._tables]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, functions under functools.lru_cache compute anew each time; afterwards all is as it was."""
        for table, entries in zip(self._tables, self._first, strict=True):
            for key, value in entries.items():
                if isinstance(value, _Wrapper):
                    table.put(key, functools.lru_cache(maxsize=0)(value.__wrapped__))
        self._base = [dict(entries) for entries in self._read()]
        try:
            yield
        finally:
            for table, before, now in zip(self._tables, self._first, self._read(), strict=True):
                for key in _differing(before, now):
                    table.set(key, before.get(key, MISSING))

    def changes(self) -> list[Change]:
        """What is another one than at the start, but for what `apart` has left out."""
        return [
            Change(table, key, before.get(key, MISSING), now.get(key, MISSING))
            for table, before, now in zip(self._tables, self._base, self._read(), strict=True)
            for key in _differing(before, now)
        ]

    def torch_changes(self) -> list[Change]:
        """Of torch's settings alone."""
        now = self._tables[0].read()
        keys = _differing(self._base[0], now)
        return [Change(self._tables[0], key, self._base[0][key], now[key]) for key in keys]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What changes within is no change."""
        before = self._read()
        try:
            yield
        finally:
            for base, one, other in zip(self._base, before, self._read(), strict=True):
                for key in _differing(one, other):
                    base[key] = other.get(key, MISSING)


@contextmanager
def holding(settings: Sequence[Setting]) -> Iterator[None]:
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting.within())
        yield


def _differing(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    if before == {} == now:
        return []
    keys = [*before, *(key for key in now if key not in before)]
    return [key for key in keys if not _is_same(before.get(key, MISSING), now.get(key, MISSING))]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, _Content) and isinstance(other, _Content):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and bool(one == other))


class _Content(tuple[Any, ...]):
    """What a list, set or deque holds."""


def _torch_settings() -> Table:
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    each: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic algorithms": (
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "memory-efficient attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "attention by products": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "cuDNN attention": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    }
    for owner, names in ((torch.backends.cudnn, ("enabled", "benchmark", "deterministic")), (matmul, ("allow_tf32",))):
        for name in names:
            each[f"{name} of {owner.__name__ if isinstance(owner, ModuleType) else 'products on CUDA'}"] = (
                partial(getattr, owner, name),
                partial(setattr, owner, name),
            )
    return Table(
        name="torch",
        read=lambda: {key: get() for key, (get, _) in each.items()},
        put=lambda key, value: each[key][1](value),
        drop=lambda key: None,
    )


def _context_variables() -> Table:
    return Table(
        name="the context variables",
        read=lambda: dict(copy_context().items()),
        put=lambda variable, value: variable.set(value),
        drop=lambda variable: None,  # no way leads back to one that was never set
    )


class _Search:
    """The tables that some code names."""

    def __init__(self, kinds: Collection[type], functions: Collection[FunctionType]) -> None:
        self.tables: list[Table] = []
        self._seen: dict[int, object] = {}
        self._names: dict[int, set[str]] = {}  # of globals, by id of their dict
        self._pending: list[tuple[Any, str, str, int]] = [(each, "", "", 0) for each in (*kinds, *functions)]
        while self._pending and len(self.tables) < _TABLES:
            value, name, where, depth = self._pending.pop()
            if id(value) not in self._seen and depth <= _DEEP:
                self._seen[id(value)] = value
                self._look_at(value, name, where, depth)

    def _look_at(self, value: Any, name: str, where: str, depth: int) -> None:
        held: Collection[Any] = ()
        if isinstance(value, FunctionType):
            if is_users_module(value.__module__):
                self._code(value.__code__, value.__globals__)
                held = [x for cell in value.__closure__ or () for x in content(cell)]
        elif isinstance(value, _Wrapper):
            held = (value.__wrapped__,)
        elif isinstance(value, staticmethod | classmethod | MethodType):
            held = (value.__func__,)
        elif isinstance(value, property):
            held = (value.fget,)
        elif isinstance(value, partial):
            held = (value.func,)
        elif isinstance(value, dict):
            self._entries(value, name, where)
            held = value.values() if len(value) <= _MOST else ()
        elif isinstance(value, list | set | deque):
            self._content(value, name, where)
            held = value if len(value) <= _MOST else ()
        elif isinstance(value, type):
            if is_users_module(value.__module__):
                self._class(value)
                held = (*(each for each in vars(value).values() if not isinstance(each, torch.Tensor)), *value.__mro__)
        elif isinstance(value, threading.local) or _is_users(value):
            self._entries(vars(value), name, where, read=lambda: vars(value))
            held = (type(value), *vars(value).values())
        inner = name and f"an entry of {name}"
        deeper = 0 if isinstance(value, FunctionType | type) else depth + 1  # code is followed to its end
        self._pending += [(each, inner, where, deeper) for each in held]

    def _code(self, code: CodeType, names: MutableMapping[str, Any]) -> None:
        """Globals that a function names, and attributes of the user's Python modules among them."""
        stored: set[str] = set()
        lines: dict[str, str] = {}
        line = code.co_firstlineno
        for each in get_instructions(code):
            line = each.starts_line if isinstance(each.starts_line, int) and each.starts_line > 1 else line
            if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                stored.add(each.argval)
            if isinstance(each.argval, CodeType):
                self._code(each.argval, names)
            elif each.opname.endswith("_GLOBAL") and isinstance(each.argval, str):
                lines.setdefault(each.argval, f" at {code.co_filename}:{line}, in {code.co_name}")
        for name, where in lines.items():
            value = names.get(name, MISSING)
            if isinstance(value, ModuleType):
                if is_users_module(value.__name__):
                    for inner in {*code.co_names} & vars(value).keys():
                        self._global(vars(value), inner, where, is_stored=True)
            elif value is not MISSING or name in stored:
                self._global(names, name, where, is_stored=name in stored)

    def _global(self, names: MutableMapping[str, Any], name: str, where: str, *, is_stored: bool) -> None:
        value = names.get(name, MISSING)
        known = self._names.setdefault(id(names), set())
        if (is_stored or isinstance(value, _Wrapper)) and name not in known:
            known.add(name)
            self.tables.append(
                Table(
                    name=f"the globals of {names.get('__name__')}",
                    read=lambda: {name: names[name]} if name in names else {},
                    put=names.__setitem__,
                    drop=names.__delitem__,
                    where=where,
                )
            )
        if not isinstance(value, torch.Tensor | nn.Module):
            self._pending.append((value, name, where, 0))

    def _entries(
        self, held: dict[Any, Any], name: str, where: str, read: Callable[[], dict[Any, Any]] | None = None
    ) -> None:
        now = read or (lambda: held)
        self.tables.append(
            Table(
                name=name,
                read=lambda: dict(now()),
                put=lambda key, value: now().__setitem__(key, value),
                drop=lambda key: now().__delitem__(key),
                where=where,
                is_dict=read is None,
            )
        )

    def _content(self, held: Any, name: str, where: str) -> None:
        def put(_: None, values: _Content) -> None:
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(values)

        self.tables.append(
            Table(name=name, read=lambda: {None: _Content(held)}, put=put, drop=lambda _: held.clear(), where=where)
        )

    def _class(self, kind: type) -> None:
        self.tables.append(
            Table(
                name=f"class {kind.__qualname__}",
                read=lambda: {key: value for key, value in vars(kind).items() if not key.startswith("__")},
                put=partial(type.__setattr__, kind),
                drop=partial(type.__delattr__, kind),
            )
        )


def _is_users(value: object) -> bool:
    """Whether an object of a class of the user's holds attributes that are kept; a model's own are, elsewhere."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | torch.Tensor | ModuleType | FunctionType)
        and is_users_module(type(value).__module__)
    )

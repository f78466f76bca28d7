"""The state of the process that a model's code finds around it and may change, and that other code shares.

globals            that functions of the model's classes name, and through them: entries of dicts, lists and sets,
                   attributes of objects, classes and the user's Python modules, thread-locals
context variables  all
torch              settings that decide how operations compute

Kept are entries, by identity: a list that is put back holds the same objects as before. Code of the user's and of
libraries is followed, but for Python's own and torch's; libraries' entries are put back, and not watched.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, Token, copy_context
from dataclasses import dataclass
from dis import get_instructions, opmap
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .source_line import content, is_users_module

_MOST = 1000  # entries of a container that are looked into, and watched
_LARGE = 100_000  # those of data, which no forward changes
_DEEP = 3  # objects within objects
_OBJECTS = 5000
_STORES = (opmap["STORE_GLOBAL"], opmap["DELETE_GLOBAL"])
_STABLE = {*sys.stdlib_module_names, "torch", "numpy", __name__.partition(".")[0]}
_FIXED = (bool, int, float, type(None), str, bytes, torch.Tensor, nn.Module)
_DICTS, _LISTS = {dict, OrderedDict, defaultdict}, {list, set, deque}
_Wrapper = functools._lru_cache_wrapper
MISSING: Any = object()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Namespace:
    """Namespace that code may read and change: `put` and `drop` change one. `where`: code that names it, and how."""

    name: str
    read: Callable[[], Mapping[Any, Any]]
    put: Callable[[Any, Any], object]
    drop: Callable[[Any], object]
    where: tuple[CodeType, str] | None = None
    is_dict: bool = False
    is_watched: bool = True

    def set(self, key: Any, value: Any) -> None:
        if value is not MISSING:
            self.put(key, value)
        elif key in self.read():
            self.drop(key)


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A value by name that holds around a call, and the context manager that restores it there."""

    name: str
    value: object
    within: Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """An entry of a table that is another one now."""

    table: Namespace
    key: Any
    before: Any
    now: Any

    @property
    def name(self) -> str:
        key = self.key.name if isinstance(self.key, ContextVar) else self.key
        return self.table.name if key is None or not self.table.name else f"{key!r} of {self.table.name}"

    @property
    def line(self) -> str:
        """Where the code first names the table."""
        if self.table.where is None:
            return ""
        code, name = self.table.where
        line = code.co_firstlineno
        for each in get_instructions(code):
            line = each.starts_line or line
            if each.argval == name:
                break
        return f" at {code.co_filename}:{line}, in {code.co_name}"

    @property
    def leaves(self) -> list[object]:
        return pytree.tree_leaves(list(self.now) if isinstance(self.now, _Content) else self.now)

    @property
    def setting(self) -> Setting:
        value = _fresh(self.now)
        return Setting(self.name, value, partial(self._within, value))

    @contextmanager
    def _within(self, value: Any) -> Iterator[None]:
        """Within, the entry is as it was when this was a change; what is another one at the end stays."""
        before, now = self.table.read().get(self.key, MISSING), _fresh(value)
        self.table.set(self.key, now)
        try:
            yield
        finally:
            if _is_same(self.table.read().get(self.key, MISSING), now):
                self.table.set(self.key, before)


def _fresh(value: Any) -> Any:
    """The value, with dicts and lists of its own: what a unit collects in them is its run's."""
    return pytree.tree_map(lambda leaf: leaf, value) if isinstance(value, dict | list) else value


class Surroundings:
    """The state that some classes and functions find around them, as it is when this is made."""

    def __init__(self, kinds: Collection[type], functions: Collection[FunctionType]) -> None:
        found = [_torch_settings(), _context_variables(), *_Search(kinds, functions).tables]
        self._tables = sorted(found, key=lambda table: not table.is_watched)
        self._watched = self._tables[: sum(table.is_watched for table in found)]
        self._first = [table.read() for table in self._tables]
        self._base: list[dict[Any, Any]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, functions under functools.lru_cache compute anew each time; afterwards all is as it was."""
        for table, entries in zip(self._tables, self._first, strict=True):
            for key, value in entries.items():
                if isinstance(value, _Wrapper):
                    table.put(key, functools.lru_cache(maxsize=0)(value.__wrapped__))
        self._base = [dict(table.read()) for table in self._watched]
        try:
            yield
        finally:
            for table, before in zip(self._tables, self._first, strict=True):
                for key in _differing(before, table.read()):
                    table.set(key, before.get(key, MISSING))

    def changes(self) -> list[Changed]:
        """Entries of the user's and torch's that differ from the start, without those that `apart` has left out."""
        found = []
        for table, before in zip(self._watched, self._base, strict=True):
            now = table.read()
            keys = _differing(before, now)
            found += [Changed(table, key, before.get(key, MISSING), now.get(key, MISSING)) for key in keys]
        return found

    def torch_changes(self) -> list[Changed]:
        """Changes of torch's settings alone."""
        now = self._watched[0].read()
        keys = _differing(self._base[0], now)
        return [Changed(self._watched[0], key, self._base[0][key], now[key]) for key in keys]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, changes do not count."""
        before = [table.read() for table in self._watched]
        try:
            yield
        finally:
            for base, one, table in zip(self._base, before, self._watched, strict=True):
                for key in _differing(one, now := table.read()):
                    base[key] = now.get(key, MISSING)


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
    """The elements of a list, set or deque."""


def _torch_settings() -> Namespace:
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    each: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
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
    return Namespace(
        name="torch",
        read=lambda: {key: get() for key, (get, _) in each.items()},
        put=lambda key, value: each[key][1](value),
        drop=lambda key: None,
    )


def _context_variables() -> Namespace:
    tokens: dict[ContextVar[Any], Token[Any]] = {}  # only they lead back to where one was never set

    def put(variable: ContextVar[Any], value: Any) -> None:
        token = variable.set(value)
        if token.old_value is Token.MISSING:
            tokens[variable] = token

    def drop(variable: ContextVar[Any]) -> None:
        if variable in tokens:
            variable.reset(tokens.pop(variable))

    return Namespace(name="the context variables", read=lambda: dict(copy_context().items()), put=put, drop=drop)


class _Found(NamedTuple):
    """A value that code names, or that such a value holds. `origin`: the Python module of that code."""

    value: Any
    name: str
    origin: str
    where: tuple[CodeType, str] | None = None
    depth: int = 0


class _Search:
    """The tables that some code names: the user's code is followed everywhere, a library's within its Python module."""

    def __init__(self, kinds: Collection[type], functions: Collection[FunctionType]) -> None:
        self.tables: list[Namespace] = []
        self._globals: set[tuple[int, str]] = set()  # that have a table, by id of their dict
        self._pending = [_Found(each, "", each.__module__) for each in (*kinds, *functions)]
        seen: dict[int, object] = {}  # kept alive, so that an id stays one object's
        while self._pending and len(seen) < _OBJECTS:
            found = self._pending.pop()
            if id(found.value) not in seen and found.depth <= _DEEP and not isinstance(found.value, _FIXED):
                seen[id(found.value)] = found.value
                self._look_at(found)

    def _look_at(self, found: _Found) -> None:
        value, held = found.value, ()  # type: Any, Collection[Any]
        if isinstance(value, FunctionType):
            if _is_followed(value.__module__, found.origin):
                self._code(value.__code__, value.__globals__, value.__module__)
                held = [x for cell in value.__closure__ or () for x in content(cell)]
        elif isinstance(value, _Wrapper | staticmethod | classmethod | MethodType):
            held = (value.__wrapped__ if isinstance(value, _Wrapper) else value.__func__,)
        elif isinstance(value, property | partial):
            held = (value.fget if isinstance(value, property) else value.func,)
        elif type(value) in _DICTS | _LISTS and len(value) > _LARGE:
            return
        elif type(value) in _DICTS:
            self._attributes(found, lambda: value, is_dict=True)
            held = value.values() if len(value) <= _MOST else ()
        elif type(value) in _LISTS:
            self._content(found)
            held = value if len(value) <= _MOST else ()
        elif isinstance(value, type):
            if _is_followed(value.__module__, found.origin):
                self._class(value)
                held = (*vars(value).values(), *value.__mro__)
        elif isinstance(value, threading.local) or _is_held(value, found.origin):
            self._attributes(found, lambda: vars(value))  # of a thread-local: this thread's
            held = (type(value), *vars(value).values())
        inner = found.name and f"an entry of {found.name}"
        depth = 0 if isinstance(value, FunctionType | type) else found.depth + 1  # code is followed to its end
        self._pending += [_Found(each, inner, found.origin, found.where, depth) for each in held]

    def _code(self, code: CodeType, names: MutableMapping[str, Any], origin: str) -> None:
        """Globals that a function names, and attributes of the Python modules among them."""
        stored = _stored(code)
        for name in code.co_names:
            value = names.get(name, MISSING)
            if isinstance(value, ModuleType):
                is_users, inside = is_users_module(value.__name__), vars(value)
                for inner in () if _is_stable(value.__name__) else {*code.co_names} & inside.keys():
                    self._global(_Found(inside[inner], inner, origin, (code, name)), inside, is_stored=is_users)
            elif value is not MISSING or name in stored:
                self._global(_Found(value, name, origin, (code, name)), names, is_stored=name in stored)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant, names, origin)

    def _global(self, found: _Found, names: MutableMapping[str, Any], *, is_stored: bool) -> None:
        name, key = found.name, (id(names), found.name)
        if (is_stored or isinstance(found.value, _Wrapper)) and key not in self._globals:
            self._globals.add(key)
            read = lambda: {name: names[name]} if name in names else {}  # noqa: E731
            named = found._replace(name=f"module {names.get('__name__')}")
            self._add(named, read, names.__setitem__, names.__delitem__)
        self._pending.append(found)

    def _attributes(self, found: _Found, now: Callable[[], dict[Any, Any]], *, is_dict: bool = False) -> None:
        def put(key: Any, value: Any) -> None:
            now()[key] = value

        self._add(found, lambda: dict(now()), put, lambda key: now().pop(key), is_dict=is_dict)

    def _content(self, found: _Found) -> None:
        held = found.value

        def put(_: None, values: _Content) -> None:
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(values)

        self._add(found, lambda: {None: _Content(held)}, put, lambda _: held.clear())

    def _class(self, kind: type) -> None:
        def read() -> dict[str, Any]:
            return {key: value for key, value in vars(kind).items() if not key.startswith("__")}

        found = _Found(kind, f"class {kind.__qualname__}", kind.__module__)
        self._add(found, read, partial(type.__setattr__, kind), partial(type.__delattr__, kind))

    def _add(
        self,
        found: _Found,
        read: Callable[[], Mapping[Any, Any]],
        put: Callable[[Any, Any], object],
        drop: Callable[[Any], object],
        *,
        is_dict: bool = False,
    ) -> None:
        entries = read()
        held = entries.get(None)
        is_large = max(len(entries), len(held) if isinstance(held, _Content) else 0) > _MOST
        is_watched = is_users_module(found.origin) and not is_large
        table = Namespace(
            name=found.name, read=read, put=put, drop=drop, where=found.where, is_dict=is_dict, is_watched=is_watched
        )
        self.tables.append(table)


@cache
def _stored(code: CodeType) -> frozenset[str]:
    """Names of the globals that code binds anew."""
    if not {*_STORES} & {*code.co_code[::2]}:
        return frozenset()
    return frozenset(each.argval for each in get_instructions(code) if each.opcode in _STORES)


def _is_stable(module: str | None) -> bool:
    """Whether the code of this Python module keeps nothing that a model leaves with it: Python's, torch's, ours."""
    return (module or "").partition(".")[0] in _STABLE


def _is_followed(module: str | None, origin: str) -> bool:
    """Whether code of a Python module is looked into that code of another one, `origin`, names."""
    if is_users_module(module):
        return True
    return not _is_stable(module) and (module == origin or is_users_module(origin))


def _is_held(value: object, origin: str) -> bool:
    """Whether the attributes of an object are looked into; a model's modules are kept elsewhere."""
    kinds = nn.Module | torch.Tensor | ModuleType
    return hasattr(value, "__dict__") and not isinstance(value, kinds) and _is_followed(type(value).__module__, origin)

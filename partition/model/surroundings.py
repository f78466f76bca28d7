"""The state of the process that a model's code finds around it and may change, and that other code shares: torch's
settings, context variables, and globals that functions of the model's classes name, and through them entries of dicts,
lists and sets, attributes of objects, classes and the user's Python modules, thread-locals.

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
from contextvars import Context, ContextVar, Token, copy_context
from dataclasses import dataclass
from dis import get_instructions, opmap
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .reach import closed_over, codes
from .source_line import is_users_module

_MOST = 1000  # entries of a container that are looked into, and watched
_LARGE = 100_000  # those of data, which no forward changes
_DEEP = 3  # objects within objects
_OBJECTS = 5000
_STORES = {opmap["STORE_GLOBAL"], opmap["DELETE_GLOBAL"]}
_STABLE = {*sys.stdlib_module_names, "torch", "numpy", __name__.partition(".")[0]}
_FIXED = (bool, int, float, type(None), str, bytes, torch.Tensor, nn.Module)
_DICTS, _LISTS = {dict, OrderedDict, defaultdict}, {list, set, deque}
_Wrapper = functools._lru_cache_wrapper
MISSING: Any = object()


@dataclass(frozen=True, slots=True, eq=False)
class Namespace:
    """Namespace that code may read and change. `where`: code that names it, and how."""

    name: str
    read: Callable[[], Mapping[Any, Any]]
    set: Callable[[Any, Any], object]
    where: tuple[CodeType, str] | None = None
    is_dict: bool = False
    is_watched: bool = True


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
        lines = (each.positions.lineno for each in get_instructions(code) if each.positions and each.argval == name)
        line = next(lines, code.co_firstlineno)
        return f" at {code.co_filename}:{line}, in {code.co_name}"

    @property
    def leaves(self) -> list[object]:
        return pytree.tree_leaves(self.now)

    @property
    def setting(self) -> Setting:
        value = _fresh(self.now)
        return Setting(self.name, value, partial(self._within, value))

    @contextmanager
    def _within(self, value: Any) -> Iterator[None]:
        """Within, the entry has the value from when this was a change; what is another one at the end stays."""
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
        self._begun: list[dict[Any, Any]] = []
        self._base: list[dict[Any, Any]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, functions under functools.lru_cache compute anew each time; afterwards all is restored."""
        for table, entries in zip(self._tables, self._first, strict=True):
            for key, value in entries.items():
                if isinstance(value, _Wrapper):
                    table.set(key, functools.lru_cache(maxsize=0)(value.__wrapped__))
        self._begun = [dict(table.read()) for table in self._tables]
        self._base = [dict(entries) for entries in self._begun[: len(self._watched)]]
        try:
            yield
        finally:
            self._put_back(self._first)

    def again(self) -> None:
        """Within `kept`, put back what was there at its start."""
        self._put_back(self._begun)

    def _put_back(self, entries: Sequence[Mapping[Any, Any]]) -> None:
        for table, before in zip(self._tables, entries, strict=True):
            for key in _differing(before, table.read()):
                table.set(key, before.get(key, MISSING))

    def changes(self, number: int | None = None) -> list[Changed]:
        """Entries of the user's and torch's that differ from the start, without those that `apart` has left out.
        `number`: of namespaces that are asked, of which torch's settings are the first."""
        return [
            Changed(table, key, before.get(key, MISSING), now.get(key, MISSING))
            for table, before in zip(self._watched[:number], self._base, strict=False)
            for now in [table.read()]
            for key in _differing(before, now)
        ]

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
    if type(one) is type(other) is tuple:
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and bool(one == other))


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
    attributes: list[tuple[str, Any, str]] = [("products on CUDA", matmul, "allow_tf32")]
    attributes += [("torch.backends.cudnn", torch.backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic")]
    for what, owner, name in attributes:
        each[f"{name} of {what}"] = partial(getattr, owner, name), partial(setattr, owner, name)
    return Namespace(
        name="torch",
        read=lambda: {key: get() for key, (get, _) in each.items()},
        set=lambda key, value: each[key][1](value),
    )


def _context_variables() -> Namespace:
    tokens: dict[ContextVar[Any], Token[Any]] = {}  # only they lead back to where one was never set

    def put(variable: ContextVar[Any], value: Any) -> None:
        if value is not MISSING:
            token = variable.set(value)
            if token.old_value is Token.MISSING:
                tokens[variable] = token
        elif variable in tokens:
            variable.reset(tokens.pop(variable))
        elif (default := _default(variable)) is not MISSING:  # the user's code has set it, and nothing unsets it
            variable.set(default)

    def read() -> dict[Any, Any]:
        return {variable: value for variable, value in copy_context().items() if value is not _default(variable)}

    return Namespace(name="the context variables", read=read, set=put)


@cache
def _default(variable: ContextVar[Any]) -> Any:
    try:
        return Context().run(variable.get)
    except LookupError:
        return MISSING


def _put(table: MutableMapping[Any, Any], key: Any, value: Any) -> None:
    if value is not MISSING:
        table[key] = value
    else:
        table.pop(key, None)


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
                held = closed_over(value)
        elif isinstance(value, _Wrapper | staticmethod | classmethod | MethodType | property | partial):
            held = [getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "func")]
        elif type(value) in _DICTS | _LISTS:
            if len(value) <= _LARGE and type(value) in _DICTS:
                self._attributes(found, lambda: value)
            elif len(value) <= _LARGE:
                self._content(found)
            held = () if len(value) > _MOST else value.values() if type(value) in _DICTS else value
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

    def _code(self, whole: CodeType, names: MutableMapping[str, Any], origin: str) -> None:
        """Globals that a function names, and attributes of the Python modules among them."""
        for code, name in ((each, name) for each in codes(whole) for name in each.co_names):
            value, is_stored = names.get(name, MISSING), name in _stored(code)
            if isinstance(value, ModuleType):
                is_users, inside = is_users_module(value.__name__), vars(value)
                for inner in () if _is_stable(value.__name__) else {*code.co_names} & inside.keys():
                    self._global(_Found(inside[inner], inner, origin, (code, name)), inside, is_stored=is_users)
            elif value is not MISSING or is_stored:
                self._global(_Found(value, name, origin, (code, name)), names, is_stored=is_stored)

    def _global(self, found: _Found, names: MutableMapping[str, Any], *, is_stored: bool) -> None:
        name, key = found.name, (id(names), found.name)
        if (is_stored or isinstance(found.value, _Wrapper)) and key not in self._globals:
            self._globals.add(key)
            named = found._replace(value=None, name=f"module {names.get('__name__')}")
            self._add(named, lambda: {name: names[name]} if name in names else {}, partial(_put, names))
        self._pending.append(found)

    def _attributes(self, found: _Found, now: Callable[[], dict[Any, Any]]) -> None:
        self._add(found, lambda: dict(now()), lambda key, value: _put(now(), key, value))

    def _content(self, found: _Found) -> None:
        held = found.value

        def put(_: None, values: tuple[Any, ...]) -> None:
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(values)

        self._add(found, lambda: {None: tuple(held)}, put)

    def _class(self, kind: type) -> None:
        def read() -> dict[str, Any]:
            return {key: value for key, value in vars(kind).items() if not key.startswith("__")}

        def put(key: str, value: Any) -> None:
            if value is not MISSING:
                type.__setattr__(kind, key, value)
            elif key in vars(kind):
                type.__delattr__(kind, key)

        self._add(_Found(kind, f"class {kind.__qualname__}", kind.__module__), read, put)

    def _add(self, found: _Found, read: Callable[[], Mapping[Any, Any]], put: Callable[[Any, Any], object]) -> None:
        is_dict = type(found.value) in _DICTS
        is_large = (is_dict or type(found.value) in _LISTS) and len(found.value) > _MOST
        is_watched = is_users_module(found.origin) and not is_large
        self.tables.append(Namespace(found.name, read, put, found.where, is_dict, is_watched))


@cache
def _stored(code: CodeType) -> frozenset[str]:
    """Names of the globals that code binds anew."""
    instructions = get_instructions(code) if _STORES & {*code.co_code[::2]} else ()
    return frozenset(each.argval for each in instructions if each.opcode in _STORES)


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

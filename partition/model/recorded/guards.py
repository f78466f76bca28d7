"""Guards of a record: what its code has read, compared before each batch, so that nothing of it is frozen.

One walk goes over all that, from the modules that were opened and the globals of their code.

look   at the ids of what is in attributes, containers, globals and cells, the forms of tensors, arrays' contents
walk   where one differs: over all of it again, as texts by path; model.options['alpha'] -> builtins.float 0.5

Where the texts are equal, too, other objects have equal values. Neither runs the user's code: attributes are taken from
`__dict__`, slots and classes. Not compared are values of tensors (calls take those as they are), what C code holds,
and what objects of libraries hold.
"""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import os
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import nn

from ..source_line import is_ours, is_users, is_users_module
from .reads import CodeReads

_OFTEN = 5  # recordings in a row


class RecordingWarning(UserWarning):
    """The code between a model's modules reads what changes before each batch, or what cannot be compared."""


class Guards:
    """All that a record's code has read, as it is when this is made; flags of training count in training alone."""

    def __init__(self, reads: CodeReads, *, training: bool) -> None:
        self._reads = reads
        self._ignored = frozenset() if training else frozenset({"training"})
        self._walk = Walk(reads, self._ignored)

    def tell(self) -> None:
        """Warn, when the stages are built, of side effects, and of what is compared by identity alone, though the code
        may look into it."""
        if effects := self._reads.effects:
            warnings.warn(
                f"the code between the modules changes {_some(effects)}: it does so once, while the model is recorded, "
                f"and not with each batch. Expected that in a module of its own, which runs as it is, or around steps",
                RecordingWarning,
                stacklevel=2,
            )
        if unknown := self._walk.unknown:
            warnings.warn(
                f"the code between the modules reads {_some(unknown)}, which cannot be "
                f"compared: should that change, the stages go on with what it was. Expected plain "
                f"attributes, or that code in a module of its own, which runs as it is",
                RecordingWarning,
                stacklevel=2,
            )

    def differing(self) -> list[str]:
        """Paths at which something else was read now; none where the record is right."""
        if self._walk.is_same():
            return []
        before, now = self._walk, Walk(self._reads, self._ignored)
        paths = {**before.texts, **now.texts}
        found = [p for p in paths if (before.texts.get(p), before.pins.get(p)) != (now.texts.get(p), now.pins.get(p))]
        if not found:
            self._walk = now
        return found


def _some(names: Collection[str]) -> str:
    return ", ".join([*names][:5]) + ", ..." * (len(names) > 5)


class Changes:
    """Warns, once, of what changes so often that recording it again takes longer than it should."""

    def __init__(self) -> None:
        self._times: dict[object, dict[str, int]] = {}  # by path, in a row
        self._is_told = False

    def note(self, inputs: object, paths: Collection[str]) -> None:
        """Before a batch of such inputs the code is recorded again, since these have changed; none: it is not."""
        before = self._times.get(inputs, {})
        self._times[inputs] = {path: before.get(path, 0) + 1 for path in paths}
        often = [path for path, times in self._times[inputs].items() if times >= _OFTEN]
        if often and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"{often[0]} has changed before each of {_OFTEN} batches, and the code between the modules, which "
                f"reads it, was recorded again each time: right, but slow. Expected what changes with each batch as a "
                f"tensor among the inputs, a buffer, or in a module of its own, which runs as it is",
                RecordingWarning,
                stacklevel=2,
            )


_MISSING: Any = object()
_MOST = 10_000  # entries of a container that are compared
_MOST_BYTES = 1 << 26  # of an array
_PLAIN = (
    *(int, float, complex, str, bytes, type(None), np.generic, slice, range),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_HELD: Mapping[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    partial: ("func", "args", "keywords"),
    functools._lru_cache_wrapper: ("__wrapped__",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}
_CALLABLES = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)

_Places = Iterable[tuple[str, object]]  # paths and what is there


class Walk:
    """One walk; see above."""

    def __init__(self, reads: CodeReads, ignored: Collection[str]) -> None:
        self.texts: dict[str, str] = {}  # by path
        self.pins: dict[str, int] = {}  # ids of objects that calls of the record hold, or that have no text
        self.unknown: list[str] = []  # paths of what is compared by identity alone
        self._reads, self._ignored = reads, ignored
        self._checks: list[tuple[Callable[[], Iterable[object]], list[int], list[object]]] = []
        self._forms: list[tuple[Callable[[], list[object]], list[object]]] = []
        self._arrays: list[tuple[Callable[[], np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = []
        self._path: dict[int, str] = {}  # of what was visited
        self._kept: list[object] = []
        # Which entries of classes and modules are read is unknown: those that the code names may be.
        self._names = {name for code in reads.codes for name in code.co_names}
        self._names_of: dict[type, set[str]] = {}
        for kind, names in reads.names_of.items():
            for base in kind.__mro__:
                self._names_of.setdefault(base, set()).update(names)
        met: set[types.CodeType] = set()
        inner = {part for code in reads.codes for part in code.co_consts}
        todo = [*self._roots()]
        while todo:
            path, value = todo.pop()
            if isinstance(value, types.FunctionType):
                met.add(value.__code__)
            todo += self._visit(path, value)
        for code, space in reads.codes.items():
            closes_over = set(code.co_freevars) - {"__class__"}
            if closes_over and code not in met | inner and is_users_module(space.get("__name__")):
                self.unknown.append(f"what {code.co_qualname} closes over")

    def is_same(self) -> bool:
        return (
            all([*map(id, get())] == ids for get, ids, _ in self._checks)
            and all(get() == forms for get, forms in self._forms)
            and all(np.array_equal(_words(get()), words) for get, words in self._arrays)
        )

    def _roots(self) -> Iterator[tuple[str, object]]:
        for path, module in self._reads.opened.items():
            yield f"model.{path}".rstrip("."), module
        for code, space in self._reads.codes.items():
            yield from self._entries(str(space.get("__name__")), space, sorted(set(code.co_names)))
        hooks = vars(torch.nn.modules.module)
        yield from self._entries("torch.nn", hooks, [name for name in hooks if name.startswith("_global_")])
        variables = sorted(self._reads.environ)
        self._equal([f"os.environ[{name!r}]" for name in variables], lambda: [*map(os.environ.get, variables)])
        self._equal(
            ["torch's default type", "torch's default device"],
            lambda: [torch.get_default_dtype(), torch.get_default_device()],
        )
        for i, tensor in enumerate(self._reads.tensors):
            self._array(f"value {i} that was taken of a tensor", partial(_values_of, tensor))

    # Notes

    def _check(self, get: Callable[[], Iterable[object]]) -> list[object]:
        values = [*get()]
        self._checks.append((get, [*map(id, values)], values))
        return values

    def _equal(self, paths: Iterable[str], get: Callable[[], list[object]]) -> None:
        values = get()
        self._forms.append((get, values))
        self.texts |= dict(zip(paths, map(str, values), strict=True))

    def _entries(self, path: str, table: Mapping[Any, object], names: Collection[Any]) -> _Places:
        if not names:
            return []
        values = self._check(lambda: map(table.get, names, repeat(_MISSING)))
        return [(f"{path}.{name}", x) for name, x in zip(names, values, strict=True) if x is not _MISSING]

    def _put(self, path: str, value: object, text: object = "", *, is_pinned: bool = False) -> list[Any]:
        kind = type(value)
        self.texts[path] = f"{kind.__module__}.{kind.__qualname__} {text}".rstrip()
        if is_pinned:
            self.pins[path] = id(value)
        return []

    # Visits

    def _visit(self, path: str, x: object) -> _Places:
        if isinstance(x, (enum.Enum, *_PLAIN)):
            return self._put(path, x, x.name if isinstance(x, enum.Enum) else repr(x))
        known = self._path.get(id(x))
        if known is not None:
            return [] if known == path else self._put(path, x, f"as {known}")
        self._path[id(x)] = path
        self._kept.append(x)
        if isinstance(x, torch.Tensor):
            self._put(path, x, is_pinned=True)
            self._equal([path], lambda: [_form(x)])
            return []
        if (isinstance(x, np.ndarray) and not x.dtype.hasobject) or isinstance(x, bytearray):
            self._put(path, x, is_pinned=True)
            return self._array(path, lambda: np.asarray(x))
        if isinstance(x, tuple | list | deque | np.ndarray | set | frozenset | dict | types.MappingProxyType):
            return self._container(path, x)
        if isinstance(x, types.FunctionType):
            return self._function(path, x)
        if isinstance(x, _CALLABLES):
            return self._put(path, x, getattr(x, "__qualname__", x), is_pinned=True)
        if isinstance(x, weakref.ref):
            self._put(path, x, is_pinned=True)
            return [(f"{path}()", value) for value in self._check(lambda: (x(),))]
        held = next((names for kind, names in _HELD.items() if isinstance(x, kind)), None)
        if held is not None:
            self._put(path, x)
            return [(f"{path}.{name}", getattr(x, name)) for name in held]
        if isinstance(x, types.ModuleType):
            self._put(path, x, x.__name__, is_pinned=True)
            names = () if _is_library(x.__name__) else sorted(self._names & vars(x).keys())
            return self._entries(path, vars(x), names)
        if isinstance(x, type):
            return self._class(path, x)
        return self._object(path, x)

    def _container(self, path: str, x: Any) -> _Places:
        if len(x) > _MOST:
            self.unknown.append(path)
            return self._put(path, x, len(x), is_pinned=True)
        inner: list[tuple[str, object]]
        if isinstance(x, dict | types.MappingProxyType):
            kind: Any = dict if isinstance(x, dict) else types.MappingProxyType  # a class of the user's may do anything
            self._check(lambda: chain(kind.keys(x), kind.values(x)))
            keys = [_key(key, i) for i, key in enumerate(kind.keys(x))]
            inner = [(f"{path}[{key}]", value) for key, value in zip(keys, kind.values(x), strict=True)]
            self._put(path, x, ", ".join(keys))
        elif isinstance(x, set | frozenset):
            parts = sorted(x, key=lambda part: repr(part) if isinstance(part, _PLAIN) else type(part).__qualname__)
            self._check(lambda: sorted(x, key=id))
            inner = [(f"{path}{{{i}}}", value) for i, value in enumerate(parts)]
            self._put(path, x, len(x))
        else:
            kind = next(kind for kind in (tuple, list, deque, np.ndarray) if isinstance(x, kind))
            inner = [(f"{path}[{i}]", value) for i, value in enumerate(self._check(lambda: kind.__iter__(x)))]
            self._put(path, x, len(x))
        return [*inner, *self._attributes(path, x)]

    def _array(self, path: str, get: Callable[[], np.ndarray[Any, Any]]) -> _Places:
        array = get()
        if array.nbytes > _MOST_BYTES:
            self.unknown.append(path)
        else:
            words = _words(array).copy()
            self._arrays.append((get, words))
            content = hashlib.blake2b(words.tobytes(), digest_size=8).hexdigest()
            self.texts[path] = f"{array.dtype} {array.shape} {content}"
        return []

    def _function(self, path: str, x: types.FunctionType) -> _Places:
        self._put(path, x, f"{x.__module__}.{x.__qualname__}", is_pinned=True)
        self.pins[f"{path}.__code__"] = id(x.__code__)
        self._check(lambda: (x.__code__, x.__defaults__, x.__kwdefaults__))
        inner: list[tuple[str, object]] = [(f"{path}.__wrapped__", x.__wrapped__)] if hasattr(x, "__wrapped__") else []
        if not self._has_run(x):
            return inner
        contents = self._check(lambda: [_there(getattr, cell, "cell_contents") for cell in x.__closure__ or ()])
        cells = zip(x.__code__.co_freevars, contents, strict=True)
        inner += [(f"{path}<{name}>", content) for name, content in cells if content is not _MISSING]
        return [*inner, (f"{path}.__defaults__", x.__defaults__), (f"{path}.__kwdefaults__", x.__kwdefaults__)]

    def _class(self, path: str, x: type) -> _Places:
        self._put(path, x, f"{x.__module__}.{x.__qualname__}", is_pinned=True)
        self._check(lambda: x.__mro__)
        names = {n for n in self._names | self._names_of.get(x, set()) if not n.startswith("__")}
        found: list[tuple[str, object]] = []
        for base in x.__mro__:
            if not _is_library(base.__module__) and (base is x or id(base) not in self._path):
                table = vars(base)
                self._check(partial(iter, table))  # a new name is looked for in the whole walk alone
                self._path.setdefault(id(base), path)
                own = sorted(name for name in table if name in names or self._has_run(table[name]))
                found += self._entries(f"{path}({base.__qualname__})", table, own)
        return found

    def _has_run(self, x: object) -> bool:
        return isinstance(x, types.FunctionType) and x.__code__ in self._reads.codes

    def _object(self, path: str, x: object) -> _Places:
        is_module, kind = isinstance(x, nn.Module), type(x)
        is_libraries = _is_library(kind.__module__) and not is_module and not isinstance(x, _NAMESPACES)
        if is_libraries or (_table(x) is None and not [*_slots(x)]):
            if not is_libraries or kind.__module__ in ("torch._C", "_io"):
                self.unknown.append(f"{path} ({kind.__qualname__})")
            return self._put(path, x, is_pinned=True)
        self._put(path, x, is_pinned=is_module)
        return self._attributes(path, x)

    def _attributes(self, path: str, x: object) -> _Places:
        """Places within an object, or within a container of the user's class."""
        kind, table = type(x), _table(x)
        if _is_library(kind.__module__) and not isinstance(x, (nn.Module, *_NAMESPACES)):
            return []
        self._check(lambda: (type(x),))
        found: list[tuple[str, object]] = [(f"{path}.__class__", kind)]
        if slots := dict(_slots(x)):
            values = self._check(lambda: [_there(member.__get__, x) for member in slots.values()])
            found += [(f"{path}.{n}", v) for n, v in zip(slots, values, strict=True) if v is not _MISSING]
        if table is None:
            return found
        names: set[str] = self._reads.names.get(id(x), set())
        if kind not in self._reads.kinds or "__dict__" in names:
            self._check(lambda: table)
            names = set(table)
        if isinstance(x, nn.Module):
            found += self._entries(path, x._modules, sorted(names - vars(x).keys()))
            for place, tensors in (("_parameters", x._parameters), ("_buffers", x._buffers)):
                self._tensors(path, tensors, tensors if place in names else sorted(names))
            names = names - {*self._ignored, "_parameters", "_buffers"}
        return [*found, *self._entries(path, table, sorted(names, key=str))]

    def _tensors(self, path: str, table: Mapping[str, torch.Tensor | None], names: Iterable[str]) -> None:
        """Parameters and buffers: calls look for the newest by name, so that others of the same form may come."""
        chosen = [name for name in names if name in table]
        if chosen:
            self._equal([f"{path}.{name}" for name in chosen], lambda: [_form(table.get(name)) for name in chosen])


def _form(x: torch.Tensor | None) -> object:
    """All of a tensor that code may read without its values. Where a parameter is, it may be divided or elsewhere."""
    if x is None:
        return None
    return None if isinstance(x, nn.Parameter) else tuple(x.shape), x.dtype, x.requires_grad


def _values_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _words(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array, by eight where they are so many: NaN is NaN, and it is 60 times as fast as a hash."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat if flat.nbytes % 8 else flat.view(np.int64)


def _key(key: object, place: int) -> str:
    return repr(key) if isinstance(key, _PLAIN) else f"<{type(key).__qualname__} {place}>"


def _there(take: Callable[..., object], *args: object) -> Any:
    """The value that is taken; MISSING of an empty cell or slot, or of an object without a `__dict__`."""
    try:
        return take(*args)
    except (ValueError, AttributeError):
        return _MISSING


def _table(x: object) -> dict[str, object] | None:
    table = _there(object.__getattribute__, x, "__dict__")
    return table if isinstance(table, dict) else None


def _slots(x: object) -> Iterator[tuple[str, Any]]:
    for base in type(x).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and "__slots__" in vars(base):
                yield name, member


@functools.cache
def _is_library(name: str | None) -> bool:
    """Whether a Python module is torch's, numpy's, ours or of the standard library: what it defines is not entered."""
    path = getattr(sys.modules.get(name or ""), "__file__", None)
    if path is None:
        return (name or "").partition(".")[0] in sys.stdlib_module_names and name != "__main__"
    return is_ours(path) or not (is_users(path) or path.startswith("<"))

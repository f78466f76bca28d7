"""Which units of a model are equal: fingerprints of what they compute, parameter values apart.

Equal fingerprints mean equal work. Where that cannot be known (an attribute of an unknown kind) the object's identity
replaces its value: the units are then measured one by one, which costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from logging import Logger
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .reach import closed_over
from .source_line import is_users_module

_PLAIN = (int, float, complex, str, bytes, bool, type(None), PurePath, torch.dtype, torch.device, torch.Size)
_OF_THE_MACHINERY = frozenset(vars(nn.Module()))  # hooks, tables of parameters: looked at by themselves
_MOST = 100_000  # values that are walked


def tensor_form(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, layout, type and whether a gradient is wanted."""
    stride = tensor.stride() if tensor.layout == torch.strided else ()
    return tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad


def module_form(module: nn.Module) -> object:
    """Form of a module with everything in it: classes, plain attributes, hooks, forms of tensors, training flags."""
    return (
        type(module),
        module.training,
        tuple((name, value_form(value)) for name, value in vars(module).items() if name not in _OF_THE_MACHINERY),
        tuple(
            (name, tuple(map(id, value.values())))
            for name, value in vars(module).items()
            if name in _OF_THE_MACHINERY and name.endswith("_hooks") and value
        ),
        tuple((name, None if p is None else tensor_form(p)) for name, p in module._parameters.items()),
        tuple((name, None if b is None else tensor_form(b)) for name, b in module._buffers.items()),
        tuple((name, None if child is None else module_form(child)) for name, child in module._modules.items()),
    )


def value_form(value: object) -> object:
    """Form of any value: equal for equal ones, as far as can be known."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # 1, 1.0 and True are equal, their reprs are not
    if isinstance(value, torch.Tensor):
        return tensor_form(value)
    if isinstance(value, nn.Module):
        return module_form(value)
    if isinstance(value, Mapping):
        return tuple((value_form(key), value_form(each)) for key, each in value.items())
    if isinstance(value, Sequence):
        return type(value), tuple(map(value_form, value))
    return type(value), id(value)


def told_apart(root: nn.Module, code: Mapping[str, object]) -> dict[str, str]:
    """Short texts of each of the user's files, of each module of `root`, and of each object in `code`, by name. Equal
    in all processes that run one script, so that a difference shows where they disagree."""
    files = iter(_users_files())
    texts = {f"file of {name}": content[:8] for name, content in zip(files, files, strict=True)}
    texts |= {f"module {path!r}": _shown(module) for path, module in root.named_modules()}
    return texts | {name: _digest_of(value) or _shown(value) for name, value in code.items()}


def _shown(value: object) -> str:
    users = [vars(kind) for kind in reversed(type(value).__mro__) if is_users_module(kind.__module__)]
    names = {name: held for each in [*users, getattr(value, "__dict__", {})] for name, held in each.items()}
    own = {name: held for name, held in names.items() if name not in _OF_THE_MACHINERY and name[:2] != "__"}
    texts = {name: repr(held) if isinstance(held, _PLAIN) else _digest_of(held) for name, held in own.items()}
    return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in texts.items() if text)})"


def _digest_of(value: object) -> str:
    """A digest of a function or class; of another object nothing, since it may hold what is this process's own."""
    value = getattr(value, "__func__", value)  # of a staticmethod
    if not isinstance(value, type | FunctionType | BuiltinFunctionType | partial):
        return ""
    name = getattr(value, "__qualname__", "partial")
    try:
        return f"{name} {hashlib.sha256(repr([*_words(value, {})]).encode()).hexdigest()[:8]}"
    except ValueError:  # its code is in no file
        return name


def _is_installed_command() -> bool:
    """Whether this process runs no script of the user's."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if path is None:  # a line of code, or a notebook
        return False
    is_entry_point = Path(path).parent == Path(sysconfig.get_path("scripts")) and not Path(path).suffix
    return is_entry_point or not is_users_module("__main__" if spec is None else spec.name)


def _users_files() -> Iterator[str]:
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name == "__main__" and _is_installed_command():
            continue
        if path is not None and is_users_module(name) and Path(path).is_file():
            yield name
            yield hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _words(value: object, seen: dict[int, tuple[int, object]]) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if not isinstance(value, tuple | frozenset):  # equal ones are one object in one process, not in another
        if id(value) in seen:
            yield f"the same as {seen[id(value)][0]}"
            return
        if len(seen) >= _MOST:
            raise ValueError(f"it holds more than {_MOST:,} objects")
        seen[id(value)] = len(seen), value  # kept alive, so that an id stays one object's
    named = value if isinstance(value, type | FunctionType) else type(value)
    yield f"{_source(named.__module__)} {named.__qualname__} ("
    for part in _parts(value):
        yield from _words(part, seen)
    yield ")"


def _source(module: str) -> str:
    """Name of a module, and the version of the library that it is of."""
    top = sys.modules.get(module.partition(".")[0])
    if module != "builtins" and is_users_module(module) and getattr(sys.modules.get(module), "__file__", None) is None:
        raise ValueError(f"{module} has code that is in no file")
    return f"{module} {getattr(top, '__version__', '')}"


def _parts(value: Any) -> Iterable[object]:
    if isinstance(value, torch.Tensor):
        return tensor_form(value)
    if isinstance(value, type | ModuleType | Logger):
        return (getattr(value, "__name__", None),)
    if isinstance(value, FunctionType):
        code, cells = value.__code__, closed_over(value)  # of several lambdas in one function the names are the same
        consts = [each for each in code.co_consts if isinstance(each, _PLAIN)]
        return code.co_code, code.co_names, consts, value.__defaults__, value.__kwdefaults__, vars(value), cells
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, set | frozenset):
        return sorted("\0".join(_words(each, {})) for each in value)
    items = [*value.items()] if isinstance(value, Mapping) else [*value] if isinstance(value, list | tuple) else []
    slots = {
        slot: getattr(value, slot) for base in type(value).__mro__ for slot in _slots(base) if hasattr(value, slot)
    }
    named = {name: each for name, each in (slots | getattr(value, "__dict__", {})).items() if not _is_hash(each, value)}
    held = [*items, *named.items()]
    text = "" if items or named else repr(value)
    return (*held, "" if " at 0x" in text else text)  # an address is another one in each process


def _is_hash(kept: object, value: object) -> bool:
    """Whether a value keeps its own hash there, which is another one in each process."""
    return type(kept) is int and abs(kept) > 1 << 32 and isinstance(value, Hashable) and kept == hash(value)


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)

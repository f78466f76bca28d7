"""Copies of modules that do not use what they were copied from.

copy.deepcopy shares functions: a forward that is a closure, a compiled block, a hook or a loss goes on to read, run and
change the modules that were copied. Here a function that reaches what is copied is made anew, and reaches the copies.

function -- closure, defaults, attributes --+
         -- globals that it names ----------+--> a module, tensor, container or object that is copied
"""

from __future__ import annotations

import copy
import sys
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial, update_wrapper
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from .source_line import content, is_users_module

_OURS = __name__.partition(".")[0]
_MOST = 10_000  # entries of a container that are looked into
_FIXED: tuple[Any, ...] = (bool, int, float, type(None), str, bytes, type, ModuleType, *weakref.ProxyTypes)


class Copies:
    """Copies of some modules, and of what they reach; `memo`: by id, what stands for an original in them."""

    def __init__(self, *roots: object, memo: dict[int, Any] | None = None) -> None:
        self.memo: dict[int, Any] = {} if memo is None else memo
        found = _all(roots, known={}, enters=lambda function: False)
        self._own = {id(x): x for x in found if not isinstance(x, FunctionType | MethodType | partial | tuple)}
        self._others: dict[int, object] = {}  # that reach none of these
        self._cells: dict[int, CellType] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        for x in self._own.values():
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:  # deepcopy refuses what was computed
                self.memo.setdefault(id(x), x.detach().clone())

    def of(self, value: Any) -> Any:
        """Its copy; what copy.deepcopy raises."""
        return self._copied(value, self._deep)

    def instead(self, value: Any) -> Any:
        """What does the same with the copies: itself, or where it reaches what is copied, a copy of as little as can
        be."""
        return self._copied(value, self._again)

    def _copied(self, value: Any, copied: Callable[[Any], Any]) -> Any:
        found = _all([value], known=self.memo, enters=self.reaches)
        made = [(x, self._blank(x)) for x in found if isinstance(x, FunctionType) and self.reaches(x)]
        self.memo |= {id(function): own for function, own in made}
        try:
            other = copied(value)
            for function, own in made:
                self._fill(function, own)
            for module in (x for x in found if isinstance(x, nn.Module) and id(x) in self.memo):
                refs = {key: self._again(x) for key, x in vars(module).items() if type(x) is weakref.ref}
                vars(self.memo[id(module)]).update(refs)
        except BaseException:
            for function, _ in made:  # they are not whole
                self.memo.pop(id(function))
            raise
        return other

    def reaches(self, value: object) -> bool:
        """Whether it is, or knows of, what is copied."""
        return _leads_to(self._own, value, self._others)

    def shared(self, root: nn.Module, loss_fn: object = None) -> str | None:
        """Where copies use the modules or tensors that were copied, in words."""
        theirs = {at: x for at, x in self._own.items() if isinstance(x, nn.Module | torch.Tensor)}
        others: dict[int, object] = {id(module): module for module in root.modules()}
        for name, module in root.named_modules():
            if id(module) in theirs:
                return f"module {name!r}"
            code = {"forward": type(module).forward} if is_users_module(type(module).__module__) else {}
            for key, value in (code | vars(module)).items():
                if key != "_modules" and _leads_to(theirs, value, others):
                    return f"{key!r} of module {name!r}"
        return "loss_fn" if _leads_to(theirs, loss_fn, others) else None

    def _blank(self, function: FunctionType) -> FunctionType:
        cells = tuple(
            self._cells.setdefault(id(cell), CellType()) if any(map(self.reaches, content(cell))) else cell
            for cell in function.__closure__ or ()
        )
        names = function.__globals__
        if any(self.reaches(names[name]) for name in _globals(function)):
            names = self._globals.setdefault(id(names), {**names})
        own = FunctionType(function.__code__, names, closure=cells or None)
        update_wrapper(own, function)
        del own.__wrapped__  # type: ignore[attr-defined]
        return own

    def _fill(self, function: FunctionType, own: FunctionType) -> None:
        for cell, other in zip(function.__closure__ or (), own.__closure__ or (), strict=True):
            if other is not cell:
                (other.cell_contents,) = map(self._again, content(cell))
        if own.__globals__ is not function.__globals__:
            own.__globals__.update({name: self._again(function.__globals__[name]) for name in _globals(function)})
        own.__defaults__ = tuple(map(self._again, function.__defaults__ or ())) or None
        own.__kwdefaults__ = {key: self._again(x) for key, x in (function.__kwdefaults__ or {}).items()} or None
        vars(own).update({key: self._again(x) for key, x in vars(function).items()})

    def _deep(self, value: Any) -> Any:
        return self._again(value) if type(value) is weakref.ref else copy.deepcopy(value, self.memo)

    def _again(self, value: Any) -> Any:
        if not self.reaches(value):
            return value
        if id(value) in self.memo:
            return self.memo[id(value)]
        if type(value) is weakref.ref:
            return weakref.ref(self.memo.get(id(value()), value()))
        if id(value) in self._own:
            return self._deep(value)
        if isinstance(value, partial):
            keywords = {key: self._again(x) for key, x in value.keywords.items()}
            return partial(self._again(value.func), *map(self._again, value.args), **keywords)
        if isinstance(value, MethodType):
            return MethodType(self._again(value.__func__), self._again(value.__self__))
        if type(value) is tuple:
            return tuple(map(self._again, value))
        other = self.memo[id(value)] = copy.copy(value)
        if isinstance(value, list):
            other[:] = map(self._again, value)
        elif isinstance(value, dict):
            other |= {key: self._again(x) for key, x in value.items()}
        elif _held(value):
            vars(other).update({key: self._again(x) for key, x in vars(value).items()})
        return other


def _all(values: Iterable[object], *, known: Collection[int], enters: Callable[[FunctionType], bool]) -> list[object]:
    """These and all that they hold, but for what is known by id; functions hold something where they are entered."""
    seen: dict[int, object] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) not in seen and id(value) not in known and not isinstance(value, _FIXED):
            seen[id(value)] = value
            if not isinstance(value, FunctionType):
                pending += _held(value)
            elif enters(value):
                pending += _known_to(value)
    return list(seen.values())


def _leads_to(wanted: Collection[int], value: object, others: dict[int, object]) -> bool:
    """Whether it is, holds, or knows of one of these, by id; `others` are known not to, and become more."""
    seen: dict[int, object] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        if id(value) in wanted:
            return True
        if id(value) not in seen and id(value) not in others and not isinstance(value, _FIXED):
            seen[id(value)] = value
            pending += _known_to(value) if isinstance(value, FunctionType) else _held(value)
            pending += (value(),) if isinstance(value, weakref.ref) else ()
            pending += (value.__self__,) if isinstance(value, BuiltinMethodType) else ()
    others |= seen
    return False


def _held(value: Any) -> Collection[Any]:
    """The parts that copy.deepcopy copies."""
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return () if len(value) > _MOST else value.values() if isinstance(value, dict) else value
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values(), *vars(value).values()
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    top = type(value).__module__.partition(".")[0]
    is_users = top not in ("torch", _OURS, *sys.stdlib_module_names) or isinstance(value, SimpleNamespace | Namespace)
    return vars(value).values() if isinstance(value, nn.Module) or (is_users and hasattr(value, "__dict__")) else ()


def _known_to(function: FunctionType) -> list[Any]:
    bound = [x for cell in function.__closure__ or () for x in content(cell)]
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    return [*bound, *given, *(function.__globals__[name] for name in _globals(function))]


def _globals(function: FunctionType) -> list[str]:
    """Names of a function of the user's, also in functions within it."""
    if not is_users_module(function.__module__):
        return []
    names: dict[str, None] = {}
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        names |= dict.fromkeys(name for name in code.co_names if name in function.__globals__)
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    return list(names)

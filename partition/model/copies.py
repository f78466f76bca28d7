"""Copies of modules that do not use what they were copied from.

copy.deepcopy shares functions: a forward that is a closure, a compiled block, a hook or a loss still reads, runs and
change the modules that were copied. Here a function is made anew where what it closes over, its defaults, its
attributes or the globals that it names lead to what is copied, and it leads to the copies.
"""

from __future__ import annotations

import copy
import sys
import weakref
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial, update_wrapper
from types import BuiltinMethodType, CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from .reach import USUAL, closed_over, codes, content, parts, walk
from .source_line import is_users_module

_NO_STATE = ("torch", __name__.partition(".")[0], *sys.stdlib_module_names)  # objects of these are not looked into
_TABLES = (dict, OrderedDict, set)


class Copies:
    """Copies of some modules, and of what they reach; `memo`: by id, the copy of each original."""

    def __init__(self, *roots: object, memo: dict[int, Any] | None = None) -> None:
        self.memo: dict[int, Any] = {} if memo is None else memo
        found = [*walk(roots, _held)]
        self._whole = (roots[0], found) if len(roots) == 1 and not self.memo else None  # one root, and all it holds
        self._own = {id(x): x for x in found if not isinstance(x, FunctionType | MethodType | partial | tuple)}
        self._others: dict[int, object] = {}  # that reach none of these
        self._cells: dict[int, CellType] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        for x in self._own.values():
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:  # deepcopy refuses what was computed
                self.memo.setdefault(id(x), x.detach().clone())

    def of(self, value: Any) -> Any:
        """A copy of the value. Raises what copy.deepcopy raises."""
        return self._copied(value, self._deep)

    def instead(self, value: Any) -> Any:
        """An object that does the same with the copies: itself, or where it reaches what is copied, a copy of as little
        as can be."""
        return self._copied(value, self._again)

    def _copied(self, value: Any, copied: Callable[[Any], Any]) -> Any:
        found = self._whole[1] if self._whole and self._whole[0] is value else []
        if not found or any(isinstance(x, FunctionType) and self.reaches(x) for x in found):  # which lead further
            found = [*walk([value], self._held, self.memo)]
        for module in (x for x in found if isinstance(x, nn.Module)):  # slow in deepcopy, and most are empty
            empty = (x for x in vars(module).values() if type(x) is OrderedDict and not x and not vars(x))
            self.memo |= {id(x): OrderedDict() for x in empty if id(x) not in self.memo}
        made = [(x, self._blank(x)) for x in found if isinstance(x, FunctionType) and self.reaches(x)]
        self.memo |= {id(function): own for function, own in made}
        try:
            other = copied(value)
            for function, own in made:
                self._fill(function, own)
            for module in (x for x in found if isinstance(x, nn.Module) and id(x) in self.memo):
                refs = {key: x for key, x in vars(module).items() if type(x) is weakref.ref}
                vars(self.memo[id(module)]).update(self._each(refs))
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
                is_fixed = type(value) in USUAL or (type(value) in _TABLES and not value)  # most of them: no hooks
                if key != "_modules" and not is_fixed and _leads_to(theirs, value, others):
                    return f"{key!r} of module {name!r}"
        return "loss_fn" if _leads_to(theirs, loss_fn, others) else None

    def _held(self, value: Any) -> Collection[Any]:
        if isinstance(value, FunctionType):
            return _known_to(value) if self.reaches(value) else ()
        return _held(value)

    def _blank(self, function: FunctionType) -> FunctionType:
        cells = tuple(
            self._cells.setdefault(id(cell), CellType()) if any(map(self.reaches, content(cell))) else cell
            for cell in function.__closure__ or ()
        )
        names = function.__globals__
        if any(map(self.reaches, _globals(function).values())):
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
            own.__globals__.update(self._each(_globals(function)))
        own.__defaults__ = tuple(map(self._again, function.__defaults__ or ())) or None
        own.__kwdefaults__ = self._each(function.__kwdefaults__ or {}) or None
        vars(own).update(self._each(vars(function)))

    def _each(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._again(x) for key, x in values.items()}

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
            return partial(self._again(value.func), *map(self._again, value.args), **self._each(value.keywords))
        if isinstance(value, MethodType):
            return MethodType(self._again(value.__func__), self._again(value.__self__))
        if type(value) is tuple:
            return tuple(map(self._again, value))
        other = self.memo[id(value)] = copy.copy(value)
        if isinstance(value, list):
            other[:] = map(self._again, value)
        elif isinstance(value, dict):
            other |= self._each(value)
        elif _held(value):
            vars(other).update(self._each(vars(value)))
        return other


def _leads_to(wanted: Collection[int], value: object, others: dict[int, object]) -> bool:
    """Whether it is, holds, or knows of one of these, by id; `others` are known not to, and become more."""
    seen: dict[int, object] = {}
    for each in walk([value], _known_to, others):
        if id(each) in wanted:
            return True
        seen[id(each)] = each
    others |= seen
    return False


def _held(value: Any) -> Collection[Any]:
    """The parts that copy.deepcopy copies."""
    if (held := parts(value)) is not None:
        return held
    is_entered = isinstance(value, nn.Module | SimpleNamespace | Namespace)
    is_entered = is_entered or type(value).__module__.partition(".")[0] not in _NO_STATE
    return vars(value).values() if is_entered and hasattr(value, "__dict__") else ()


def _known_to(value: Any) -> Collection[Any]:
    """The same, and what functions and weak references lead to."""
    if isinstance(value, FunctionType):
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values())
        return *closed_over(value), *given, *_globals(value).values()
    if isinstance(value, weakref.ref):
        return (value(),)
    return (value.__self__,) if isinstance(value, BuiltinMethodType) else _held(value)


def _globals(function: FunctionType) -> dict[str, Any]:
    """Globals that a function of the user's, or a function within it, names."""
    if not is_users_module(function.__module__):
        return {}
    names = dict.fromkeys(name for code in codes(function.__code__) for name in code.co_names)
    return {name: function.__globals__[name] for name in names if name in function.__globals__}

"""Changes that the code between the units makes around their calls: they hold again whenever a stage runs the unit; and
side effects that it leaves: once, while the model is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.profiler import record_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..reach import closed_over
from ..surroundings import MISSING, Changed, Setting, Surroundings
from .reads import CodeReads
from .refusals import RefusedError

_DEEP = 3  # objects within objects


class AroundCalls:
    """Settings of calls, and side effects, of one forward."""

    def __init__(self, surroundings: Surroundings, reads: CodeReads) -> None:
        self.apart = surroundings.apart
        self._surroundings, self._reads = surroundings, reads
        self._hooks = _saved_tensor_hooks()
        self._modes: set[int] = set()  # around the model

    def begin(self) -> None:
        self._modes = {id(mode) for mode in _modes_of_torch()}

    @property
    def saves_by_hooks(self) -> bool:
        return _saved_tensor_hooks() != self._hooks

    def settings(self, unit: str | None) -> tuple[Setting, ...]:
        """Changes around a call of a unit; of a function, torch's settings alone. A unit that finds a tensor
        of this forward there is refused when it takes it."""
        if unit is None:
            return tuple(each.setting for each in self._surroundings.changes(1))
        found = []
        for change in self._surroundings.changes():
            if not any(isinstance(leaf, torch.Tensor) for leaf in change.leaves):
                if has_fake(change.leaves):
                    raise RefusedError(f"{change.name}, which holds tensors of this forward, is set around {unit}")
                found.append(change.setting)
        found += [Setting("record_function", name, partial(record_function, *name)) for name in self._reads.regions]
        for mode in _modes_of_torch():
            if id(mode) not in self._modes:
                found.append(Setting(f"a {type(mode).__name__}", None, partial(_same, mode)))
                if has_fake(vars(mode).values()):
                    raise RefusedError(f"{found[-1].name} that holds tensors of this forward is entered around {unit}")
        return tuple(found)

    def effects(self, follows: Callable[[object], bool]) -> list[str]:
        """Entries that stay changed. `follows`: whether a value follows from the batch or parameters. A tensor that
        does not is a cache; a new entry of a dict and a new context variable are no effects either."""

        def is_effect(change: Changed) -> bool:
            if any(isinstance(leaf, torch.Tensor) for leaf in change.leaves):
                return follows(change.leaves)
            return change.before is not MISSING or not (change.table.is_dict or isinstance(change.key, ContextVar))

        found = [each for each in self._surroundings.changes() if is_effect(each)]
        names = [f"{each.table.name if each.table.is_dict else each.name}{each.line}" for each in found]
        return list(dict.fromkeys(names))


def has_fake(values: Iterable[object], deep: int = _DEEP) -> bool:
    """Whether there is a fake tensor among these, or in an attribute of one."""
    for leaf in pytree.tree_leaves(list(values)):
        if isinstance(leaf, FakeTensor):
            return True
        inner = getattr(leaf, "__dict__", None) if deep and not isinstance(leaf, nn.Module | type) else None
        if isinstance(inner, dict) and not callable(leaf) and has_fake(inner.values(), deep - 1):
            return True
    return False


def refuse_fakes_in_closures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(has_fake(closed_over(value), 0) for value in pytree.tree_leaves((args, kwargs))):
        raise RefusedError("a function that is passed on closes over a tensor of this forward")


def _same(mode: Any) -> Any:
    return mode


def _modes_of_torch() -> list[Any]:
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # type: ignore[no-untyped-call]


def _saved_tensor_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)

"""Who made which tensor while a forward is recorded, and what units work on that nobody passed to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..memory import memory_of
from .draws import Draws
from .values import RefusedError

_GLUE = -1  # who made a tensor, where it was no unit


class Owners:
    """The unit's call in which each tensor came to be.

    Arguments:
        draws: told of operations that draw.
        is_models: whether a tensor is a parameter or buffer of the model.
        join: called with two calls, of which the second works on what the first made and did not return.
    """

    def __init__(
        self, draws: Draws, *, is_models: Callable[[torch.Tensor], bool], join: Callable[[int, int, str], None]
    ) -> None:
        self._draws, self._is_models, self._join = draws, is_models, join
        self._owner: dict[int, int] = {}  # by id of the tensor
        self._names: dict[int, str] = {}  # of units, by call
        self._kept: list[object] = []  # an id stays one object's
        self._unit: int | None = None  # call of the unit that is under way
        self._passed: set[int] = set()  # ids of what it was given
        self._passed_memory: set[object] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within: every operation is seen."""
        with _Operations(self._operation):
            yield

    @contextmanager
    def within_unit(
        self, call: int, name: str, given: Sequence[torch.Tensor], ids_in_states: set[int]
    ) -> Iterator[None]:
        """Within, a unit runs, which was given these tensors, and those with these ids in objects."""
        self._unit, self._names[call] = call, name
        self._passed = {id(x) for x in given} | ids_in_states
        self._passed_memory = {memory_of(x) for x in given} - {None}
        try:
            yield
        finally:
            self._unit = None

    def came_from_outside(self, tensor: torch.Tensor) -> None:
        """An input."""
        self._owner[id(tensor)] = _GLUE

    def what(self, tensor: torch.Tensor) -> str:
        """A tensor in words."""
        owner = self._owner.get(id(tensor), _GLUE)
        shape = f"a tensor of shape {tuple(tensor.shape)}"
        if owner >= 0:
            return f"{shape} that {self._names[owner]} made and did not return"
        return f"{shape} that was not made by a public function of torch (vmap, for example)"

    def _operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._draws.drew = True
        unit = self._unit
        if unit is not None:
            for leaf in _leaves(function, (args, kwargs)):
                if isinstance(leaf, FakeTensor) and id(leaf) not in self._passed:
                    self._look_at(leaf, unit)
        result = function(*args, **kwargs)
        for leaf in _leaves(function, result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._owner:
                self._owner[id(leaf)] = _GLUE if unit is None else unit
                self._kept.append(leaf)
        return result

    def _look_at(self, tensor: torch.Tensor, unit: int) -> None:
        """A tensor that a unit works on and that it was not given."""
        owner = self._owner.get(id(tensor))
        if owner is None or owner == unit or self._is_models(tensor) or memory_of(tensor) in self._passed_memory:
            return
        if owner == _GLUE:
            raise RefusedError(
                f"{self._names[unit]} takes a tensor of shape {tuple(tensor.shape)} that the code around it made, and "
                f"that is none of its arguments (it lies in an attribute or an object)"
            )
        self._join(owner, unit, f"{self._names[unit]} reads what {self._names[owner]} left in an object")


def _leaves(function: Any, value: Any) -> Iterable[Any]:
    """The parts of an operation's arguments or results: those of all but higher-order ones are lists at most."""
    return _flat(value) if isinstance(function, torch._ops.OpOverload) else pytree.tree_leaves(value)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._tell(func, args, kwargs or {})

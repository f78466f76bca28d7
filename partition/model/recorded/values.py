"""Tensors of a forward that is being recorded: values by number, arguments in terms of them, who made which tensor, and
under which number each call is seeded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..caches import Caches, draws, flat
from ..memory import Operations, memory_of
from ..untouched import python_and_numpy
from .calls import DRAWS
from .refusals import RefusedError
from .templates import Constant, MadeObject, Ref, Slot, Template, is_fixed, make_template, walk


class Values:
    """Which value a tensor is now: another one after each change in place.

    Arguments:
        model: whose parameters and buffers are no values, but entries of its modules' tables.
        owners: make the error for what is done with a tensor.
        on_object: called with each object that the forward made, where it is first passed on.
    """

    def __init__(self, model: nn.Module, *, owners: Owners, on_object: Callable[[object], None]) -> None:
        self._owners, self._on_object = owners, on_object
        self._attributes = {id(value) for module in model.modules() for value in vars(module).values()}
        # entries of these tables, by id of what was there before the forward
        self.slots = {
            id(value): Slot(module, table, key)
            for module in model.modules()
            for table in ("_parameters", "_buffers")
            for key, value in vars(module)[table].items()
            if value is not None
        }
        self.slot_memory = {memory_of(slot.tensor()) for slot in self.slots.values()} - {None}  # all memory of these
        self.made_by: list[int] = []  # call, by value number; -1: an input
        self.bytes_of: dict[int, float] = {}  # by value number [bytes]; infinite where the size follows from values
        self.last_write: dict[object, int] = {}  # memory -> the call that changed it last
        self._number: dict[int, int] = {}  # of the value that a tensor is now, by id
        self._grad_fn: dict[int, object] = {}
        self._over: dict[object, list[int]] = {}  # memory -> numbers of the values over it
        self._states: dict[int, MadeObject] = {}
        self._opened_states: list[int] = []  # being looked into, outermost first
        self._kept: list[object] = []  # an id stays one object's

    def new(self, tensor: torch.Tensor, *, call: int, is_sized: bool = False) -> int:
        """A number for a tensor, whose size follows from values or not."""
        number = len(self.made_by)
        self.made_by.append(call)
        self._number[id(tensor)] = number
        self._grad_fn[id(tensor)] = tensor.grad_fn
        self._kept.append(tensor)
        size = tensor.nbytes if tensor.layout == torch.strided else tensor.numel() * 8
        self.bytes_of[number] = math.inf if is_sized else float(size)
        memory = memory_of(tensor)
        if memory is not None:
            self._over.setdefault(memory, []).append(number)
        return number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The value that a tensor is now; None for a parameter, a buffer and tensors that no call returned."""
        return self._number.get(id(tensor))

    def numbers_in(self, value: object) -> list[int]:
        found = (self.number_of(x) for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))
        return [number for number in found if number is not None]

    def is_sized(self, value: object) -> bool:
        """Whether a size of a tensor in it follows from values."""
        return any(self.bytes_of[number] == math.inf for number in self.numbers_in(value))

    def over(self, memory: object) -> Sequence[int]:
        return self._over.get(memory, ())

    def templates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Template, Template]:
        """Templates of the arguments of a call; RefusedError for tensors that no stage could have."""
        return make_template(args, self._leaf), make_template(kwargs, self._leaf)

    def tensor(self, tensor: torch.Tensor) -> Template:
        known = self.number_of(tensor)
        if known is not None:
            if tensor.grad_fn is not self._grad_fn[id(tensor)] and memory_of(tensor) not in self.last_write:
                raise self._owners.refuse(tensor, "has got another history")
            return Ref(known)
        if id(tensor) in self.slots:
            return self.slots[id(tensor)]
        is_fake = isinstance(tensor, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if is_fake or self._owners.is_units(tensor):
            raise self._owners.refuse(tensor, "is used")
        return Constant(tensor)

    def ids_in_states(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Ids of the tensors that objects among the arguments had when they were first seen."""
        states = [self._states.get(id(value)) for value in pytree.tree_leaves((args, kwargs))]
        numbers = {each.number for state in states if state for each in walk(state) if isinstance(each, Ref)}
        return {key for key, number in self._number.items() if number in numbers}

    def _leaf(self, value: object) -> Template:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if is_fixed(value) or id(value) in self._attributes or not hasattr(value, "__dict__"):
            return Constant(value)
        if id(value) not in self._states:
            if id(value) in self._opened_states:
                raise RefusedError(f"a {type(value).__name__}, passed to a module, holds itself")
            self._opened_states.append(id(value))
            self._kept.append(value)
            attributes = {key: make_template(each, self._leaf) for key, each in vars(value).items()}
            kind: Any = next((kind for kind in (dict, list) if isinstance(value, kind)), None)
            items = None if kind is None else make_template(kind(value), self._leaf)
            self._opened_states.pop()
            self._states[id(value)] = MadeObject(len(self._states), type(value), attributes, items)
            self._on_object(value)
        return self._states[id(value)]


_GLUE = -1  # who made a tensor, where it was no unit


class Owners:
    """The unit's call in which each tensor came to be.

    Arguments:
        on_draw: called where an operation draws.
        units: by path.
        is_models: whether a tensor is a parameter or buffer of the model.
        join: called with two calls, of which the second works on what the first made and did not return.
    """

    def __init__(
        self,
        on_draw: Callable[[], None],
        units: Mapping[str, nn.Module],
        *,
        is_models: Callable[[torch.Tensor], bool],
        join: Callable[[int, int, str], None],
    ) -> None:
        self._on_draw, self._is_models, self._join = on_draw, is_models, join
        self._owner: dict[int, int] = {}  # by id of the tensor
        self._names: dict[int, str] = {}  # of units, by call
        self._kept: list[object] = []  # an id stays one object's
        self._unit: int | None = None  # call of the unit that is under way
        self._passed: set[int] = set()  # ids of what it was given
        self._passed_memory: set[object] = set()
        self._units, self._caches = units, Caches()

    def watching(self) -> Operations:
        return Operations(self._operation)

    @contextmanager
    def within_unit(
        self, call: int, name: str, given: Sequence[torch.Tensor], ids_in_states: set[int]
    ) -> Iterator[None]:
        self._unit, self._names[call] = call, name
        self._passed = {id(x) for x in given} | ids_in_states
        self._passed_memory = {memory_of(x) for x in given} - {None}
        try:
            yield
        finally:
            self._unit = None

    def came_from_outside(self, tensor: torch.Tensor) -> None:
        self._owner[id(tensor)] = _GLUE

    def is_units(self, tensor: torch.Tensor) -> bool:
        """Whether a unit made it; on made-up values, where it is no fake."""
        return self._owner.get(id(tensor), _GLUE) != _GLUE

    def refuse(self, tensor: torch.Tensor, what: str) -> RefusedError:
        """The error for a use (`what`, such as "is used") of a tensor that is not the result of a recorded call."""
        unit = self._names.get(self._owner.get(id(tensor), _GLUE))
        maker = (
            f"{unit} made and did not return"
            if unit
            else "was not made by a public function of torch (vmap, for example)"
        )
        return RefusedError(f"a tensor of shape {tuple(tensor.shape)} that {maker} {what}", unit=unit)

    def _operation(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if draws(function):
            self._on_draw()
        unit = self._unit
        if unit is not None:
            for leaf in _leaves(function, (args, kwargs)):
                if isinstance(leaf, FakeTensor) and id(leaf) not in self._passed:
                    self._look_at(leaf, unit)
        result = function(*args, **kwargs)
        if unit is not None:
            self._caches.note(function, args, kwargs, result)
        for leaf in _leaves(function, result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._owner:
                self._owner[id(leaf)] = _GLUE if unit is None else unit
                self._kept.append(leaf)
        return result

    def _look_at(self, tensor: torch.Tensor, unit: int) -> None:
        owner = self._owner.get(id(tensor))
        if owner is None or owner == unit or self._is_models(tensor) or memory_of(tensor) in self._passed_memory:
            return
        if owner == _GLUE:
            raise RefusedError(
                f"{self._names[unit]} takes a tensor of shape {tuple(tensor.shape)} that the code around it made, and "
                f"that is none of its arguments (it lies in an attribute or an object)"
            )
        if not self._caches.makes(self._units[self._names[unit].partition("#")[0]], tensor):
            self._join(owner, unit, f"{self._names[unit]} reads what {self._names[owner]} left in an object")


def _leaves(function: Any, value: Any) -> Iterable[Any]:
    """The parts of an operation's arguments or results: those of all but higher-order ones are lists at most."""
    return flat(value) if isinstance(function, torch._ops.OpOverload) else pytree.tree_leaves(value)


class Draws:
    """Numbers of what may draw, in the order of calls. `join`: called with two calls that draw numbers of one unit."""

    def __init__(self, join: Callable[[int, int, str], None]) -> None:
        self.drew = False  # whether torch's generators were drawn from since it was last set to False
        self._join = join
        self._count = 0
        self._whole: int | None = None  # number of the unit that was opened and is under way
        self._drawing: list[int] = []  # calls in it that have drawn
        self._generators = python_and_numpy()

    def note(self) -> None:
        self.drew = True

    @contextmanager
    def whole_unit(self) -> Iterator[None]:
        """Within, a unit that was opened runs: the calls in it draw its numbers."""
        if self._whole is not None:
            yield
            return
        self._whole, self._count, self._drawing = self._count, self._count + 1, []
        yield
        self._whole = None

    def number(self, call: int) -> int:
        """The number of a call that may draw; `drew` says whether it did."""
        if self._whole is None:
            self._count += 1
            return self._count - 1
        number = self._whole + (len(self._drawing) << DRAWS)
        if self.drew:
            for before in self._drawing[-1:]:
                self._join(before, call, "both draw random numbers of one unit")
            self._drawing.append(call)
        return number

    def settle(self) -> None:
        """A call is through, which may have drawn from Python's and numpy's generators."""
        self._generators = python_and_numpy()

    def check(self) -> None:
        """RefusedError where the code between the calls has drawn from them."""
        if python_and_numpy() != self._generators:
            raise RefusedError("the code between the modules draws from Python's or numpy's random generator")

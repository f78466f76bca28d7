"""Running user code without a trace: shape inference, the profiler and `verify` run a model outside its training.

Afterwards tables, attributes, lists, dicts, sets, arrays and objects of the user's own hold what they held, by identity
and in order; functions close over it, and find it in globals; buffers and other tensors have the values that they had;
random generators keep their state. Objects of libraries (a logger, a SummaryWriter) have lives of their own and
are left alone. Parameters stay the same objects; their values are not kept.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from operator import is_
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree

from .reach import MOST, USUAL, content, parts, walk
from .source_line import is_users_module
from .surroundings import Surroundings

_NUMBERS = bool | int | float | None
_TABLES = (dict, list, deque, set)
Places = list[tuple[dict[Any, Any] | list[Any], Any]]


@contextmanager
def untouched(*roots: object, device: torch.device | None, buffers: bool = True) -> Iterator[StateSnapshot]:
    """Within: these modules and functions may run; afterwards they, and the random generators, are as they were.
    `device`: of the run, whose generator counts, and the CPU's; None: all in use. `buffers`: whether their values are
    kept; not needed where others replace them."""
    kept = StateSnapshot(roots, device=device, buffers=buffers)
    try:
        with kept.surroundings.kept():
            yield kept
    finally:
        kept.restore()


class StateSnapshot:
    """All that some modules or functions reach, and the random generators, as they are when this is made."""

    def __init__(self, roots: Collection[object], *, device: torch.device | None, buffers: bool = True) -> None:
        self._undo: list[Callable[[], object]] = [_generators(device)]
        self._tables: list[tuple[Any, list[Any]]] = []
        modules = [root for root in roots if isinstance(root, nn.Module) and not buffers]
        self._seen = [*walk(roots, self._held, {id(buffer) for module in modules for buffer in module.buffers()})]

    @property
    def kinds(self) -> set[type]:
        """Classes of the modules and the user's objects among it."""
        return {type(value) for value in self._seen if _is_entered(value) and not isinstance(value, torch.Tensor)}

    @cached_property
    def surroundings(self) -> Surroundings:
        """The state that the code of all classes and functions here finds around it."""
        return Surroundings(self.kinds, [value for value in self._seen if isinstance(value, FunctionType)])

    def new_tensors(self) -> Places:
        """Where a tensor is that was not there: (dict, its key), (list, None)."""
        found: Places = []
        for held, before in self._tables:
            if held and isinstance(held, dict):
                known = dict(_pairs(before))
                found += [(held, key) for key, new in held.items() if new is not known.get(key) and _has_tensor(new)]
            elif isinstance(held, list):
                found += [(held, None)] * any(_has_tensor(new) for new in held[len(before) :])
        return found

    def begin_again(self) -> None:
        """Within `untouched`, make all as it was at its start, for one more run."""
        self.surroundings.again()
        self.restore()

    def restore(self) -> None:
        for undo in self._undo:
            undo()
        for held, before in self._tables:
            now = _entries(held) if held else []
            if len(now) != len(before) or not all(map(is_, now, before)):
                held.clear()
                for key, each in _pairs(before) if isinstance(held, dict) else ():
                    held[key] = each  # a Counter's update would count
                if not isinstance(held, dict):
                    (held.update if isinstance(held, set) else held.extend)(before)

    def _held(self, value: Any) -> Collection[Any]:
        """The parts of a value, to be visited next; its present state is noted first."""
        if isinstance(value, dict):  # most of what modules hold: tables of hooks
            self._tables.append((value, [*value, *value.values()]))
            values = [x for x in value.values() if type(x) not in USUAL]
            self._tables += [(x, []) for x in values if isinstance(x, dict) and not x]
            values = [x for x in values if not isinstance(x, dict) or x]
            return () if len(value) > MOST else values
        if isinstance(value, _TABLES):
            self._tables.append((value, _entries(value)))
        elif undo := _undo_of(value):
            self._undo += undo
        if (held := parts(value)) is not None:
            return held
        if isinstance(value, FunctionType):
            return self._held_by_function(value) if is_users_module(value.__module__) else ()
        return (vars(value),) if _is_entered(value) else ()

    def _held_by_function(self, function: FunctionType) -> Collection[object]:
        held: list[object] = [function.__defaults__, function.__kwdefaults__, vars(function)]
        for cell in function.__closure__ or ():
            bound = content(cell)
            self._undo.append(partial(_restore_cell, cell, bound))
            held += bound
        names = function.__globals__
        for name in names.keys() & {*function.__code__.co_names}:
            if isinstance(names[name], _NUMBERS):
                self._undo.append(partial(names.__setitem__, name, names[name]))
            elif isinstance(names[name], (*_TABLES, np.ndarray)):
                held.append(names[name])
        return held


def _is_entered(value: object) -> bool:
    return isinstance(value, nn.Module) or (hasattr(value, "__dict__") and is_users_module(type(value).__module__))


def _has_tensor(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _entries(table: Any) -> list[Any]:
    """Elements; of a dict its keys, then its values."""
    return [*table, *table.values()] if isinstance(table, dict) else [*table]


def _pairs(entries: list[Any]) -> Iterable[tuple[Any, Any]]:
    half = len(entries) // 2
    return zip(entries[:half], entries[half:], strict=True)


def _restore_cell(cell: CellType, bound: Collection[object]) -> None:
    if bound:
        (cell.cell_contents,) = bound
    elif content(cell):
        del cell.cell_contents


def _undo_tensor(tensor: torch.Tensor) -> Callable[[], None] | None:
    """Nothing for what user code that runs here does not write to, and for what has no values."""
    is_plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    if not is_plain or isinstance(tensor, nn.Parameter | FakeTensor):
        return None
    with unset_fake_temporarily():
        return partial(_restore_tensor, tensor, tensor.detach().clone())


def _restore_tensor(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with unset_fake_temporarily(), torch.no_grad():
        now = tensor.detach()
        is_same = (now == value) | (now.isnan() & value.isnan())
        if not bool(is_same.all()):  # one that was expanded cannot be written
            now.data.copy_(value)


# What puts back a value of a kind: made now, called afterwards.
_Making = Callable[[Any], Callable[[], object] | None]
_UNDO: tuple[tuple[type, _Making], ...] = (
    (torch.Tensor, _undo_tensor),
    (np.ndarray, lambda array: partial(np.copyto, array, array.copy()) if array.flags.writeable else None),
    (random.Random, lambda generator: partial(generator.setstate, generator.getstate())),
    (np.random.RandomState, lambda generator: partial(generator.set_state, generator.get_state())),
    (np.random.Generator, lambda one: partial(setattr, one.bit_generator, "state", one.bit_generator.state)),
    (torch.Generator, lambda generator: partial(generator.set_state, generator.get_state())),
)


# By kind, since a model has many objects of few, and all are looked through each time that a stage runs.
_undo_by_kind: WeakKeyDictionary[Any, list[_Making]] = WeakKeyDictionary()


def _undo_of(value: Any) -> list[Callable[[], object]]:
    kind = type(value)
    if (known := _undo_by_kind.get(kind)) is None:
        known = _undo_by_kind[kind] = [undo for base, undo in _UNDO if issubclass(kind, base)]
    return [undo for make in known if (undo := make(value)) is not None]


def torch_generators(device: torch.device | None) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device is None:
        generators += torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    elif device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def _generators(device: torch.device | None) -> Callable[[], None]:
    """Puts all generators, those of the CPU and of the device, back to their current state."""
    states = [(generator, generator.get_state()) for generator in torch_generators(device)]
    python, numpy = random.getstate(), np.random.get_state(legacy=False)

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)

    return restore


def python_and_numpy() -> tuple[object, ...]:
    """State of Python's and numpy's generators: equal until a number is drawn."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["pos"], state["state"]["key"].tobytes()

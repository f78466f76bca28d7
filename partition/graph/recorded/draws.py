"""Random numbers in a forward that is being recorded: under which number each call is seeded, and decisions of the code
between the units on numbers that it drew itself, such as which layer to leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from ..untouched import python_and_numpy
from .calls import DRAWS, Call, GlueCall
from .templates import Constant, Parts, Ref, Slot, State, Template
from .values import RefusedError


class Draws:
    """Numbers of what may draw, in the order of the calls.

    Arguments:
        join: called with two calls that draw numbers of one unit.

    Attributes:
        drew: whether torch's generators were drawn from since it was last set to False.
    """

    def __init__(self, join: Callable[[int, int, str], None]) -> None:
        self.drew = False
        self._join = join
        self._count = 0
        self._whole: int | None = None  # number of the unit that was opened and is under way
        self._drawing: list[int] = []  # calls in it that have drawn
        self._generators = python_and_numpy()

    def note(self) -> None:
        """An operation has drawn from torch's."""
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


# What Python calls to read a tensor's value.
READS = {getattr(torch.Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item")}
_SAMPLES = 64


def calls_behind(number: int, made_by: Sequence[int], calls: Sequence[Call]) -> list[GlueCall] | None:
    """The calls that make a value, in order; None where they take an input, a parameter or a unit's value.

    Arguments:
        number: of the value.
        made_by: call, by value number; -1: an input.
    """
    found: dict[int, GlueCall] = {}
    todo = [made_by[number]]
    while todo:
        at = todo.pop()
        call = calls[at] if at >= 0 else None
        if not isinstance(call, GlueCall) or call.changed or call.writes or call.is_effect:
            return None
        if at in found:
            continue
        found[at] = call
        for each in call.templates():
            if isinstance(each, Slot | State):
                return None
            if isinstance(each, Ref):
                todo.append(made_by[each.number])
    return [found[at] for at in sorted(found)]


def samples_of(number: int, calls: Sequence[GlueCall], read: Callable[[Any], object]) -> list[object]:
    """Readings of a value that these calls make, of real tensors: one where none of them draws random numbers."""
    samples = []
    for _ in range(_SAMPLES if any(call.is_random for call in calls) else 1):
        values: dict[int, Any] = {}
        with unset_fake_temporarily():
            for call in calls:
                result = call.function(*_filled(call.args, values), **_filled(call.kwargs, values))
                leaves = pytree.tree_leaves(result)
                values |= {value: leaves[place] for place, value in call.results.items()}
            samples.append(read(values[number]))
    return samples


def _filled(template: Template, values: Mapping[int, Any]) -> Any:
    """Arguments with values in the places of references."""
    if isinstance(template, Ref):
        return values[template.number]
    if isinstance(template, Constant):
        return template.value
    assert isinstance(template, Parts)
    parts = [_filled(each, values) for each in template.parts]
    if template.kind is dict:
        return dict(zip(template.keys, parts, strict=True))
    if template.kind is slice:
        return slice(*parts)
    if template.kind is None:
        assert template.spec is not None
        return pytree.tree_unflatten(parts, template.spec)
    return template.kind(parts)

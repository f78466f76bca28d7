"""A record of one forward: calls of units, and of torch's functions between them, in order; what follows from what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree

from ..forms import Form
from ..made_up import is_made_up
from ..surroundings import Setting
from ..units import Together
from .reads import CodeReads
from .templates import Constant, MadeObject, Parts, Ref, Slot, Template, walk

_KINDS = ("cpu", "cuda")


class Context(NamedTuple):
    """Modes of a moment, or those in which a call was made where they differ from those around the model."""

    grad: bool | None = None  # whether a graph is built; None: as around the model
    autocast: tuple[tuple[str, torch.dtype | None], ...] = ()  # (kind of device, type or None for no autocast)
    settings: tuple[Setting, ...] = ()  # what else the code between the units has changed around it

    @classmethod
    def now(cls) -> Context:
        kinds = [(kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in _KINDS]
        return cls(torch.is_grad_enabled(), tuple(kinds))

    def differing(self, around: Context) -> Context:
        autocast = tuple(mine for mine, other in zip(self.autocast, around.autocast, strict=True) if mine != other)
        return Context(None if self.grad == around.grad else self.grad, autocast, self.settings)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Region:
    """Calls that ran within one torch.utils.checkpoint.checkpoint, with these options."""

    options: Mapping[str, Any]


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """Fields that both kinds of calls have."""

    args: Parts  # a tuple
    kwargs: Parts  # a dict
    context: Context
    region: Region | None
    line: str  # of the user's code
    # number of the value at each place among the leaves of what it returned, where that is a tensor
    results: dict[int, int]
    structure: pytree.TreeSpec  # of what it returned
    changed: dict[int, int]  # number of a value that it changed in place -> that of the changed value
    # its number for random numbers; None: it draws none, or has none of its own. Calls within a unit that was opened
    # have the unit's, and in the upper half how many of them have drawn before.
    enters: int | None = None
    # earlier calls that must have been made because they change memory that this one reads
    follows: frozenset[int] = frozenset()
    writes: bool = False  # whether it writes to memory of a parameter or buffer

    def templates(self) -> list[Template]:
        return [*walk(self.args), *walk(self.kwargs)]

    def made(self) -> list[int]:
        return [*self.results.values(), *self.changed.values()]


DRAWS = 32  # bits of a unit's number


@dataclass(slots=True, eq=False, kw_only=True)
class UnitCall(Call):
    """A call of a module that is not looked into."""

    name: str  # its path in the model, with "#2" where it runs again
    module: nn.Module
    keeps_state: bool = False  # whether it has set attributes or buffers of its modules


@dataclass(slots=True, eq=False, kw_only=True)
class GlueCall(Call):
    """A call of a public function of torch; an effect is made for what it does to a value, such as a hook."""

    function: Callable[..., Any]
    is_random: bool
    is_effect: bool


@dataclass(frozen=True, slots=True)
class Store:
    """The assignment of a new tensor to a buffer, as a function of it and of the one before."""

    module: nn.Module
    key: str

    def __call__(self, value: torch.Tensor, before: torch.Tensor) -> None:
        self.module._buffers[self.key] = value


@dataclass(frozen=True, slots=True)
class DecisionGuard:
    """A decision of the code between the units on a tensor's value, as a function of that tensor: what Python read of
    it was as expected in every sample that was drawn, or must be, since the code raises an error otherwise."""

    read: Callable[..., object]
    expected: object
    line: str
    is_check: bool = False

    def __call__(self, *read: Any) -> None:
        """ValueError where it comes out otherwise. Fake tensors and made-up ones have no values."""
        if isinstance(read[0], FakeTensor) or is_made_up() or self.read(*read) == self.expected:
            return
        if self.is_check:
            raise ValueError(f"the check{self.line} fails: expected a batch for which it is {self.expected!r}")
        raise ValueError(
            f"a decision that is drawn between the modules{self.line} came out as {not self.expected!r}, and as "
            f"{self.expected!r} when the model was recorded: expected it within a module of its own, such as the "
            f"layer that is left out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One forward of a model in one mode, for inputs of one form, which are values 0, 1, ..."""

    calls: tuple[UnitCall | GlueCall, ...]  # in order
    results: tuple[Template, ...]  # flat outputs that are tensors
    output_form: Form  # of the model
    # by value number [bytes]; infinite where the size follows from values, so that no stage could say it
    bytes_of: Mapping[int, float]
    together: tuple[tuple[int, int, str], ...]  # pairs of calls that no cut may separate, and why
    reads: CodeReads
    written_inputs: frozenset[int]  # that a call changes in place
    handed_on: Together = ()  # units of which the second works on a tensor that the first left in an object
    # position of each in `calls`, in the order in which they ran; none: that is their order
    as_run: tuple[int, ...] = ()


def calls_behind(number: int, made_by: Sequence[int], calls: Sequence[Call]) -> list[GlueCall] | None:
    """The calls that make a value, in order; None where they take an input, a parameter or a unit's value."""
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
            if isinstance(each, Slot | MadeObject):
                return None
            if isinstance(each, Ref):
                todo.append(made_by[each.number])
    return [found[at] for at in sorted(found)]


def follows(numbers: Iterable[int], made_by: Sequence[int], calls: Sequence[UnitCall | GlueCall]) -> bool:
    """Whether one of these values follows from inputs, parameters or units, unlike a mask that is made once."""
    todo = [*numbers]
    while todo:
        maker = made_by[todo.pop()]
        call = calls[maker] if maker >= 0 else None
        if call is None or isinstance(call, UnitCall):
            return True
        for each in call.templates():
            if isinstance(each, Slot) and each.table == "_parameters":
                return True
            if isinstance(each, Ref):
                todo.append(each.number)
    return False


def around_writes(calls: Sequence[UnitCall | GlueCall]) -> Iterator[tuple[int, int, str]]:
    """Pairs of calls that take a buffer which the code between the units writes to: one stage makes them all."""
    taking: dict[Slot, list[int]] = {}
    for i, call in enumerate(calls):
        for each in call.templates():
            if isinstance(each, Slot):
                taking.setdefault(each, []).append(i)
    for slot, takers in taking.items():
        if any(calls[i].writes for i in takers):
            for first, second in pairwise(takers):
                yield first, second, f"both take buffer {slot.key!r}, which changes"


# What Python calls to read a tensor's value.
READS = {getattr(torch.Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item")}
SETTERS = {getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "data", "grad")}
HOOKED = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
}
# By name, functions whose results have the shape of the first argument, for any size of the others.
LIKE_FIRST = {"scatter", "scatter_", "scatter_add", "scatter_add_", "__setitem__"}
LIKE_FIRST |= {each + end for each in ("masked_scatter", "index_put", "index_add", "index_copy") for end in ("", "_")}
_SAMPLES = 64


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

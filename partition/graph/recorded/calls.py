"""A record of one forward: calls of units, and of torch's functions between them, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..forms import Form
from ..units import Together
from .reads import Reads
from .templates import Parts, Template, walk

_KINDS = ("cpu", "cuda")


class Context(NamedTuple):
    """The modes in which a call was made, where they differ from those in which the model was called.

    grad: whether a graph was built; None: as around the model.
    autocast: (kind of device, type or None for no autocast) of those that differ.
    """

    grad: bool | None = None
    autocast: tuple[tuple[str, torch.dtype | None], ...] = ()


class Modes(NamedTuple):
    """All modes of a moment."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]

    @classmethod
    def now(cls) -> Modes:
        """The ones in force."""
        kinds = [(kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in _KINDS]
        return cls(torch.is_grad_enabled(), tuple(kinds))

    def differing(self, around: Modes) -> Context:
        """These, seen from within `around`."""
        autocast = tuple(mine for mine, other in zip(self.autocast, around.autocast, strict=True) if mine != other)
        return Context(None if self.grad == around.grad else self.grad, autocast)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Region:
    """Calls that ran within one torch.utils.checkpoint.checkpoint.

    Arguments:
        options: of checkpoint, beside the function and its arguments.
    """

    options: Mapping[str, Any]


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """Fields that both kinds of calls have.

    Arguments:
        args: a tuple.
        kwargs: a dict.
        results: number of the value at each place among the leaves of what it returned, where that is a tensor.
        structure: of what it returned.
        changed: number of a value that it changed in place -> that of the changed value.
        enters: its number for random numbers; None: it draws none, or has none of its own. Calls within a unit that was
            opened have the unit's, and in the upper half how many of them have drawn before.
        behind: an earlier call that must have been made because it changes memory that this one reads.
        writes: whether it writes to memory of a parameter or buffer.
        line: of the user's code.
    """

    args: Parts
    kwargs: Parts
    context: Context
    region: Region | None
    line: str
    results: dict[int, int]
    structure: pytree.TreeSpec
    changed: dict[int, int]
    enters: int | None = None
    behind: frozenset[int] = frozenset()
    writes: bool = False

    def templates(self) -> list[Template]:
        """Templates of the arguments, with all in them."""
        return [*walk(self.args), *walk(self.kwargs)]

    def made(self) -> list[int]:
        """Numbers of the values that it gives."""
        return [*self.results.values(), *self.changed.values()]

    @property
    def is_one_tensor(self) -> bool:
        """Whether it returns a tensor alone."""
        return self.structure.is_leaf() and 0 in self.results


DRAWS = 32  # bits of a unit's number


@dataclass(slots=True, eq=False, kw_only=True)
class UnitCall(Call):
    """A call of a module that is not looked into.

    Arguments:
        name: its path in the model, with "#2" where it runs again.
        keeps_state: whether it has set attributes or buffers of its modules.
    """

    name: str
    module: nn.Module
    keeps_state: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class GlueCall(Call):
    """A call of a public function of torch.

    Arguments:
        is_random: whether it draws random numbers.
        is_effect: whether it is made for what it does to a value, such as a hook.
    """

    function: Callable[..., Any]
    is_random: bool
    is_effect: bool


@dataclass(frozen=True, slots=True)
class Store:
    """The assignment of a new tensor to a buffer, as a function of it and of the one before."""

    module: nn.Module
    key: str

    def __call__(self, value: torch.Tensor, before: torch.Tensor) -> None:
        """Assign it."""
        self.module._buffers[self.key] = value


@dataclass(frozen=True, slots=True)
class Guard:
    """A decision of the code between the units on a number that it drew, as a function of that number.

    Arguments:
        read: what Python took of it.
        expected: in every sample.
        line: of the user's code.
    """

    read: Callable[[torch.Tensor], object]
    expected: object
    line: str

    def __call__(self, drawn: torch.Tensor) -> None:
        """ValueError where it comes out otherwise. Fake tensors have no values."""
        if not isinstance(drawn, FakeTensor) and self.read(drawn) != self.expected:
            raise ValueError(
                f"a decision that is drawn between the modules{self.line} came out as {not self.expected!r}, and as "
                f"{self.expected!r} when the model was recorded: expected it within a module of its own, such as the "
                f"layer that is left out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One forward of a model in one mode, for inputs of one form, which are values 0, 1, ...

    Arguments:
        calls: in order.
        results: flat outputs that are tensors.
        output_form: of the model.
        bytes_of: by value number [bytes].
        together: pairs of calls that no cut may separate, and why.
        reads: of its code.
        handed_on: units of which the second works on a tensor that the first left in an object.
        as_run: where in `calls` each stands, in the order in which they ran; none: they stand in that order.
    """

    calls: tuple[UnitCall | GlueCall, ...]
    results: tuple[Template, ...]
    output_form: Form
    bytes_of: Mapping[int, float]
    together: tuple[tuple[int, int, str], ...]
    reads: Reads
    handed_on: Together = ()
    as_run: tuple[int, ...] = ()

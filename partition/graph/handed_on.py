"""Tensors that units of a chain hand to each other past their arguments: in an attribute, an object or list that both
know, a closure. No message carries them from stage to stage.

unit 1: shared.append(x)            unit 3: y + shared.pop()            (1, 3) belong together
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .fakes import on_fakes
from .forms import Arguments, Form, FormError
from .made_up import call_for_shapes
from .memory import Operations, written


class HandedOn(NamedTuple):
    """Two units, by number, and what the second takes that the first made, was given or changed."""

    first: int
    second: int
    what: str

    def text(self, names: Sequence[str]) -> str:
        """Why no cut may stand between them, for people."""
        one, other = names[self.first], names[self.second]
        return (
            f"{other!r} takes {self.what} that {one!r} hands on past its arguments (in an attribute, or an object or "
            f"list that both know), which no message carries. Expected both in one stage, or the tensor among what "
            f"{one!r} returns"
        )


def handed_on(
    stages: Sequence[Sequence[nn.Module]], example: Arguments, *, device: torch.device, spread: bool
) -> list[HandedOn]:
    """What the units of a chain hand on past their arguments, in one forward.

    Arguments:
        stages: their units.
        example: arguments of the first.
        spread: whether a tuple between stages is passed on as several arguments.
    """
    units = [unit for stage in stages for unit in stage]
    if not any(_is_users(part) for unit in units for part in unit.modules()):
        return []
    ends = set(accumulate(map(len, stages)))
    watch = _Watch()
    with on_fakes(nn.ModuleList(units), example, device=device, training=True) as (given, *_):
        arguments, _ = given.form.assemble(given.tensors)
        try:
            for number, unit in enumerate(units):
                watch.unit = number
                own = [watch.own(each) for each in arguments]
                before = _numbers(unit)
                value = call_for_shapes(unit, own, call=partial(watch.call, unit))
                watch.takes(value)
                watch.counts([key for key, count in _numbers(unit).items() if before.get(key) != count])
                is_spread = spread and number + 1 in ends and isinstance(value, tuple | list)
                arguments = tuple(value) if is_spread else (value,)
        except Exception:  # the run that looks for shapes will tell it, with its stage
            pass
    return sorted(watch.found)


def _is_users(module: nn.Module) -> bool:
    """Whether it may know of anything beside its arguments."""
    has_hooks = any(value for key, value in vars(module).items() if key.endswith("_hooks"))
    return has_hooks or "forward" in vars(module) or not type(module).__module__.startswith("torch.nn.")


class _Watch:
    """Sees which unit makes, changes and takes which tensor.

    Attributes:
        unit: the number of the one under way.
        found: what was handed on.
    """

    def __init__(self) -> None:
        self.unit = 0
        self.found: set[HandedOn] = set()
        self._maker: dict[int, int] = {}  # by id of the tensor
        self._counting: dict[tuple[int, str], int] = {}  # by id of the module
        self._kept: list[torch.Tensor] = []  # an id stays one object's

    def own(self, argument: object) -> object:
        """An argument whose tensors are now those of the unit under way, whoever made them."""
        try:
            form, tensors = Form.of(argument)
        except FormError:
            return argument
        found = form.assemble([x.clone() for x in tensors])
        self._makes(found)
        return found

    def call(self, unit: nn.Module, *arguments: object) -> object:
        """What the unit under way returns."""
        with Operations(self._operation):
            return unit(*arguments)

    def counts(self, changed: Sequence[tuple[int, str]]) -> None:
        """The unit under way has changed these attributes of its modules; one of them may run in another unit, too."""
        for key in changed:
            first = self._counting.setdefault(key, self.unit)
            if first != self.unit:
                self.found.add(HandedOn(first, self.unit, f"the attribute {key[1]!r}"))

    def takes(self, value: object) -> None:
        """The unit under way works on the tensors in a value, or returns them."""
        for tensor in _tensors(value):
            maker = self._maker.get(id(tensor), self.unit)
            if maker != self.unit:
                what = f"a tensor of shape {tuple(tensor.shape)}"
                self.found.add(HandedOn(min(maker, self.unit), max(maker, self.unit), what))

    def _operation(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        changed = list(written(function, args, kwargs))
        changed_ids = set(map(id, changed))  # whom a counter's value concerns reads it
        self.takes([tensor for tensor in _tensors((args, kwargs)) if id(tensor) not in changed_ids])
        result = function(*args, **kwargs)
        self._makes((result, changed))
        return result

    def _makes(self, value: object) -> None:
        for tensor in _tensors(value):
            self._maker.setdefault(id(tensor), self.unit)
            self._kept.append(tensor)


def _numbers(unit: nn.Module) -> dict[tuple[int, str], object]:
    """Plain attributes of its modules, such as counters."""
    return {
        (id(part), name): value
        for part in unit.modules()
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str)
    }


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))

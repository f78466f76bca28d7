"""Cut units of a plain chain: the children of an nn.Sequential, or the modules that the user gives.

Units may hand tensors to each other past their arguments: in an attribute, an object or list that both know, a closure.
No message carries them from stage to stage.

unit 1: shared.append(x)            unit 3: y + shared.pop()            (1, 3) belong together
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from .caches import Caches
from .cut import cut_evenly, forbid, starts_at
from .fakes import on_fakes
from .fingerprint import module_form
from .forms import Arguments, Form, FormError, tensors_in
from .made_up import call_for_shapes
from .memory import Operations, written
from .modes import hook_tables
from .units import MODEL_INPUT, Cut, EnterUnit, Linked, StageModule, Together, Unit, ValueRef, check_stages


def is_sequential(model: nn.Module) -> bool:
    """Whether the children run one after the other (an nn.Sequential without a forward of its own)."""
    is_plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return is_plain and "forward" not in vars(model)


class ChainUnits:
    """The children of an nn.Sequential, in order; a child that is listed twice counts twice. Those that pass tensors
    to each other past their arguments are one unit, with all between them. ValueError where there is no child."""

    def __init__(
        self, model: nn.Sequential, example: Arguments, *, device: torch.device, enter_unit: EnterUnit | None
    ) -> None:
        self._names, self._modules = _children(model)
        if not self._names:
            raise ValueError("an nn.Sequential without children: expected at least one")
        self._enter_unit = enter_unit
        self._handed_on = handed_on([self._modules], example, device=device, spread=False)
        self._crossing = forbid([0.0] * len(self._names), [each[:2] for each in self._handed_on])
        starts = [i for i, each in enumerate(self._crossing) if each == 0.0]
        self.units = tuple(
            Unit(
                name=self._names[a],
                description=", ".join(type(child).__name__ for child in self._modules[a:b]),
                first=a,
                last=b - 1,
            )
            for a, b in pairwise([*starts, len(self._names)])
        )

    def evenly(self, num_stages: int) -> Cut:
        seen: set[int] = set()
        weights = []
        for module in self._modules:
            fresh = [p for p in module.parameters() if id(p) not in seen]
            seen.update(map(id, fresh))
            weights.append(float(sum(p.numel() for p in fresh)))
        crossing_bytes = self._crossing if self._handed_on else None
        if self._handed_on and num_stages > (most := len(self.units)):
            why = _why_together(self._handed_on[0], self._names)
            raise ValueError(f"num_stages={num_stages}, expected 1 to {most}, since some units stay together: {why}")
        return self._cut(cut_evenly(weights, num_stages=num_stages, crossing_bytes=crossing_bytes))

    def at(self, split_points: Sequence[str]) -> Cut:
        place = {name: i for i, name in enumerate(self._names)}
        return self._cut(starts_at(split_points, place, "child of the nn.Sequential"))

    def by_unit(self, stage_of: Mapping[str, int]) -> Cut:
        """Stages of a chain are contiguous and in order."""
        check_stages(self.units, stage_of)
        stages = [stage_of[unit.name] for unit in self.units]
        for i, (before, behind) in enumerate(pairwise(stages)):
            if behind not in (before, before + 1):
                one, other = self.units[i].name, self.units[i + 1].name
                raise ValueError(
                    f"the plan puts {one!r} on stage {before} and {other!r}, which follows it, on stage {behind}: "
                    f"expected stages of an nn.Sequential in order"
                )
        return self._cut([self.units[stages.index(number)].first for number in range(stages[-1] + 1)])

    def _cut(self, starts: Sequence[int]) -> Cut:
        _refuse_parted(self._handed_on, self._names, starts)
        return _chain_cut(
            [
                _ChainPiece(
                    names=tuple(self._names[a:b]),
                    modules=tuple(self._modules[a:b]),
                    first=a,
                    enter_unit=self._enter_unit,
                    spread=False,
                )
                for a, b in pairwise([*starts, len(self._names)])
            ],
            lambda model: _children(model)[1],
            _by_modules(self._handed_on, self._names, self._modules),
        )


def _children(model: nn.Module) -> tuple[list[str], list[nn.Module]]:
    named = {name: child for name, child in model._modules.items() if child is not None}
    return list(named), list(named.values())


def _refuse_parted(handed: Sequence[HandedOn], names: Sequence[str], starts: Sequence[int]) -> None:
    for each in handed:
        if any(each[0] < start <= each[1] for start in starts):
            raise ValueError(f"no stage may end between them: {_why_together(each, names)}")


def _by_modules(handed: Sequence[HandedOn], names: Sequence[str], modules: Sequence[nn.Module]) -> Together:
    return tuple((modules[each[0]], modules[each[1]], _why_together(each, names)) for each in handed)


def given_stages(
    stages: Sequence[nn.Module], example: Arguments, *, device: torch.device, enter_unit: EnterUnit | None
) -> Cut:
    """Stages as the user gives them. ValueError where one hands a tensor to another past its arguments."""
    first = 0
    pieces = []
    for index, stage in enumerate(stages):
        named = {f"{index}.{name}" if name else str(index): module for name, module in given_units(stage).items()}
        pieces.append(
            _ChainPiece(
                names=tuple(named),
                modules=tuple(named.values()),
                first=first,
                enter_unit=enter_unit,
                spread=True,
            )
        )
        first += len(named)
    handed = handed_on([piece.modules for piece in pieces], example, device=device, spread=True)
    names = [name for piece in pieces for name in piece.names]
    _refuse_parted(handed, names, [piece.first for piece in pieces])
    return _chain_cut(
        pieces,
        lambda model: [unit for stage in model.children() for unit in given_units(stage).values()],
        _by_modules(handed, names, [module for piece in pieces for module in piece.modules]),
    )


def given_units(stage: nn.Module) -> dict[str, nn.Module]:
    """Name in the stage -> module: the children of an nn.Sequential, else the stage itself under "". An nn.Sequential
    with hooks of its own is run whole, since they run around all of it."""
    is_opened = type(stage) is nn.Sequential and "forward" not in vars(stage) and not any(hook_tables(stage))
    children = stage._modules if is_opened else {}  # a subclass may have its own forward
    return {name: child for name, child in children.items() if child is not None} or {"": stage}


def _chain_cut(
    pieces: Sequence[_ChainPiece], units_of: Callable[[nn.Module], Sequence[nn.Module]], together: Together
) -> Cut:
    def same(arguments: Arguments) -> Cut:
        return _chain_cut(pieces, units_of, together)

    return Cut(
        pieces=tuple(pieces),
        output_form=None,
        evaluation=same,
        entering=lambda model, enter: _enter_in_order(units_of(model), enter),
        again=same,
        together=together,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChainPiece:
    """Units of a chain on one stage. `first`: the number of the first of them in the whole model. `spread`:
    whether a tuple is passed on as several arguments (stages of the user's own) or as one (nn.Sequential)."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    first: int
    enter_unit: EnterUnit | None
    spread: bool
    is_flat: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"

    @property
    def end(self) -> str:
        return type(self.modules[-1]).__name__

    def link(self, before: StageModule | None, *, index: int, inputs: Form) -> Linked:
        """A stage takes all that the one before it returns."""
        form, producer = (inputs, MODEL_INPUT) if before is None else (before.form, index - 1)
        assert form is not None
        if before is None:
            _refuse_keywords(inputs, self.modules[0], given=self.spread)
        module = Chain(
            self.modules,
            first=self.first,
            enter_unit=self.enter_unit,
            form=form,
            takes="model's" if before is None else "several" if self.spread else "one",
        )
        refs = tuple(ValueRef(producer, slot) for slot in range(form.num_tensors))
        return module, refs

    def form(self) -> object:
        return tuple(module_form(module) for module in self.modules)


def _refuse_keywords(inputs: Form, first: nn.Module, *, given: bool) -> None:
    _, keywords = inputs.assemble([None] * inputs.num_tensors)
    if keywords:
        what = "a list of stages" if given else "an nn.Sequential"
        raise ValueError(
            f"{', '.join(keywords)} by keyword for {what}, whose stages pass on positional arguments alone: expected "
            f"positional arguments, in the order of {type(first).__name__}.forward"
        )


# What the value before a chain is: the model's (args, kwargs), several arguments if it is a tuple or list, or one.
_Takes = Literal["model's", "several", "one"]


class Chain(nn.Module):
    """Modules one after the other, `first` being the number of the first in the whole model."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        first: int,
        enter_unit: EnterUnit | None,
        form: Form,
        takes: _Takes,
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList(modules)
        self._numbered = tuple(enumerate(modules, first))
        self._enter_unit = enter_unit or (lambda number: None)
        self._form = form
        self._takes = takes
        places = tuple(range(form.num_tensors))
        self._takes_flat = self._arguments(places) == places

    def forward(self, *flat: torch.Tensor) -> object:
        arguments: tuple[Any, ...] = flat if self._takes_flat else self._arguments(flat)
        enter = self._enter_unit
        for number, module in self._numbered:
            enter(number)
            arguments = (module(*arguments),)
        return arguments[0]

    def _arguments(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        value = self._form.assemble(flat)
        if self._takes == "model's":
            return value[0]  # type: ignore[no-any-return]  # a chain has no keywords
        return tuple(value) if self._takes == "several" and isinstance(value, tuple | list) else (value,)


@contextmanager
def _enter_in_order(units: Sequence[nn.Module], enter: Callable[[int], None]) -> Iterator[None]:
    """The j-th call of any unit within is that of unit j: they run one after the other."""
    number = iter(range(len(units)))

    def hook(module: nn.Module, arguments: object) -> None:
        at = next(number, None)
        if at is not None:
            enter(at)

    with ExitStack() as stack:
        for unit in dict.fromkeys(units):
            stack.enter_context(unit.register_forward_pre_hook(hook))
        yield


# Two units, by number, and what the second takes that the first made, was given or changed.
HandedOn = tuple[int, int, str]


def _why_together(handed: HandedOn, names: Sequence[str]) -> str:
    first, second, what = handed
    return (
        f"{names[second]!r} takes {what} that {names[first]!r} passes outside its arguments (in an attribute, or an "
        f"object or list that both know), which no message carries. Expected both in one stage, or the tensor among "
        f"what {names[first]!r} returns"
    )


def handed_on(
    stages: Sequence[Sequence[nn.Module]], example: Arguments, *, device: torch.device, spread: bool
) -> list[HandedOn]:
    """Tensors that the units of a chain pass outside their arguments, in one forward."""
    units = [unit for stage in stages for unit in stage]
    if not any(_is_users(part) for unit in units for part in unit.modules()):
        return []
    ends = set(accumulate(map(len, stages)))
    watch = _Watch(units)
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
        except Exception:  # the run that looks for shapes will report it, with its stage
            pass
    return sorted(watch.found)


def _is_users(module: nn.Module) -> bool:
    """Whether it may hold anything besides its arguments."""
    has_hooks = any(value for key, value in vars(module).items() if key.endswith("_hooks"))
    return has_hooks or "forward" in vars(module) or not type(module).__module__.startswith("torch.nn.")


class _Watch:
    """Sees which unit makes, changes and takes which tensor, and so what was passed."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self.unit = 0
        self._units, self._caches = units, Caches()
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
        with Operations(self._operation):
            return unit(*arguments)

    def counts(self, changed: Sequence[tuple[int, str]]) -> None:
        """The unit under way has changed these attributes of its modules; one of them may run in another unit, too."""
        for key in changed:
            first = self._counting.setdefault(key, self.unit)
            if first != self.unit:
                self.found.add((first, self.unit, f"the attribute {key[1]!r}"))

    def takes(self, value: object) -> None:
        """The unit under way works on the tensors in a value, or returns them."""
        for tensor in tensors_in(value):
            maker = self._maker.get(id(tensor), self.unit)
            if maker != self.unit and not self._caches.makes(self._units[self.unit], tensor):
                what = f"a tensor of shape {tuple(tensor.shape)}"
                self.found.add((min(maker, self.unit), max(maker, self.unit), what))

    def _operation(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        changed = list(written(function, args, kwargs))
        changed_ids = set(map(id, changed))  # whom a counter's value concerns reads it
        self.takes([tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in changed_ids])
        result = function(*args, **kwargs)
        self._makes((result, changed))
        self._caches.note(function, args, kwargs, result)
        return result

    def _makes(self, value: object) -> None:
        for tensor in tensors_in(value):
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

"""Cut units of a plain chain: the children of an nn.Sequential, or the modules that the user gives."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .cut import cut_evenly
from .export import BatchSizes
from .fingerprint import module_form
from .units import MODEL_INPUT, Cut, EnterUnit, Linked, StageModule, Unit, ValueRef, check_stages


def is_sequential(model: nn.Module) -> bool:
    """Whether the children run one after the other (an nn.Sequential without a forward of its own)."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


class ChainUnits:
    """The children of an nn.Sequential, in order; a child that stands there twice counts twice.

    Raises ValueError where there is none.
    """

    def __init__(self, model: nn.Sequential, *, enter_unit: EnterUnit | None) -> None:
        named = [(name, child) for name, child in model._modules.items() if child is not None]
        if not named:
            raise ValueError("an nn.Sequential without children: expected at least one")
        self._modules = [child for _, child in named]
        self._enter_unit = enter_unit
        self.units = tuple(
            Unit(name=name, description=type(child).__name__, first=i, last=i) for i, (name, child) in enumerate(named)
        )

    def evenly(self, num_stages: int) -> Cut:
        """See ModelUnits."""
        seen: set[int] = set()
        weights = []
        for module in self._modules:
            fresh = [p for p in module.parameters() if id(p) not in seen]
            seen.update(map(id, fresh))
            weights.append(float(sum(p.numel() for p in fresh)))
        return self._cut(cut_evenly(weights, num_stages=num_stages))

    def at(self, split_points: Sequence[str]) -> Cut:
        """See ModelUnits."""
        place = {unit.name: unit.first for unit in self.units}
        starts = [0]
        for point in split_points:
            if point not in place:
                near = difflib.get_close_matches(point, place, n=3, cutoff=0.3) or list(place)[1:4]
                raise ValueError(
                    f"split point {point!r} is no child of the nn.Sequential: expected the name of the child that "
                    f"begins a stage, such as {', '.join(map(repr, near))}"
                )
            if place[point] <= starts[-1]:
                raise ValueError(
                    f"split point {point!r} stands at or before the one in front of it: expected names in order, "
                    f"each leaving something to the stage before"
                )
            starts.append(place[point])
        return self._cut(starts)

    def by_unit(self, stage_of: Mapping[str, int]) -> Cut:
        """See ModelUnits; stages of a chain are contiguous and in order."""
        check_stages(self.units, stage_of)
        stages = [stage_of[unit.name] for unit in self.units]
        for i, (before, behind) in enumerate(pairwise(stages)):
            if behind not in (before, before + 1):
                one, other = self.units[i].name, self.units[i + 1].name
                raise ValueError(
                    f"the plan puts {one!r} on stage {before} and {other!r}, which follows it, on stage {behind}: "
                    f"expected stages of an nn.Sequential in order"
                )
        return self._cut([stages.index(number) for number in range(stages[-1] + 1)])

    def _cut(self, starts: Sequence[int]) -> Cut:
        return _chain_cut(
            [
                _ChainPiece(
                    names=tuple(unit.name for unit in self.units[a:b]),
                    modules=tuple(self._modules[a:b]),
                    first=a,
                    enter_unit=self._enter_unit,
                    spread=False,
                )
                for a, b in pairwise([*starts, len(self.units)])
            ]
        )


def given_stages(stages: Sequence[nn.Module], *, enter_unit: EnterUnit | None) -> Cut:
    """Stages as the user gives them; the units of one that is an nn.Sequential are its children."""
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
    return _chain_cut(pieces)


def given_units(stage: nn.Module) -> dict[str, nn.Module]:
    """Name in the stage -> module: the children of an nn.Sequential, else the stage itself under ""."""
    children = stage._modules if type(stage) is nn.Sequential else {}  # a subclass may have its own forward
    return {name: child for name, child in children.items() if child is not None} or {"": stage}


def _chain_cut(pieces: Sequence[_ChainPiece]) -> Cut:
    def make() -> Cut:
        return Cut(pieces=tuple(pieces), batch_sizes=BatchSizes(), output_form=None, evaluation=make)

    return make()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChainPiece:
    """Units of a chain that stand on one stage.

    Arguments:
        first: the number of the first of them in the whole model.
        spread: whether a tuple is passed on as several arguments (stages of the user's own) or as one (nn.Sequential).
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    first: int
    enter_unit: EnterUnit | None
    spread: bool

    @property
    def name(self) -> str:
        """See Piece."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"

    @property
    def end(self) -> str:
        """See Piece."""
        return type(self.modules[-1]).__name__

    def link(self, before: StageModule | None, *, index: int, num_inputs: int) -> Linked:
        """See Piece; a stage takes all that the one before it returns."""
        structure, producer, count = None, MODEL_INPUT, num_inputs
        if before is not None:
            structure, producer, count = before.structure, index - 1, before.num_outputs
        module = Chain(
            self.modules, first=self.first, enter_unit=self.enter_unit, structure=structure, spread=self.spread
        )
        inputs = tuple(ValueRef(producer, slot) for slot in range(count))
        return Linked(module=module, inputs=inputs, is_flat=False)

    def form(self) -> object:
        """See Piece."""
        return tuple(module_form(module) for module in self.modules)


class Chain(nn.Module):
    """Modules one after the other.

    Arguments:
        first: the first one's number in the whole model.
        structure: of what the stage before returned, to which the flat inputs are put together again; None: they are
            the model's inputs.
        spread: whether a tuple or list among them makes several arguments.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        first: int,
        enter_unit: EnterUnit | None,
        structure: pytree.TreeSpec | None,
        spread: bool,
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList(modules)
        self._numbered = tuple(enumerate(modules, first))
        self._enter_unit = enter_unit or _ignore
        self._structure = structure
        self._spread = spread

    def forward(self, *flat: torch.Tensor) -> object:
        arguments: tuple[Any, ...] = flat
        if self._structure is not None:
            value = pytree.tree_unflatten(flat, self._structure)
            arguments = tuple(value) if self._spread and isinstance(value, tuple | list) else (value,)
        enter = self._enter_unit
        for number, module in self._numbered:
            enter(number)
            arguments = (module(*arguments),)
        return arguments[0]


def _ignore(number: int) -> None:
    pass

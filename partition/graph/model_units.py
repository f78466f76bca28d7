"""The cut units of any model: the children of an nn.Sequential (`chain`), or its own modules with the code between
them recorded (`recorded`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import nn

from .chain import ChainUnits, is_sequential
from .cut import contiguous, cut_evenly, stages_by_unit, starts_at
from .forms import Arguments
from .modes import evaluating
from .recorded.announce import announcing
from .recorded.calls import Record, UnitCall
from .recorded.flow import Flow, stages_like
from .recorded.guards import Guards
from .recorded.program import make_piece
from .recorded.recording import RecordingError, record
from .recorded.which import Roles, has_parts, roles_of
from .recorded.words import Words, digest, in_canonical_order
from .units import Agree, Cut, EnterUnit, ModelUnits, Step, Unit

StageOf = Mapping[int, int]  # by call


def model_units(
    model: nn.Module,
    example: Arguments,
    *,
    enter_unit: EnterUnit | None,
    agree: Agree | None = None,
    device: torch.device | None = None,
) -> ModelUnits:
    """The children of an nn.Sequential; of any other module, its own modules with the code between them recorded.

    Arguments:
        example: arguments of one microbatch, batch in dimension 0.
        enter_unit: told of each unit right before it runs; None: nobody is.
        agree: compares them with those of other processes; None: there are none.
        device: of the run; None: that of the inputs.

    Raises ValueError, with the user's source line, for a model that cannot be recorded, for arguments that it does not
    take, and for an empty nn.Sequential.
    """
    run_on = device if device is not None else example.tensors[0].device
    if is_sequential(model):
        assert isinstance(model, nn.Sequential)
        chain = ChainUnits(model, example, device=run_on, enter_unit=enter_unit)
        if agree is not None:
            agree(lambda: [Step(f"{unit.name} ({unit.description})") for unit in chain.units])
        return chain
    try:
        return RecordedUnits(model, example, device=run_on, enter_unit=enter_unit, agree=agree)
    except RecordingError:
        _refuse_arguments(model, example)
        raise


def _refuse_arguments(model: nn.Module, example: Arguments) -> None:
    """ValueError for arguments that the model's forward does not take."""
    signature = inspect.signature(model.forward)
    try:
        example.call(signature.bind)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}.forward{signature} does not take {example} ({error}): expected all that it needs, "
            f"in its order or by name; example_inputs=(...) or train_step(*inputs, target)"
        ) from None


class RecordedUnits:
    """Modules of a model, and runs of the code between them.

    Arguments:
        model: recorded as it stands (its training flags decide).
        example: arguments of a microbatch, of which shapes and types count.
        device: of the run.
        enter_unit: told of each unit right before it runs.
        agree: compares the record with those of other processes; None: there are none.
        also_open: paths of units that are opened too.

    Raises RecordingError, with the user's source line, for a model whose code between its units cannot be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Arguments,
        *,
        device: torch.device,
        enter_unit: EnterUnit | None,
        agree: Agree | None = None,
        also_open: Collection[str] = (),
    ) -> None:
        self._model = model
        self._example = example
        self._device = device
        self._enter_unit = enter_unit
        self._agree = agree
        self._opening = Opening(also_open=frozenset(also_open), keep_whole=frozenset())
        self.flow, self._opening = _record(model, self._opening, example, device=device, agree=agree, training=True)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """One a call of a module that has parameters, with the calls around it that have none."""
        flow = self.flow
        crossing = flow.crossing_bytes
        begins = [
            i for i in range(len(flow.order)) if not i or (isinstance(flow.call(i), UnitCall) and crossing[i] < 1e300)
        ]
        has_parameters = [bool(flow.parameters(call)) for call in flow.order]
        found: list[Unit] = []
        for first, end in _joined(begins, has_parameters):
            names = [call.name for i in range(first, end) if isinstance(call := flow.call(i), UnitCall)]
            kinds = [type(c.module).__name__ for i in range(first, end) if isinstance(c := flow.call(i), UnitCall)]
            calls = end - first - len(kinds)
            between = f"{calls} call{'s' if calls > 1 else ''} between modules"
            description = ", ".join([*kinds, between] if calls else kinds)
            found.append(Unit(name=(names or ["model"])[0], description=description, first=first, last=end - 1))
        return tuple(found)

    def evenly(self, num_stages: int) -> Cut:
        """See ModelUnits; cuts may stand between any two calls. Units are opened where there are too few."""
        flow = self.flow
        places = 1 + sum(each < float("inf") for each in flow.crossing_bytes[1:])
        if places < num_stages:
            deeper = self._deeper()
            if deeper is not None:
                return deeper.evenly(num_stages)
        return self._contiguous(cut_evenly(flow.weights, num_stages=num_stages, crossing_bytes=flow.crossing_bytes))

    def at(self, split_points: Sequence[str]) -> Cut:
        """See ModelUnits; any module that the model runs may begin a stage."""
        first: dict[str, int] = {}
        inside: set[str] = set()
        for i in range(len(self.flow.order)):
            call = self.flow.call(i)
            if not isinstance(call, UnitCall):
                continue
            parts = call.name.split(".")
            for end in range(1, len(parts) + 1):
                first.setdefault(".".join(parts[:end]), i)
            inside |= {f"{call.name}.{name}" for name, _ in call.module.named_modules() if name}
        wanted = [point for point in split_points if point not in first and point in inside]
        if wanted:
            return self._with_open(_above(wanted, self.flow)).at(split_points)
        return self._contiguous(starts_at(split_points, first))

    def by_unit(self, stage_of: Mapping[str, int]) -> Cut:
        """See ModelUnits; stages need not be contiguous, but none needs what a later one makes."""
        flow = self.flow
        sources = [
            [flow.position[source] for source in flow.sources(call) if source in flow.position] for call in flow.order
        ]
        return self._cut(stages_by_unit(self.units, stage_of, sources))

    def _contiguous(self, starts: Sequence[int]) -> Cut:
        return self._cut(contiguous(starts, len(self.flow.order)))

    def _deeper(self) -> RecordedUnits | None:
        """The same with every unit opened that has parts; None where none has."""
        calls = [call for i in range(len(self.flow.order)) if isinstance(call := self.flow.call(i), UnitCall)]
        paths = {_path(call) for call in calls if has_parts(call.module)} - self._opening.keep_whole
        return self._with_open(paths) if paths else None

    def _with_open(self, paths: Collection[str]) -> RecordedUnits:
        return RecordedUnits(
            self._model,
            self._example,
            device=self._device,
            enter_unit=self._enter_unit,
            agree=self._agree,
            also_open=self._opening.also_open | set(paths),
        )

    def _cut(self, stages: Sequence[int]) -> Cut:
        """ValueError for stages that part what belongs together."""
        stage_of = dict(zip(self.flow.order, stages, strict=True))
        parted = self.flow.parted(stage_of)
        if parted is not None:
            raise ValueError(parted)
        how = _How(
            model=self._model,
            opening=self._opening,
            device=self._device,
            enter_unit=self._enter_unit,
            agree=self._agree,
            training=True,
        )
        return how.cut(self.flow, stage_of, 1 + max(stages), self._example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Exceptions from the rule which modules are units; see `roles_of`."""

    also_open: frozenset[str]
    keep_whole: frozenset[str]

    def roles(self, model: nn.Module) -> Roles:
        """The modules of a model, or of a copy of it, by the rule and these exceptions."""
        return roles_of(model, also_open=self.also_open, keep_whole=self.keep_whole)


def _record(
    model: nn.Module,
    opening: Opening,
    example: Arguments,
    *,
    device: torch.device,
    agree: Agree | None,
    training: bool,
    is_first: bool = True,
) -> tuple[Flow, Opening]:
    """A record; in the first one, a module whose own code cannot be recorded is kept whole, unless it is the model."""
    while True:
        try:
            found = record(model, opening.roles(model), example, device=device, training=training)
            return Flow(found if agree is None else _agreed(found, model, agree, training=training)), opening
        except RecordingError as error:
            if not (is_first and error.inside) or error.inside in opening.keep_whole:
                if agree is not None:
                    agree(lambda: [Step("code between the modules that cannot be recorded")], training=training)
                raise
            opening = Opening(
                also_open=frozenset(p for p in opening.also_open if p != error.inside),
                keep_whole=opening.keep_whole | {error.inside},
            )


def _agreed(found: Record, model: nn.Module, agree: Agree, *, training: bool) -> Record:
    """A record that fits those of the other processes."""
    canonical = cache(lambda: in_canonical_order(found, model))
    differs = agree(
        lambda: list(Words(model).record(found)),
        lambda: list(Words(model).record(canonical())),
        training=training,
    )
    return canonical() if differs else found


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """All that makes stages of a record, beside the record."""

    model: nn.Module
    opening: Opening
    device: torch.device
    enter_unit: EnterUnit | None
    agree: Agree | None
    training: bool

    def cut(self, flow: Flow, stage_of: StageOf, num_stages: int, example: Arguments) -> Cut:
        """The stages."""
        numbers = flow.numbers(stage_of)
        in_run_order = [numbers[i] for i in flow.record.as_run or range(len(flow.record.calls)) if i in numbers]
        pieces = [
            make_piece(flow, stage_of, stage, num_stages, numbers=numbers, enter_unit=self.enter_unit)
            for stage in range(num_stages)
        ]
        return Cut(
            pieces=tuple(pieces),
            output_form=flow.record.output_form,
            evaluation=lambda other: self._in_evaluation()._like(flow, stage_of, num_stages, other, same_modules=False),
            entering=lambda model, enter: announcing(self.opening.roles(model), in_run_order, enter),
            again=lambda other: self._like(flow, stage_of, num_stages, other, same_modules=True),
            together=flow.record.handed_on,
            left=flow.record.reads.left,
            guards=Guards(flow.record.reads, training=self.training),
            digest=cache(lambda: digest(Words(self.model).record(flow.record))),
        )

    def _in_evaluation(self) -> _How:
        return replace(self, training=False)

    def _like(self, flow: Flow, stage_of: StageOf, num_stages: int, example: Arguments, *, same_modules: bool) -> Cut:
        """The same cut of a record made now, for these inputs."""
        with evaluating(*(() if self.training else (self.model,))):
            try:
                found, _ = _record(
                    self.model,
                    self.opening,
                    example,
                    device=self.device,
                    agree=self.agree,
                    training=self.training,
                    is_first=False,
                )
            except RecordingError as error:
                raise ValueError(
                    f"{error.reason}: so it cannot be recorded for inputs of other shapes, in evaluation mode or since "
                    f"it was changed, as it was when the stages were built. Expected code that makes the same calls in "
                    f"all of them, and hooks on the modules that run as they are"
                ) from error
        return self.cut(found, stages_like(flow, stage_of, found, same_modules=same_modules), num_stages, example)


def _joined(bounds: Sequence[int], has_parameters: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs of positions, [first, end): one without parameters joins the run before it; the first one the run behind.

    Arguments:
        bounds: where runs begin, ascending from 0.
        has_parameters: [n] whether a position uses any.
    """
    ends = [*bounds[1:], len(has_parameters)]
    kept: list[tuple[int, int]] = []
    for first, end in zip(bounds, ends, strict=True):
        if kept and not (any(has_parameters[first:end]) and any(has_parameters[slice(*kept[-1])])):
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((first, end))
    return kept


def _path(call: UnitCall) -> str:
    return call.name.partition("#")[0]


def _above(points: Collection[str], flow: Flow) -> set[str]:
    """The units that hold these modules, and all between."""
    units = {_path(call) for i in range(len(flow.order)) if isinstance(call := flow.call(i), UnitCall)}
    found = set()
    for point in points:
        parts = point.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts))]
        found |= set(above[next(i for i, path in enumerate(above) if path in units) :])
    return found

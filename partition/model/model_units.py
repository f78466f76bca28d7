"""The cut units of any model: the children of an nn.Sequential (`chain`), or its own modules with the code between
them recorded (`recorded`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import nn

from .chain import ChainUnits, is_sequential
from .cut import contiguous, cut_evenly, stages_by_unit, starts_at
from .fakes import on_fakes
from .forms import Arguments
from .made_up import reads_values
from .modes import OWN_HOOKS, changing_hook, evaluating, no_collection, quiet_fakes
from .recorded.calls import Record, UnitCall
from .recorded.flow import Flow, stages_like
from .recorded.guards import Guards
from .recorded.intercept import Announcer, Roles, has_parts, is_compiled, listening, roles_of
from .recorded.program import RecordedPiece
from .recorded.recorder import ForwardRecorder
from .recorded.refusals import RefusedError
from .recorded.words import Words, digest, in_canonical_order
from .source_line import first_line, module_at, users_line
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
    Raises ValueError, with the user's source line, for a model that cannot be recorded, for arguments that it does not
    take, and for an empty nn.Sequential."""
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
    signature = inspect.signature(model.forward)
    try:
        example.call(signature.bind)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}.forward{signature} does not take {example} ({error}): expected all that it needs, "
            f"in its order or by name; example_inputs=(...) or train_step(*inputs, target)"
        ) from None


class RecordingError(ValueError):
    """The model's code between its modules cannot be recorded, so that the model cannot be cut there.

    Arguments:
        module: that was opened and whose code does it, at the path `inside` of the model.
        unit: path of one that it takes something of which was not returned, or that raised the error.
        reason: with the user's source line.
        expected: in its place.
    """

    def __init__(
        self, module: nn.Module, reason: str, *, inside: str, expected: str | None = None, unit: str | None = None
    ) -> None:
        self.expected = expected or _EXPECTED
        super().__init__(f"{type(module).__name__} cannot be recorded: {reason}. Expected {self.expected}")
        self.reason = reason
        self.inside = inside
        self.unit = None if unit is None else unit.partition("#")[0]


_EXPECTED = (
    "code between its modules that reads no values of tensors and changes no attributes; change that line, move it "
    "into a module of its own, which runs as it is, or give the parts yourself: PipelineModule([...])"
)


class RecordedUnits:
    """Modules of a model in its current state (its training flags decide), and runs of the code between them. Raises
    RecordingError, with the user's source line, for a model whose code between its units cannot be recorded."""

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
        self._example = example
        how = _How(model=model, device=device, enter_unit=enter_unit, agree=agree, also_open=frozenset(also_open))
        self.flow, self._how = how.record(example, is_first=True)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """One a call of a module that has parameters, with the calls around it that have none."""
        flow = self.flow
        calls = flow.unit_calls()
        cuts = {i for i, _ in calls if flow.crossing_bytes[i] < 1e300}
        begins = sorted({0} | cuts) if flow.order else []
        has_parameters = [bool(flow.parameters(call)) for call in flow.order]
        found: list[Unit] = []
        for first, end in _joined(begins, has_parameters):
            own = [call for i, call in calls if first <= i < end]
            kinds = [type(call.module).__name__ for call in own]
            glue = end - first - len(own)
            between = f"{glue} call{'s' if glue > 1 else ''} between modules"
            description = ", ".join([*kinds, between] if glue else kinds)
            name = own[0].name if own else "model"
            found.append(Unit(name=name, description=description, first=first, last=end - 1))
        return tuple(found)

    def evenly(self, num_stages: int) -> Cut:
        """Cuts may be between any two calls. Units are opened where there are too few."""
        flow = self.flow
        places = 1 + sum(each < float("inf") for each in flow.crossing_bytes[1:])
        if places < num_stages:
            deeper = self._deeper()
            if deeper is not None:
                return deeper.evenly(num_stages)
            if self._how.keep_whole:
                path = next(iter(self._how.keep_whole))
                said = f"num_stages={num_stages} for a model of {places} units that can be cut apart, in which {path!r}"
                raise self._stays_whole(said, path, f"1 to {places}")
        return self._contiguous(cut_evenly(flow.weights, num_stages=num_stages, crossing_bytes=flow.crossing_bytes))

    def _stays_whole(self, said: str, path: str, instead: str) -> ValueError:
        why = self._how.keep_whole[path]
        return ValueError(f"{said} stays whole: {why.reason}. Expected {instead}, or {why.expected}")

    def at(self, split_points: Sequence[str]) -> Cut:
        """Any module that the model runs may begin a stage."""
        first: dict[str, int] = {}
        inside: set[str] = set()
        for i, call in self.flow.unit_calls():
            parts = call.name.split(".")
            for end in range(1, len(parts) + 1):
                first.setdefault(".".join(parts[:end]), i)
            inside |= {f"{call.name}.{name}" for name, _ in call.module.named_modules() if name}
        wanted = [point for point in split_points if point not in first and point in inside]
        if wanted:
            paths = _above(wanted, self.flow)
            for path in sorted(paths & self._how.keep_whole.keys()):
                raise self._stays_whole(
                    f"cut={wanted[0]!r} is in {path!r}, which", path, f"{path!r}, where a stage may begin"
                )
            return self._with_open(paths).at(split_points)
        return self._contiguous(starts_at(split_points, first, "module that the model runs"))

    def by_unit(self, stage_of: Mapping[str, int]) -> Cut:
        """Stages need not be contiguous, but none needs what a later one makes."""
        flow = self.flow
        sources = [
            [flow.position[source] for source in flow.sources(call) if source in flow.position] for call in flow.order
        ]
        return self._cut(stages_by_unit(self.units, stage_of, sources))

    def _contiguous(self, starts: Sequence[int]) -> Cut:
        return self._cut(contiguous(starts, len(self.flow.order)))

    def _deeper(self) -> RecordedUnits | None:
        """The same with every unit opened that has parts; None where none has."""
        paths = {
            _path(call) for _, call in self.flow.unit_calls() if has_parts(call.module)
        } - self._how.keep_whole.keys()
        return self._with_open(paths) if paths else None

    def _with_open(self, paths: Collection[str]) -> RecordedUnits:
        how = self._how
        return RecordedUnits(
            how.model,
            self._example,
            device=how.device,
            enter_unit=how.enter_unit,
            agree=how.agree,
            also_open=how.also_open | set(paths),
        )

    def _cut(self, stages: Sequence[int]) -> Cut:
        """`stages`: of each call in order, its stage. Raises ValueError if they separate calls that belong together."""
        stage_of = dict(zip(self.flow.order, stages, strict=True))
        parted = self.flow.parted(stage_of)
        if parted is not None:
            raise ValueError(parted)
        return self._how.cut(self.flow, stage_of, 1 + max(stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """All that makes records and their stages, besides the arguments, with exceptions from the rule which modules are
    units."""

    model: nn.Module
    device: torch.device
    enter_unit: EnterUnit | None
    agree: Agree | None
    also_open: frozenset[str]
    keep_whole: Mapping[str, RecordingError] = field(default_factory=dict)
    training: bool = True

    def _roles(self, model: nn.Module) -> Roles:
        return roles_of(model, also_open=self.also_open, keep_whole=self.keep_whole)

    def record(self, example: Arguments, *, is_first: bool) -> tuple[Flow, _How]:
        """Records the model's forward, and returns how. In the first record, inner modules that cannot be recorded are
        kept whole, and units that need values, or whose inner tensors are used outside, are opened, with all of their
        class; later ones raise RecordingError."""
        how = self
        while True:
            try:
                found = record(how.model, how._roles(how.model), example, device=how.device, training=how.training)
                return Flow(how._agreed(found)), how
            except RecordingError as error:
                cause = how.keep_whole.get(error.unit or "", error)
                if is_first and (paths := how._like_unit(error.unit)):
                    how = replace(how, also_open=how.also_open | paths)
                elif is_first and error.inside and error.inside not in how.keep_whole:
                    whole = {**how.keep_whole, error.inside: cause}
                    how = replace(how, also_open=how.also_open - whole.keys(), keep_whole=whole)
                else:
                    if how.agree is not None:
                        how.agree(_unrecorded, training=how.training)
                    raise cause from error

    def _like_unit(self, path: str | None) -> set[str]:
        """A unit that has parts, and all others of its class; none where it was found that it must stay whole."""
        units = self._roles(self.model).units
        if path is None or path in self.keep_whole or not has_parts(units[path]):
            return set()
        return {each for each, unit in units.items() if type(unit) is type(units[path])} - self.keep_whole.keys()

    def _agreed(self, found: Record) -> Record:
        """A record that fits those of the other processes."""
        if self.agree is None:
            return found
        canonical = cache(lambda: in_canonical_order(found, self.model))
        differs = self.agree(
            lambda: list(Words(self.model).record(found)),
            lambda: list(Words(self.model).record(canonical())),
            training=self.training,
        )
        return canonical() if differs else found

    def cut(self, flow: Flow, stage_of: StageOf, num_stages: int) -> Cut:
        numbers = flow.numbers(stage_of)
        in_run_order = [numbers[i] for i in flow.record.as_run or range(len(flow.record.calls)) if i in numbers]
        pieces = [
            RecordedPiece(
                flow=flow,
                stage_of=stage_of,
                stage=stage,
                num_stages=num_stages,
                numbers=numbers,
                enter_unit=self.enter_unit,
            )
            for stage in range(num_stages)
        ]
        evaluation = replace(self, training=False)
        return Cut(
            pieces=tuple(pieces),
            output_form=flow.record.output_form,
            evaluation=lambda other: evaluation._like(flow, stage_of, num_stages, other, same_modules=False),
            entering=lambda model, enter: Announcer(self._roles(model), in_run_order, enter).listens(),
            again=lambda other: self._like(flow, stage_of, num_stages, other, same_modules=True),
            together=flow.record.handed_on,
            written_inputs=flow.record.written_inputs,
            left=flow.record.reads.left,
            guards=Guards(flow.record.reads, training=self.training),
            digest=cache(lambda: digest(Words(self.model).record(flow.record))),
        )

    def _like(self, flow: Flow, stage_of: StageOf, num_stages: int, example: Arguments, *, same_modules: bool) -> Cut:
        """The same cut of a record made now, for these inputs."""
        with evaluating(*(() if self.training else (self.model,))):
            try:
                found, _ = self.record(example, is_first=False)
            except RecordingError as error:
                when = "for inputs of other shapes or since it was changed, unlike when the stages were built"
                when = when if self.training else "in evaluation mode, unlike in training"
                raise ValueError(
                    f"{error.reason}: so it cannot be recorded {when}. Expected code that makes the same calls again, "
                    f"with hooks only on the modules that run as they are; {error.expected}"
                ) from error
        return self.cut(found, stages_like(flow, stage_of, found, same_modules=same_modules), num_stages)


def record(model: nn.Module, roles: Roles, example: Arguments, *, device: torch.device, training: bool) -> Record:
    """Run the model once, on fake tensors, in the current mode of its modules, in training with a graph; it is left
    unchanged. RecordingError, with the user's source line, for what cannot be recorded."""
    expected: str | None
    for path, module in roles.opened.items():
        if path and is_compiled(module):
            raise RecordingError(
                module, f"{module_at(path)} is compiled as a whole", inside=path, expected="parts that are compiled"
            )
        hooks = next((kind for kind in OWN_HOOKS if vars(module)[kind]), None)
        if hooks is not None:
            reason = f"{module_at(path)} has hooks ({hooks.strip('_').replace('_', ' ')})"
            expected = "hooks on the modules in it, which run as they are; of an exported program the model itself"
            raise RecordingError(module, reason, inside=path, expected=expected)
        if kind := changing_hook(module, ("backward_pre", "backward")):
            reason = f"a hook on all modules ({kind}) changes gradients of {module_at(path)}"
            raise RecordingError(module, reason, inside=path, expected="such a hook on the modules in it")
    with on_fakes(model, example, device=device, training=training) as (given, kinds, left, around):
        recorder = ForwardRecorder(model, roles, given.tensors, around)
        try:
            heard = {id(each): each for each in (*roles.opened.values(), *roles.units.values())}
            with no_collection(), quiet_fakes(), listening(recorder, heard), recorder.watching(kinds):
                found = recorder.finish(given.call(model))
        except Exception as error:
            if isinstance(error, RefusedError):
                reason, expected = f"{error}{users_line(error) or recorder.line}", error.expected
                unit = error.unit
            else:
                reason = f"{first_line(error)}{users_line(error)}"
                expected = f"inputs that it takes (given: {example})"
                if reads_values(error):
                    reason, expected = f"the code between the modules reads a tensor's value{users_line(error)}", None
                elif "TorchScript" in reason or not isinstance(
                    error, RuntimeError | IndexError
                ):  # about shapes and types
                    expected += f", and {_EXPECTED}"
                unit = recorder.unit
            inside = recorder.inside
            raise RecordingError(roles.opened[inside], reason, inside=inside, expected=expected, unit=unit) from error
    found.reads.left += left
    return found


def _unrecorded() -> list[Step]:
    return [Step("code between the modules that cannot be recorded")]


def _joined(bounds: Sequence[int], has_parameters: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs of positions, [first, end): one without parameters joins the run before it, the first one the next run."""
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
    """Paths of the units that contain these modules, and of the modules in between."""
    units = {_path(call) for _, call in flow.unit_calls()}
    found = set()
    for point in points:
        parts = point.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts))]
        found |= set(above[next(i for i, path in enumerate(above) if path in units) :])
    return found

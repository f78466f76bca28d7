"""Cut units of a model, and the stages made of them: one interface for the profiler, plans and the runtime.

    model_units(model)  -> ModelUnits    .units: what the nodes of a profile and the stages of a plan are named after
    evenly, at, by_unit -> Cut           the StageUnits of each stage, in order
    first_run           -> StageModule   complete: what a stage runs, what it takes, what it returns; on fake tensors
                                         in shape inference, on real ones in the profiler

Two implementations: children of an nn.Sequential (`chain`), and modules of any other model with the code between them
recorded (`recorded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .forms import Arguments, Form, FormError, Tensors
from .made_up import call_for_shapes
from .memory import memory_of, noting_writes
from .untouched import Places

EnterUnit = Callable[[int], None]  # called with a unit's number right before it runs, to seed its random numbers

Entering = Callable[[nn.Module, EnterUnit], AbstractContextManager[None]]

Together = tuple[tuple[nn.Module, nn.Module, str], ...]  # two units that belong together, and why

MODEL_INPUT = -1


class OutputError(ValueError):
    """A stage returns what cannot travel to the next one."""


class Step(NamedTuple):
    """A part of what a model does, in words that are equal in processes that do the same, and its line for people."""

    text: str
    line: str = ""


Steps = Callable[[], Sequence[Step]]


class Agree(Protocol):
    """Compares what processes are to run: ValueError on all of them where it differs."""

    def __call__(self, own: Steps, canonical: Steps | None = None, *, training: bool = True) -> bool:
        """Whether processes differ as they are, and not in their canonical form, which all of them take then.
        Collective over the processes while a pipeline is built; after that, the answer given there in the same mode."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Where a stage's input comes from: output `slot` of stage `producer` (MODEL_INPUT: the model's input `slot`)."""

    producer: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A piece of a model that is not cut further.

    Children of an nn.Sequential; calls of modules with the recorded code around them.
    """

    name: str  # unique in the model; "#2" where a module runs again
    description: str  # for people
    first: int  # its place in the model's order (children or calls)
    last: int  # included

    @property
    def size(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModule:
    """One stage in one mode (training or evaluation), complete.

    Attributes:
        model_slots: the model's inputs among `inputs`.
    """

    name: str  # the units in it, for people
    end: str  # what makes its outputs, for errors
    module: nn.Module  # called with flat tensors
    inputs: tuple[ValueRef, ...]  # where each comes from
    num_outputs: int  # tensors that it returns
    form: Form | None  # of what it returns; None: a tuple of tensors, as recorded code does
    # whether it changes an input in place: it then gets copies, since the input belongs to the stage before, or to the
    # user
    clone_inputs: bool
    # which of its flat outputs are memory of its buffers, which the next forward may change: copies of them travel
    clone_outputs: frozenset[int]
    model_slots: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        slots = tuple(ref.slot for ref in self.inputs if ref.producer == MODEL_INPUT)
        object.__setattr__(self, "model_slots", slots)

    @property
    def units(self) -> tuple[nn.Module, ...]:
        """The user's modules that it calls as its cut units."""
        return tuple(self.module.get_submodule("units").children())

    def run(self, inputs: Tensors) -> Tensors:
        return self.flatten(self.module.forward(*([x.clone() for x in inputs] if self.clone_inputs else inputs)))

    def detached(self, outputs: Tensors) -> Tensors:
        """Outputs as they leave the stage: without a graph, and without the memory of buffers."""
        copied = self.clone_outputs
        return tuple([x.detach().clone() if i in copied else x.detach() for i, x in enumerate(outputs)])

    def flatten(self, value: object) -> Tensors:
        """Flat outputs from what the module returned; OutputError where it is built otherwise than it was."""
        if self.form is None:
            assert isinstance(value, tuple)
            return value
        form, flat = flatten(value, end=self.end)
        if form != self.form:
            raise OutputError(
                f"{self.end} at the end of stage {self.name} returns {len(flat)} tensors as {form}, and returned "
                f"{self.num_outputs} as {self.form} when the stages were built: expected the same structure for every "
                f"batch; join what varies into one tensor, or let stages end elsewhere (cut=)"
            )
        return flat


Linked = tuple[nn.Module, tuple[ValueRef, ...]]  # a stage's module, and where its inputs come from


class StageUnits(Protocol):
    """One stage's units before anything ran: what a chain's stage takes is known once the stage before it ran."""

    is_flat: ClassVar[bool]  # whether its module returns a tuple of tensors in any case

    @property
    def name(self) -> str:
        """The units in it, for people."""

    @property
    def end(self) -> str:
        """The module that makes its outputs, for errors."""

    def link(self, before: StageModule | None, *, index: int, inputs: Form) -> Linked:
        """The module that runs it, and where its inputs come from; ValueError for arguments that the module cannot
        take."""

    def form(self) -> object:
        """Equal for pieces that do equal work on equal inputs."""


class ModelGuards(Protocol):
    """Record of what the pieces of a cut have taken from the model in its state when they were made."""

    def tell(self) -> None:
        """Warn, when the stages are built, of what cannot be guarded."""

    def differing(self) -> list[str]:
        """Paths of what the model now has otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model cut into stages, in one mode."""

    pieces: tuple[StageUnits, ...]  # one per stage
    # how the flat outputs of the last stage make the model's output; None: as it returned them
    output_form: Form | None
    # makes the same cut of the model in evaluation mode, for arguments like these
    evaluation: Callable[[Arguments], Cut]
    entering: Entering  # within, a copy of the whole model, called once, reports its units as the stages do
    again: Callable[[Arguments], Cut]  # makes the same cut for arguments of other shapes
    together: Together = ()  # units of which the second takes what the first passes outside its arguments
    # numbers of those that its code changes in place, as far as the record shows
    written_inputs: frozenset[int] = frozenset()
    # where the model has left tensors besides its output, which stages may not do
    left: Places = field(default_factory=list)
    # of what the pieces have taken from the model: where it is another, they are made again
    guards: ModelGuards | None = None
    # of the calls that the pieces make: equal in processes whose pieces fit together
    digest: Callable[[], str] = lambda: ""

    def form_of_output(self, last: StageModule) -> Form:
        if self.output_form is not None:
            return self.output_form
        assert last.form is not None
        return last.form


class ModelUnits(Protocol):
    """A model's cut units in their order, in the current mode of the model."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """A function of the model alone."""

    def evenly(self, num_stages: int) -> Cut:
        """Contiguous stages with nearly equal numbers of parameters; ValueError for more than can be made."""

    def at(self, split_points: Sequence[str]) -> Cut:
        """Stages that begin at these names; ValueError with near matches for a wrong one, and for a wrong order."""

    def by_unit(self, stage_of: Mapping[str, int]) -> Cut:
        """A stage for each unit; ValueError for stages that these units cannot make."""


def flatten(value: object, *, end: str) -> tuple[Form, Tensors]:
    """The form of what a stage returned, and its tensors; OutputError for what can be neither tensor nor constant."""
    try:
        form, flat = Form.of(value)
    except FormError as error:
        raise OutputError(
            f"{end} returns a {type(error.leaf).__name__} ({error.leaf!r:.60}) at the end of a stage: expected "
            f"tensors, numbers, strings and None (in tuples, lists, dicts, namedtuples or dataclasses)"
        ) from None
    return form, flat


def check_stages(units: Sequence[Unit], stage_of: Mapping[str, int]) -> None:
    names = [unit.name for unit in units]
    for name in stage_of:
        if name not in names:
            raise ValueError(f"unit {name!r} is not in the model: expected its units, {', '.join(names)}")
    missing = [name for name in names if name not in stage_of]
    if missing:
        raise ValueError(f"no stage for unit {missing[0]!r}: expected one for each of {', '.join(names)}")
    for name, stage in stage_of.items():
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise ValueError(f"unit {name!r} on stage {stage!r}: expected a whole number of at least 0")
    last = max(stage_of.values())
    empty = set(range(last)) - set(stage_of.values())
    if empty:
        raise ValueError(f"stage {min(empty)} has no unit: expected at least one on each stage 0 to {last}")


def take(refs: Sequence[ValueRef], inputs: Sequence[torch.Tensor], results: Sequence[Tensors]) -> Tensors:
    return tuple(inputs[r.slot] if r.producer == MODEL_INPUT else results[r.producer][r.slot] for r in refs)


def fresh_leaves(tensors: Sequence[torch.Tensor]) -> Tensors:
    return tuple(x.detach().requires_grad_(x.requires_grad) for x in tensors)


def first_run(piece: StageUnits, linked: Linked, arguments: Tensors) -> tuple[StageModule, Tensors, frozenset[int]]:
    """Run a stage that nothing is known of: the stage, complete, its outputs, and the inputs that it changes in place.
    The arguments keep their values. OutputError for outputs that are no tensors, and what the module raises."""
    module, inputs = linked
    value, changed = run_and_watch(module, arguments)
    form: Form | None = None
    if piece.is_flat:
        assert isinstance(value, tuple)
        flat: Tensors = value
    else:
        form, flat = flatten(value, end=piece.end)
    buffers = {memory_of(buffer) for buffer in module.buffers()} - {None}
    stage = StageModule(
        name=piece.name,
        end=piece.end,
        module=module,
        inputs=inputs,
        num_outputs=len(flat),
        form=form,
        clone_inputs=bool(changed),
        clone_outputs=frozenset(i for i, x in enumerate(flat) if memory_of(x) in buffers),
    )
    return stage, flat, changed


def run_and_watch(module: nn.Module, arguments: Tensors) -> tuple[object, frozenset[int]]:
    """The value a module returns, and which arguments (leaves) it changes in place; it then ran again on copies."""
    values = [None if isinstance(x, FakeTensor) else x.detach().clone() for x in arguments]  # fakes have none
    try:
        with noting_writes() as written:
            value = call_for_shapes(module, arguments, call=module.forward)
    except RuntimeError as error:
        if "in-place" not in str(error):  # what autograd says of a leaf that is changed
            raise
    else:
        if written.isdisjoint(map(memory_of, arguments)):
            return value, frozenset()
    with torch.no_grad():
        for x, before in zip(arguments, values, strict=True):
            if before is not None:
                x.detach().copy_(before)
    copies = [x.clone() for x in arguments]
    with noting_writes() as written:
        value = call_for_shapes(module, copies, call=module.forward)
    return value, frozenset(i for i, x in enumerate(copies) if memory_of(x) in written)

"""Shape inference: inputs and outputs of every stage, found on fake tensors, without computing.

Every rank runs it over the whole model, with placeholders for the parameters that it does not hold. It runs the user's
code, without a trace: counters, buffers, lists of hooks and random generators are unchanged.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ...comm import TensorSpec
from ...partition.model.fakes import stand_ins, strict_fake_mode
from ...partition.model.forms import Arguments, Form, Tensors, argument_name, shown_call
from ...partition.model.made_up import wanting_gradient
from ...partition.model.memory import memory_of
from ...partition.model.modes import evaluating, quiet_fakes, uncompiled
from ...partition.model.recorded.guards import Changes
from ...partition.model.source_line import first_line, users_line
from ...partition.model.units import (
    MODEL_INPUT,
    Cut,
    ModelGuards,
    OutputError,
    StageModule,
    first_run,
    fresh_leaves,
    take,
)
from ...partition.model.untouched import Places, untouched
from ...partition.plans.sizes import Size
from ..guards.presence import OutputSpecs, StageRun, certain_gradients, float16_gradients
from ..guards.randomness import Seeder
from ..settings.precision import Autocast

MOST_SIGNATURES = 256
_MOST_KNOWN = 3  # recordings of one signature, for attributes that alternate


class Signature(NamedTuple):
    """Properties of arguments that the inferred specs depend on: their form with its constants, shapes and types, the
    dimension of the batch in each (None: all microbatches share it), and which require a gradient."""

    form: Form
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    dims: tuple[int | None, ...]
    wants_grad: tuple[bool, ...] = ()

    @classmethod
    def of(cls, arguments: Arguments) -> Signature:
        tensors, wants = arguments.tensors, tuple([x.requires_grad for x in arguments.tensors])
        return cls(arguments.form, tuple([(tuple(x.shape), x.dtype) for x in tensors]), arguments.dims, wants)

    @property
    def num_samples(self) -> int:
        return next(shape[dim] for (shape, _), dim in zip(self.tensors, self.dims, strict=True) if dim is not None)

    def resized(self, num_samples: int) -> Signature:
        pairs = zip(self.tensors, self.dims, strict=True)
        resized = [(s if dim is None else (*s[:dim], num_samples, *s[dim + 1 :]), dtype) for (s, dtype), dim in pairs]
        return self._replace(tensors=tuple(resized))

    def shapes_alone(self) -> Arguments:
        tensors = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.tensors)
        return Arguments(self.form, tensors, self.dims)

    def __str__(self) -> str:
        return shown_call(self.form, self.tensors) + " that want gradients" * any(self.wants_grad)


class OutputFormError(ValueError):
    """A model's output has another form for inputs of other shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """The stages for inputs of one form.

    Arguments:
        stages: [S].
        specs: [S] of the outputs of each.
        certain: [S] by input of each, whether its gradient always exists; see `presence`.
        float16: names a stage that makes gradients in float16, and where; None: none does, or there is no graph.
        written_buffers: [S] ids of the buffers that a forward changes.
        written_inputs: numbers of the model's inputs that its code changes in place: stages have copies.
        output_form: form of the model's output, from the flat outputs of the last stage.
        digest, guards: see Cut.
        left: attributes and lists in which stages before the last, or code that stages do not run, leave tensors.
    """

    stages: tuple[StageModule, ...]
    specs: OutputSpecs
    certain: Sequence[Sequence[bool]]
    float16: str | None
    written_buffers: tuple[frozenset[int], ...]
    written_inputs: frozenset[int]
    output_form: Form
    digest: Callable[[], str]
    guards: ModelGuards | None
    left: Places


class InferredStages:
    """The stages of a model in one mode, complete, and their outputs for given model inputs.

    Arguments:
        cut: the stages before anything ran.
        example: arguments of the model with which the stages are linked; others have the same form.
        training: whether a graph is built, so that `requires_grad` of the outputs is known.
        loss_slot: for a model that returns its own loss: its number among the flat tensors of the output.
        loss_fn: the loss, which may read tensors that a forward leaves in attributes.

    Attributes:
        example: the stages for the example; others hold the same parameters and buffers.
        joined: [S] processes of each group in which a stage calls its own collective.

    Raises ValueError, with the user's source line, for a stage that runs neither on fake tensors nor on made-up values.
    """

    def __init__(
        self,
        cut: Cut,
        example: Signature,
        *,
        root: nn.Module,
        seeder: Seeder,
        device: torch.device,
        training: bool,
        loss_slot: Callable[[Form], int | None] | None = None,
        loss_fn: object = None,
    ) -> None:
        self._root = root
        self._seeder = seeder
        self._cut = cut
        self._device = device
        self._training = training
        self._loss_slot = loss_slot
        self._loss_fn = loss_fn
        self.example = self._walk(cut, example)
        # The operations and random draws of a module that is not recorded may change when these do.
        modules = {m: None for stage in self.stages for m in stage.module.modules()}
        self._modes = tuple(modules) if training else ()
        self._known: dict[object, list[Inferred]] = {self._key(example): [self.example]}
        self._changes = Changes()
        if training and cut.guards is not None:
            cut.guards.tell()

    @property
    def stages(self) -> tuple[StageModule, ...]:
        return self.example.stages

    @property
    def output_form(self) -> Form:
        return self.example.output_form

    def outputs(self, inputs: Signature) -> OutputSpecs:
        return self.of(inputs).specs

    def of(self, inputs: Signature) -> Inferred:
        """The stages for these inputs, cached by signature, autocast and modes, as long as their guards hold. Raises
        ValueError for inputs that the stages do not accept."""
        key = self._key(inputs)
        is_new = key not in self._known
        self._changes.note(inputs.tensors, ["a non-tensor argument"] if is_new else [])
        if is_new and len(self._known) >= MOST_SIGNATURES:
            del self._known[next(iter(self._known))]
        known = self._known.setdefault(key, [])
        differing: list[str] = []
        for each in known:
            paths = [] if each.guards is None else each.guards.differing()
            if not paths:
                self._changes.note(inputs, [])
                return each
            differing = differing or paths
        self._changes.note(inputs, differing)
        made = self._inferred(inputs)
        known[:] = [made, *known[: _MOST_KNOWN - 1]]
        return made

    def _inferred(self, inputs: Signature) -> Inferred:
        found = self._walk(self._cut.again(inputs.shapes_alone()), inputs)
        if found.output_form != self.output_form:
            raise OutputFormError(
                f"the model returns {found.output_form} for {inputs}, and {self.output_form} for the inputs that it "
                f"was built with (_: a tensor): expected the same form for every batch, or to build with "
                f"example_inputs= of the batches to come"
            )
        for index, (mine, other) in enumerate(zip(self.stages, found.stages, strict=True)):
            _refuse_other_flow(index, mine, other, inputs)
        return found

    def batch_dimensions(self, inputs: Signature) -> list[tuple[int, ...]]:
        """By output of the last stage, the dimensions whose size follows the batch's, tried with two sizes."""
        size = inputs.num_samples
        here = self.outputs(inputs)[-1]
        there = None
        rest_ran = size > 2 and self._known.get(self._key(inputs.resized(size - 1)))  # of an uneven batch
        sizes = (size - 1, size + 1) if rest_ran else (size + 1, size - 1)
        for other in filter(None, (*sizes, 2 * size)):  # the last for members that divide samples evenly
            try:
                there = self.outputs(inputs.resized(other))[-1]
            except ValueError as error:
                if isinstance(error, OutputFormError):
                    raise
                continue
            break
        found: list[tuple[int, ...]] = []
        for number, spec in enumerate(here):
            if there is None:
                grown = [d for d, length in enumerate(spec.shape) if length == size]
            else:
                grown = [d for d, length in enumerate(spec.shape) if length != there[number].shape[d]]
            found.append(tuple(grown))
        return found

    def _key(self, inputs: Signature) -> object:
        autocast = Autocast.now(self._device.type)
        inputs = inputs if self._training else inputs._replace(wants_grad=())
        return inputs, autocast, *(m.training for m in self._modes)

    def _walk(self, cut: Cut, inputs: Signature) -> Inferred:
        grad = torch.enable_grad() if self._training else torch.no_grad()
        stages: list[StageModule] = []
        runs: list[StageRun] = []
        written_buffers: list[frozenset[int]] = []
        memory_written: set[object] = set()
        left: Places = []
        self.joined: list[set[tuple[int, ...]]] = [set() for _ in cut.pieces]
        joined: set[tuple[int, ...]] = set()
        with (
            untouched(self._root, self._loss_fn, device=self._device, buffers=False) as kept,
            evaluating(*(() if self._training else (self._root,))),
            strict_fake_mode(joined),
            grad,
            self._seeder.watch(),
        ):
            before = {m: ({**vars(m)}, {**m._buffers}) for m in self._root.modules()}
            flat = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in inputs.tensors]
            for x, wants in zip(flat, inputs.wants_grad, strict=False):
                x.requires_grad_(wants and self._training)
            for index, piece in enumerate(cut.pieces):
                is_last = index == len(cut.pieces) - 1
                left = kept.new_tensors() if is_last else []
                linked = module, sources = piece.link(stages[-1] if stages else None, index=index, inputs=inputs.form)
                for m in before.keys() & set(module.modules()) & {m for each in stages for m in each.module.modules()}:
                    _put_back(m, *before[m])
                arguments = fresh_leaves(take(sources, flat, [run.outputs for run in runs]))
                with _explained(index, arguments), stand_ins(module, self._device) as written:
                    stage, outputs, changed = first_run(piece, linked, arguments)
                self.joined[index] = {*joined}
                joined.clear()
                _refuse_shared_memory(stage, index, arguments, changed)
                memory_written |= {memory_of(arguments[i]) for i in changed}  # the model's inputs' where they are these
                stages.append(stage)
                runs.append(self._stage_run(stage, arguments, outputs))
                written_buffers.append(frozenset(written))
                if not is_last:
                    _refuse_sparse(stage, runs[-1].outputs)
            made = {(id(held), key) for held, key in kept.new_tensors()}
            left += [(held, key) for held, key in cut.left if (id(held), key) not in made]
        output_form = cut.form_of_output(stages[-1])
        loss_slot = None if self._loss_slot is None else self._loss_slot(output_form)
        names = {id(parameter): name for name, parameter in self._root.named_parameters()}
        places = [float16_gradients(run.outputs, names) for run in runs]
        return Inferred(
            stages=tuple(stages),
            specs=tuple(tuple(map(TensorSpec.of, run.outputs)) for run in runs),
            certain=certain_gradients(runs, loss_slot=loss_slot),
            float16=next((f"stage {index} computes {at}" for index, at in enumerate(places) if at is not None), None),
            written_buffers=tuple(written_buffers),
            written_inputs=cut.written_inputs.union(
                i for i, x in enumerate(flat) if memory_of(x) in memory_written - {None}
            ),
            output_form=output_form,
            digest=cut.digest,
            guards=cut.guards,
            left=left,
        )

    def _stage_run(self, stage: StageModule, arguments: Tensors, outputs: Tensors) -> StageRun:
        trains = any(x.requires_grad for x in (*stage.module.parameters(), *arguments))
        has_drawn = self._seeder.has_drawn()
        if has_drawn and self._training and trains:
            outputs = tuple(map(wanting_gradient, outputs))
        return StageRun(stage.inputs, arguments, outputs, is_typical=not has_drawn)


def _put_back(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    """Reset a module that earlier stages run, too: over processes each stage has its own, with its own caches."""
    vars(module).clear()
    vars(module).update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)


def _refuse_other_flow(index: int, stage: StageModule, other: StageModule, inputs: Signature) -> None:
    mine, its = ([ref for ref in each.inputs if ref.producer != MODEL_INPUT] for each in (stage, other))
    if (its, other.num_outputs) != (mine, stage.num_outputs):
        raise ValueError(
            f"for {inputs}, or for a model that was changed since, stage {index} ({other.name}) takes "
            f"{len(other.inputs)} values and returns {other.num_outputs}, and took {len(stage.inputs)} and returned "
            f"{stage.num_outputs} when the stages were built: expected the same values to flow from stage to stage; "
            f"join varying values into one tensor, or let stages end elsewhere (cut=)"
        )


@contextmanager
def _explained(index: int, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context whose errors become ValueErrors with the stage, its arguments and the user's source line."""
    try:
        with quiet_fakes(), uncompiled(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's code, which will repeat them when it runs
            yield
    except OutputError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in arguments)
        raise ValueError(
            f"stage {index} cannot take ({shapes}){users_line(error)}: {first_line(error)}. Expected "
            f"inputs like those that the model was built for (only the batch size may differ), and a forward whose "
            f"output shapes follow from its input shapes, not from values"
        ) from error


def _refuse_shared_memory(stage: StageModule, index: int, arguments: Tensors, changed: Collection[int]) -> None:
    """ValueError where a stage changes an input in place that shares memory with another: stages get copies."""
    memory = [memory_of(x) for x in arguments]
    for one in sorted(changed):
        other = next((i for i, each in enumerate(memory) if i != one and each == memory[one]), None)
        if other is not None:
            raise ValueError(
                f"stage {index} ({stage.name}) changes its input {one} in place, which shares memory with its input "
                f"{other}: in one process both would change, but a stage gets copies. Expected an operation that is "
                f"not in-place (inplace=False), a clone() where the values part, or both modules on one stage (cut=)"
            )


def _refuse_sparse(stage: StageModule, outputs: Tensors) -> None:
    """OutputError for a tensor to send that has no strides, which a message's layout needs."""
    layout = next((x.layout for x in outputs if x.layout != torch.strided), None)
    if layout is not None:
        raise OutputError(
            f"{stage.end} returns a sparse tensor ({layout}) at the end of a stage: expected dense tensors there; "
            f"return x.to_dense(), or let stages end elsewhere (cut=)"
        )


def size_of(microbatch: Signature, parameters: Sequence[str]) -> Size:
    """Samples, and elements of one sample in the model's first argument with a batch dimension. `parameters`: names in
    the model's signature."""

    def position_of(slot: int) -> int:
        name = argument_name(microbatch.form.paths[slot])
        if (position := re.match(r"input (\d+)", name)) is not None:
            return int(position[1])
        first = re.split(r"[\[.]", name)[0]
        return parameters.index(first) if first in parameters else len(parameters)

    dims = [(slot, dim) for slot, dim in enumerate(microbatch.dims) if dim is not None]
    slot, dim = min(dims, key=lambda each: (position_of(each[0]), each[0]))
    shape, _ = microbatch.tensors[slot]
    return Size(shape[dim], math.prod((*shape[:dim], *shape[dim + 1 :])))

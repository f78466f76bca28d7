"""A rank's worker: runs compute actions and keeps the tensors that flow between them.

The inbox holds tensors that arrived (or that another stage of this rank made), the outbox those to be sent:

    F(s, k): inbox act(p -> s, k) of every producer p -> stage.forward -> act(s -> c, k) for every consumer c
    B(s, k): inbox grad(c -> s, k) of every consumer c -> stage.backward -> grad(s -> p, k) for every producer p
    I(s, k): the same with is_half, which leaves gradients of weights to W(s, k): stage.weight_grad

Consumers on the same ranks share one message, or entry: it stays until the last of them has taken it, and their
gradients are added up before they are sent. A gradient that does not exist is None.

Training and evaluation have a worker each, over the same stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...comm import TensorSpec
from ...partition.model.forms import Tensors
from ...partition.model.units import MODEL_INPUT
from ...schedules import Action, Collective, Message, MessageKind, Op, Schedule
from ...schedules.dependencies import Wire, find_moves
from ...schedules.ir import MOVE_OPS
from ...schedules.messages import STAGE_KINDS
from ...schedules.program import GroupStep, RankProgram
from ..batch.batches import Batch, BatchPart
from ..context import Run
from ..guards.contexts import NOTHING, within
from ..guards.presence import Gradients, pack, unpack
from ..shards.tensor_group import settled
from ..stage.moving import Host
from ..stage.stage import Stage
from ..stage.tokens import PartsOfSequences
from ..stage.wiring import Mode
from ..update.gradients import added
from ..update.rank_update import RankUpdate


@dataclass(frozen=True, slots=True)
class _Ports:
    """Sources and destinations of the tensors of one stage."""

    takes: tuple[Wire, ...]  # wires of activations that it consumes
    # (number among these, position in its message), for each input that another stage makes. Inputs of the model, whose
    # number depends on its arguments, follow after them.
    inputs: tuple[tuple[int, int], ...]
    wants_grad: tuple[bool, ...]  # for each of these
    outputs: tuple[tuple[Wire, tuple[int, ...]], ...]  # wires of its outputs, with their slots
    graded: tuple[bool, ...]  # for each output, whether it may get a gradient
    gradients: tuple[tuple[Wire, tuple[int, ...]], ...]  # wires of gradients of its outputs, with their slots
    # Wires of gradients of its inputs, with (position in its message, input).
    input_gradients: tuple[tuple[Wire, tuple[tuple[int, int], ...]], ...]


def _ports(s: int, wiring: Mode) -> _Ports:
    module = wiring.inference.stages[s]
    acts = [wire for wire in wiring.wires if wire.kind is MessageKind.ACT]
    grads = [wire for wire in wiring.wires if wire.kind is MessageKind.GRAD]
    takes = tuple(wire for wire in acts if s in wire.consumers)
    inputs = [(0, 0) for ref in module.inputs if ref.producer != MODEL_INPUT]
    for number, wire in enumerate(takes):
        for position, i in wiring.inputs(wire, s):
            inputs[i] = (number, position)
    gradients = tuple((wire, wiring.slots[wire]) for wire in grads if wire.producer == s)
    graded = {slot for _, slots in gradients for slot in slots}
    return _Ports(
        takes=takes,
        inputs=tuple(inputs),
        wants_grad=wiring.wants_grad[s][: len(inputs)],
        outputs=tuple((wire, wiring.slots[wire]) for wire in acts if wire.producer == s),
        graded=tuple(slot in graded for slot in range(module.num_outputs)),
        gradients=gradients,
        input_gradients=tuple((wire, wiring.inputs(wire, s)) for wire in grads if s in wire.consumers),
    )


class Worker(ABC):
    """One rank of the pipeline: its stages by number, and its tensors, in one mode."""

    overlaps = False  # whether two actions may run at once

    def __init__(self, run: Run, rank: int, mode: Mode, *, stages: Mapping[int, Stage], updates: RankUpdate) -> None:
        schedule = mode.schedule
        self.rank = rank
        self.outputs: dict[int, Tensors] = {}  # of an evaluated batch, by microbatch
        self._stages = stages
        self._mode = mode
        self.updates = updates
        self._device = run.options.device
        self._seeder = run.seeder
        self._batch_indices = schedule.batch_indices
        self._members = run.layout.place.mesh.context  # that draw the same numbers for a microbatch
        self._parts: PartsOfSequences | None = None
        if schedule.num_slices > 1:
            from ..stage.slices import KVCache  # which other runs need not load

            self._parts = KVCache(schedule.num_slices)
        elif (context := run.context_group) is not None:
            from ..stage.context_parts import ContextAttention

            self._parts = ContextAttention(context, run.root)
        self._last = schedule.num_stages - 1
        self._owner = schedule.owner
        self._ports = {s: _ports(s, mode) for s in stages}
        self._inbox: dict[Message, Gradients] = {}
        self._outbox: dict[Message, Gradients] = {}
        self._taken: dict[Message, int] = {}  # number of consumers that have taken an entry of the inbox, if any
        # Gradients that several stages of the rank make: the number of these that have added to them, and the sums.
        self._sums: dict[Message, tuple[int, list[torch.Tensor | None]]] = {}
        self.batch_gradients: dict[tuple[int, int], torch.Tensor] = {}  # by slot of the model's inputs and microbatch
        self._fused: frozenset[Action] = frozenset()
        self._trains = schedule.trains
        self._split = schedule.split_stages
        self._moves = find_moves(schedule)
        self._host = Host(self._device) if self._moves else None
        self.moved_bytes: dict[int, int] = {}  # by stage, of the largest microbatch's activations when they left

    @property
    def called(self) -> int:
        """Checksum of the modules that have called attention of a context group."""
        return 0 if self._parts is None else self._parts.called

    def begin(self, program: RankProgram) -> None:
        self._fused = program.fused

    def follow(self, schedule: Schedule) -> None:
        """Run the next batch in the order of this schedule, which has the same actions."""
        self._split = schedule.split_stages

    @abstractmethod
    def run(self, action: Action) -> None:
        """Run one action, whose inputs must have arrived."""

    def take_part(self, step: GroupStep | Collective) -> None:
        """Finish an update group's backwards on this rank, or begin a collective that overlaps with compute."""
        if isinstance(step, Collective):
            self.updates.begin(step)
        else:
            self.updates.finish(step)

    def settle(self) -> None:
        self.updates.settle()

    def specs(self, message: Message) -> Sequence[TensorSpec]:
        if message.kind in STAGE_KINDS:
            number, k = divmod(message.index, self._batch_indices)
            batch = self.updates.batches[number]
            inferred = batch.parts[k].inferred
            return self._mode.message_specs(message, inferred)
        return self.updates.specs(message)

    def put(self, message: Message, tensors: Tensors) -> None:
        if message.kind is MessageKind.ACT:
            self._inbox[message] = tensors
        elif message.kind is MessageKind.GRAD:
            self._inbox[message] = unpack(tensors)
        else:
            self.updates.put(message, tensors)

    def take(self, message: Message, specs: Sequence[TensorSpec]) -> Tensors:
        if message.kind not in STAGE_KINDS:
            return self.updates.take(message)
        tensors = self._outbox.pop(message)
        if message.kind is MessageKind.GRAD:
            return pack(tensors, specs, self._device)
        return tensors  # type: ignore[return-value]  # an activation is never None

    def drop(self) -> None:
        self._inbox.clear()
        self._outbox.clear()
        self._taken.clear()
        self._sums.clear()
        self.outputs.clear()
        self.batch_gradients.clear()
        if self._parts is not None:
            self._parts.drop()
        if self._host is not None:
            self._host.drop()
        for stage in self._stages.values():
            stage.drop()

    def _inputs(self, s: int, index: int, part: BatchPart) -> list[torch.Tensor]:
        ports = self._ports[s]
        arrived = [self._take_in(wire, index) for wire in ports.takes]
        inputs: list[torch.Tensor] = []
        for number, position in ports.inputs:
            x = arrived[number][position]
            assert x is not None
            inputs.append(x)
        assert part.inputs is not None, f"microbatch {index} belongs to another data replica"
        return inputs + [part.inputs[slot] for slot in part.inferred.stages[s].model_slots]

    def _take_in(self, wire: Wire, index: int) -> Gradients:
        """Activations of the inbox, for one of their consumers; the last one removes the entry."""
        message, users = wire.message(index), len(wire.consumers)
        if users > 1:
            taken = self._taken.pop(message, 0) + 1
            if taken < users:
                self._taken[message] = taken
                return self._inbox[message]
        return self._inbox.pop(message)

    def _emit_outputs(self, s: int, index: int, outputs: Tensors, specs: Sequence[TensorSpec]) -> None:
        _check_outputs(self._stages[s], outputs, specs)
        for wire, slots in self._ports[s].outputs:
            self._emit(wire.message(index), [outputs[slot] for slot in slots])

    def _emit(self, message: Message, tensors: Gradients) -> None:
        stays = self._owner(message.dst, message.index) == self.rank
        (self._inbox if stays else self._outbox)[message] = tuple(map(settled, tensors))


class TrainingWorker(Worker):
    def _move(self, action: Action) -> None:
        assert self._host is not None
        activations = self._stages[action.stage].moving(action.index)
        if action.op is Op.RELOAD:
            self._host.give_back(activations)
            return
        self.moved_bytes[action.stage] = max(activations.num_bytes, self.moved_bytes.get(action.stage, 0))
        self._host.take(activations)

    def run(self, action: Action) -> None:
        s, op, index = action
        if op in MOVE_OPS:
            self._move(action)
            return
        if op is Op.U:
            self.updates.step(s, index)
            return
        number, k = divmod(index, self._batch_indices)
        batch = self.updates.batches[number]
        if op is Op.W:
            if Action(s, Op.I, index) not in self._fused:
                with batch.autocast.off():
                    self._stages[s].weight_grad(index)
            return
        if self.updates.shards.awaited:
            self.updates.shards.whole(s)
        part = batch.parts[k]
        span = part.span
        self._seeder.begin(step=batch.step, microbatch=k // self._members)
        try:
            if op is Op.F:
                tokens = NOTHING if self._parts is None or span is None else self._parts.forward(s, index, span)
                inputs, wants_grad = self._inputs(s, index, part), self._ports[s].wants_grad
                wants_grad += tuple([batch.wants_grad and x.requires_grad for x in inputs[len(wants_grad) :]])
                is_split = s in self._split and Action(s, Op.I, index) not in self._fused
                with within(batch.autocast.again(), tokens):  # a drain runs after the context of train_step
                    outputs, loss = self._stages[s].forward(
                        index,
                        part.inferred.stages[s],
                        inputs,
                        wants_grad,
                        part.target,
                        version=self.updates.version(s, index),
                        backwards=(2 if is_split else 1) if self._trains(s) else 0,
                        moves=(s, index) in self._moves,
                    )
                if loss is not None:
                    self.updates.note_loss(index, loss)
                else:
                    self._emit_outputs(s, index, outputs, part.inferred.specs[s])
            else:
                self._backward(action, batch, part)
        finally:
            self._seeder.end()

    def _backward(self, action: Action, batch: Batch, part: BatchPart) -> None:
        s, op, index = action
        stage, ports, span = self._stages[s], self._ports[s], part.span
        gradients = self._output_gradients(s, index, len(part.inferred.specs[s]))
        graded = (True,) if s == self._last else ports.graded
        group, is_half = index // batch.group_size, op is Op.I and action not in self._fused
        tokens = NOTHING if self._parts is None or span is None else self._parts.backward(s, index, span)
        with within(batch.autocast.off(), tokens, self.updates.overlapping(action)):
            by_input = stage.backward(index, gradients, graded, autocast=batch.autocast, group=group, is_half=is_half)
        self._emit_gradients(s, index, by_input, part.inferred.certain[s])
        for slot, gradient in zip(part.inferred.stages[s].model_slots, by_input[len(ports.inputs) :], strict=True):
            if gradient is not None:
                key = slot, index % self._batch_indices
                self.batch_gradients[key] = added(self.batch_gradients.get(key), gradient)

    def _output_gradients(self, s: int, index: int, num_outputs: int) -> list[torch.Tensor | None]:
        """By output slot, the sum over its consumers; on the last stage the gradient of the loss."""
        if s == self._last:
            return [self.updates.loss_gradient(index)]
        gradients: list[torch.Tensor | None] = [None] * num_outputs
        for wire, slots in self._ports[s].gradients:
            for slot, gradient in zip(slots, self._inbox.pop(wire.message(index)), strict=True):
                gradients[slot] = added(gradients[slot], gradient)
        return gradients

    def _emit_gradients(self, s: int, index: int, by_input: Gradients, certain: Sequence[bool]) -> None:
        """Emit the input gradients of a backward, summed with those of other stages of this rank."""
        for i, gradient in enumerate(by_input):
            if gradient is None and certain[i]:
                self._stages[s].refuse_lost_gradient(i)
        for wire, positions in self._ports[s].input_gradients:
            message = wire.message(index)
            if len(wire.consumers) == 1:
                self._emit(message, [by_input[i] for _, i in positions])
                continue
            num_parts, total = self._sums.pop(message, (0, [None] * len(self._mode.slots[wire])))
            for position, i in positions:
                total[position] = added(total[position], by_input[i])
            if num_parts + 1 == len(wire.consumers):
                self._emit(message, total)
            else:
                self._sums[message] = num_parts + 1, total


class OverlappingWorker(TrainingWorker):
    """A worker that runs a forward and the backward after it together where the schedule says so, see
    `shards.exchanges`.

        engine    F(s, k) ─────────────────────────> sends of F ──> B(t, j) ──> sends of B
        worker    F with B in its exchanges ──> |                   the rest of B

    The program is the same as without: the forward waits for the inputs of both, and what it makes leaves as soon as it
    ends.
    """

    overlaps = True

    def __init__(self, run: Run, *args: Any, **kwargs: Any) -> None:
        super().__init__(run, *args, **kwargs)
        self._exchanges = run.exchanges
        self._together = run.layout.schedule.together
        self._begun: Action | None = None  # a backward

    def follow(self, schedule: Schedule) -> None:
        super().follow(schedule)
        self._together = schedule.together

    def run(self, action: Action) -> None:
        backward = self._together.get(action)
        if backward is not None:
            run = super().run
            self._exchanges.forward(lambda: run(action), lambda: run(backward))
            self._begun = backward
        elif action == self._begun:
            self._begun = None
            self._exchanges.rest_of_backward()
        else:
            super().run(action)

    def drop(self) -> None:
        self._begun = None
        self._exchanges.drop()
        super().drop()


class EvaluationWorker(Worker):
    def run(self, action: Action) -> None:
        s, _, k = action
        if self.updates.shards.awaited:
            self.updates.shards.whole(s)
        batch = self.updates.batches[0]
        part = batch.parts[k]
        tokens = NOTHING if self._parts is None or part.span is None else self._parts.forward(s, k, part.span)
        self._seeder.begin(step=batch.step, microbatch=k // self._members)
        try:
            with tokens:
                outputs, loss = self._stages[s].evaluate_forward(
                    part.inferred.stages[s], self._inputs(s, k, part), part.target, has_target=batch.has_target
                )
        finally:
            self._seeder.end()
        if loss is not None:
            self.updates.note_loss(k, loss)
        if s == self._last:
            self.outputs[k] = tuple(map(settled, outputs))
        else:
            self._emit_outputs(s, k, outputs, part.inferred.specs[s])


def _check_outputs(stage: Stage, outputs: Tensors, specs: Sequence[TensorSpec]) -> None:
    for slot, (output, spec) in enumerate(zip(outputs, specs, strict=True)):
        if output.shape != spec.shape or output.dtype != spec.dtype:
            raise ValueError(
                f"output {slot} of stage {stage.index} ({stage.name}) is {tuple(output.shape)} {output.dtype}, and was "
                f"{spec.shape} {spec.dtype} when shapes were inferred: expected a module whose output shapes and types "
                f"follow from those of its inputs alone"
            )

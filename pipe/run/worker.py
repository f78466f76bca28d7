"""A rank's worker: carries out compute actions and keeps the tensors that flow between them.

The inbox holds what arrived (or was made by another stage of this rank), the outbox what is to be sent:

    F(s, k): inbox act(p -> s, k) of every producer p -> stage.forward -> act(s -> c, k) for every consumer c
    B(s, k): inbox grad(c -> s, k) of every consumer c -> stage.backward -> grad(s -> p, k) for every producer p
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...comm import TensorSpec
from ...partition.graph.units import MODEL_INPUT, Tensors
from ...schedules import Action, Message, MessageKind, Op, Schedule
from ...schedules.messages import STAGE_KINDS
from ...schedules.program import GroupStep
from ..batch.batches import SUMMARY_SIZE, Batch, summarize_losses
from ..stages.randomness import Seeder
from ..stages.stage import LossValue, Stage
from ..stages.wiring import Wiring
from ..update.updates import Updates


class Worker:
    """One rank of the pipeline: its stages and its tensors."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], *, schedule: Schedule, seeder: Seeder) -> None:
        self.rank = rank
        self.stages = stages
        self.updates: Updates | None = None  # of a stream
        self.batches: dict[int, Batch] = {}  # under way, by number: a flush schedule has one, number 0
        self.outputs: dict[int, Tensors] = {}  # by microbatch, in evaluation
        self._num_microbatches = schedule.num_microbatches
        self._last = schedule.num_stages - 1
        self._loss_owners = schedule.owners[-1]
        self._owner = schedule.owner
        self._seeder = seeder
        self._losses: dict[int, dict[int, LossValue]] = {}  # by update group and microbatch, on the last stage
        self._summaries: dict[int, torch.Tensor] = {}  # of the batch of a flush schedule, by rank of the last stage
        self._inbox: dict[Message, Tensors] = {}
        self._outbox: dict[Message, Tensors] = {}
        self._version: Callable[[int, int], int] = lambda stage, index: 0

    def begin(self, wiring: Wiring, *, training: bool) -> None:
        """Nothing is under way any more."""
        self._wiring, self._training = wiring, training
        self.batches.clear()
        self._inbox.clear()
        self._outbox.clear()
        self._losses.clear()
        self._summaries.clear()
        self.outputs.clear()
        for stage in self.stages.values():
            stage.drop()

    def enter(self, number: int, batch: Batch, *, version: Callable[[int, int], int] | None = None) -> None:
        """A batch comes: its microbatches are number * M, number * M + 1, ...

        Arguments:
            version: (stage, microbatch) -> weight version, in a stream.
        """
        self.batches[number] = batch
        if version is not None:
            self._version = version

    def specs(self, message: Message) -> list[TensorSpec]:
        """What to expect of a message."""
        if message.kind in STAGE_KINDS:
            batch, k = self._at(message.index)
            return self._wiring.message_specs(message, batch.specs[k])
        if self.updates is not None and self._training:
            return self.updates.specs(message)
        return [TensorSpec((SUMMARY_SIZE,), (1,), torch.float64, False)]

    def put(self, message: Message, tensors: Tensors) -> None:
        """A message arrived."""
        if message.kind in STAGE_KINDS:
            self._inbox[message] = tensors
        elif self.updates is not None and self._training:
            self.updates.put(message, tensors)
        else:
            self._summaries[message.src] = tensors[0]

    def take(self, message: Message) -> Tensors:
        """A message to send."""
        if message.kind in STAGE_KINDS:
            return self._outbox.pop(message)
        if self.updates is not None and self._training:
            return self.updates.take(message)
        return (self._summaries[self.rank],)

    def run(self, action: Action) -> None:
        """Carry out one action; its inputs must be there."""
        stage, op, index = action
        if op is Op.U:
            assert self.updates is not None
            self.updates.update(stage, index)
            return
        batch, k = self._at(index)
        self._seeder.begin(step=batch.step, microbatch=k)
        try:
            if op is Op.F:
                self._forward(stage, index)
            else:
                assert op is Op.B, f"{action} got past the check of the schedule"
                self._backward(stage, index)
        finally:
            self._seeder.end()

    def finish(self, step: GroupStep) -> None:
        """The backwards of an update group are through on this rank."""
        assert self.updates is not None
        self.updates.finish(step)
        self._losses.pop(step.index, None)

    def _at(self, index: int) -> tuple[Batch, int]:
        """The batch of a microbatch, and its number in it."""
        number, k = divmod(index, self._num_microbatches)
        return self.batches[number], k

    def _forward(self, s: int, index: int) -> None:
        stage, wiring = self.stages[s], self._wiring
        batch, k = self._at(index)
        specs = batch.specs[k]
        module = stage.train if self._training else stage.evaluate
        arrived = {p: self._inbox.pop(Message(MessageKind.ACT, p, s, index)) for p in wiring.producers[s]}
        inputs: list[torch.Tensor] = []
        wants_grad: list[bool] = []
        for ref in module.inputs:
            if ref.producer == MODEL_INPUT:
                x = batch.inputs[ref.slot][k]
                assert x is not None, f"microbatch {k} belongs to another data replica"
                inputs.append(x)
                wants_grad.append(False)
            else:
                inputs.append(arrived[ref.producer][wiring.acts[ref.producer, s].index(ref.slot)])
                wants_grad.append(specs[ref.producer][ref.slot].requires_grad)
        target = batch.targets[k]
        if self._training:
            outputs, loss = stage.forward(index, inputs, wants_grad, target, version=self._version(s, index))
        else:
            outputs, loss = stage.evaluate_forward(inputs, target)
        if s == self._last:
            if loss is not None:
                self._note_loss(index, loss)
            if not self._training:
                self.outputs[k] = outputs
            return
        _check_outputs(stage, outputs, specs[s])
        for c in wiring.consumers[s]:
            self._emit(Message(MessageKind.ACT, s, c, index), tuple(outputs[slot] for slot in wiring.acts[s, c]))

    def _note_loss(self, index: int, loss: LossValue) -> None:
        """Behind the last one of an update group that runs here, they are summed up."""
        batch, k = self._at(index)
        group = index // batch.group_size
        losses = self._losses.setdefault(group, {})
        losses[k] = loss
        first = group * batch.group_size % self._num_microbatches
        owners = self._loss_owners
        if len(losses) < sum(1 for j in range(first, first + batch.group_size) if owners[j % len(owners)] == self.rank):
            return
        summary = summarize_losses(losses, batch, group=k // batch.group_size)
        if self.updates is not None and self._training:
            self.updates.put_loss(group, summary)
        else:
            self._summaries[self.rank] = summary

    def _backward(self, s: int, index: int) -> None:
        stage, wiring = self.stages[s], self._wiring
        batch, k = self._at(index)
        group = index // batch.group_size
        gradients: list[torch.Tensor | None]
        if s == self._last:
            value, count = self._losses[group][k]
            # Of (sum, count) losses the count of the whole group is known at its end only: until then, 1 / samples.
            weight = batch.weights[k] if count is None else 1.0 / batch.group_samples(k // batch.group_size)
            gradients = [torch.full_like(value, weight)]
        else:
            gradients = [None] * len(batch.specs[k][s])
            for c in wiring.consumers[s]:
                if not wiring.grads[s, c]:
                    continue
                arrived = self._inbox.pop(Message(MessageKind.GRAD, c, s, index))
                for slot, gradient in zip(wiring.grads[s, c], arrived, strict=True):
                    known = gradients[slot]
                    gradients[slot] = gradient if known is None else known + gradient
        by_input = stage.backward(index, gradients, group=group)
        for p in wiring.producers[s]:
            if not wiring.grads[p, s]:
                continue
            by_slot = {
                ref.slot: g
                for ref, g in zip(stage.train.inputs, by_input, strict=True)
                if ref.producer == p and g is not None
            }
            self._emit(Message(MessageKind.GRAD, s, p, index), tuple(by_slot[slot] for slot in wiring.grads[p, s]))

    def _emit(self, message: Message, tensors: Tensors) -> None:
        """To a stage of this rank it goes straight; else it waits to be sent."""
        stays = self._owner(message.dst, message.index) == self.rank
        (self._inbox if stays else self._outbox)[message] = tensors

    @property
    def loss_parts(self) -> Mapping[int, torch.Tensor]:
        """What is known here of the losses of a flush schedule's batch, by rank of the last stage."""
        return self._summaries


def _check_outputs(stage: Stage, outputs: Tensors, specs: Sequence[TensorSpec]) -> None:
    """What is sent must fit the buffers of whoever receives it."""
    for slot, (output, spec) in enumerate(zip(outputs, specs, strict=True)):
        if output.shape != spec.shape or output.dtype != spec.dtype:
            raise ValueError(
                f"output {slot} of stage {stage.index} ({stage.name}) is {tuple(output.shape)} {output.dtype}, and was "
                f"{spec.shape} {spec.dtype} when shapes were inferred: expected a module whose output shapes and types "
                f"follow from those of its inputs alone"
            )

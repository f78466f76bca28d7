"""A rank's worker: carries out compute actions and keeps the tensors that flow between them.

The inbox holds what arrived (or was made by another stage of this rank), the outbox what is to be sent:

    F(s, k): inbox act(p -> s, k) of every producer p -> stage.forward -> act(s -> c, k) for every consumer c
    B(s, k): inbox grad(c -> s, k) of every consumer c -> stage.backward -> grad(s -> p, k) for every producer p
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..comm import TensorSpec
from ..partition.trace import MODEL_INPUT
from ..schedules import Action, Message, MessageKind, Op
from .batches import summarize_losses
from .randomness import Seeder
from .stage import LossValue, Stage, Tensors
from .wiring import OutputSpecs, Wiring


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch, cut into M microbatches.

    Arguments:
        inputs: [num_inputs][M] tensors.
        targets: [M], or None without a target.
        specs: [M] output specs of all stages.
        weights: [M], n_k / N: each microbatch's share of the samples.
        step: number of this batch, for random numbers and reports.
    """

    inputs: Sequence[Sequence[torch.Tensor]]
    targets: Sequence[object]
    specs: Sequence[OutputSpecs]
    weights: Sequence[float]
    step: int

    @property
    def num_microbatches(self) -> int:
        """M."""
        return len(self.weights)

    @property
    def num_samples(self) -> int:
        """N."""
        return sum(len(x) for x in self.inputs[0])


class Worker:
    """One rank of the pipeline: its stages and its tensors."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], *, num_stages: int, seeder: Seeder) -> None:
        self.rank = rank
        self.stages = stages
        self.losses: dict[int, LossValue] = {}  # by microbatch, on the rank of the last stage
        self._summary: torch.Tensor | None = None  # see summarize_losses
        self.outputs: dict[int, Tensors] = {}  # by microbatch, in evaluation
        self._last = num_stages - 1
        self._seeder = seeder
        self._inbox: dict[Message, Tensors] = {}
        self._outbox: dict[Message, Tensors] = {}

    def begin(self, batch: Batch, wiring: Wiring, *, training: bool) -> None:
        """A new batch: nothing of the one before is left."""
        self._batch, self._wiring, self._training = batch, wiring, training
        self._inbox.clear()
        self._outbox.clear()
        self.losses.clear()
        self._summary = None
        self.outputs.clear()
        for stage in self.stages.values():
            stage.drop()

    def specs(self, message: Message) -> list[TensorSpec]:
        """What to expect of a message."""
        if message.kind is MessageKind.LOSS:
            return [TensorSpec((5,), (1,), torch.float64, False)]
        return self._wiring.message_specs(message, self._batch.specs[message.index])

    def put(self, message: Message, tensors: Tensors) -> None:
        """A message arrived."""
        if message.kind is MessageKind.LOSS:
            self._summary = tensors[0]
        else:
            self._inbox[message] = tensors

    def take(self, message: Message) -> Tensors:
        """A message to send."""
        if message.kind is MessageKind.LOSS:
            summary = self.loss_summary()
            assert summary is not None
            return (summary,)
        return self._outbox.pop(message)

    def run(self, action: Action) -> None:
        """Carry out one compute action; its inputs must be there."""
        self._seeder.begin(step=self._batch.step, microbatch=action.index)
        try:
            if action.op is Op.F:
                self._forward(action.stage, action.index)
            else:
                assert action.op is Op.B, f"{action} got past the check of the schedule"
                self._backward(action.stage, action.index)
        finally:
            self._seeder.end()

    def _forward(self, s: int, k: int) -> None:
        stage, wiring, batch = self.stages[s], self._wiring, self._batch
        specs = batch.specs[k]
        face = stage.train if self._training else stage.evaluate
        arrived = {p: self._inbox.pop(Message(MessageKind.ACT, p, s, k)) for p in wiring.producers[s]}
        inputs: list[torch.Tensor] = []
        wants_grad: list[bool] = []
        for ref in face.inputs:
            if ref.producer == MODEL_INPUT:
                x = batch.inputs[ref.slot][k]
                inputs.append(x)
                wants_grad.append(False)
            else:
                inputs.append(arrived[ref.producer][wiring.acts[ref.producer, s].index(ref.slot)])
                wants_grad.append(specs[ref.producer][ref.slot].requires_grad)
        target = batch.targets[k]
        if self._training:
            outputs, loss = stage.forward(k, inputs, wants_grad, target)
        else:
            outputs, loss = stage.evaluate_forward(inputs, target)
        if s == self._last:
            if loss is not None:
                self.losses[k] = loss
            if not self._training:
                self.outputs[k] = outputs
            return
        _check_outputs(stage, outputs, specs[s])
        for c in wiring.consumers[s]:
            self._emit(Message(MessageKind.ACT, s, c, k), tuple(outputs[slot] for slot in wiring.acts[s, c]))

    def _backward(self, s: int, k: int) -> None:
        stage, wiring, batch = self.stages[s], self._wiring, self._batch
        gradients: list[torch.Tensor | None]
        if s == self._last:
            value, count = self.losses[k]
            # Of (sum, count) losses the count of the whole batch is known at its end only: until then, 1 / samples.
            weight = batch.weights[k] if count is None else 1.0 / batch.num_samples
            gradients = [torch.full_like(value, weight)]
        else:
            gradients = [None] * len(batch.specs[k][s])
            for c in wiring.consumers[s]:
                if not wiring.grads[s, c]:
                    continue
                arrived = self._inbox.pop(Message(MessageKind.GRAD, c, s, k))
                for slot, gradient in zip(wiring.grads[s, c], arrived, strict=True):
                    known = gradients[slot]
                    gradients[slot] = gradient if known is None else known + gradient
        by_input = stage.backward(k, gradients)
        for p in wiring.producers[s]:
            if not wiring.grads[p, s]:
                continue
            by_slot = {
                ref.slot: g
                for ref, g in zip(stage.train.inputs, by_input, strict=True)
                if ref.producer == p and g is not None
            }
            self._emit(Message(MessageKind.GRAD, s, p, k), tuple(by_slot[slot] for slot in wiring.grads[p, s]))

    def _emit(self, message: Message, tensors: Tensors) -> None:
        """To a stage of this rank it goes straight; else it waits to be sent."""
        (self._inbox if message.dst in self.stages else self._outbox)[message] = tensors

    def loss_summary(self) -> torch.Tensor | None:
        """What is known of the batch's losses here: on the last stage its own, elsewhere what it sent."""
        if self._summary is None and self.losses:
            losses = [self.losses[k] for k in range(self._batch.num_microbatches)]
            self._summary = summarize_losses(losses, self._batch.weights, step=self._batch.step)
        return self._summary


def _check_outputs(stage: Stage, outputs: Tensors, specs: Sequence[TensorSpec]) -> None:
    """What is sent must fit the buffers of whoever receives it."""
    for slot, (output, spec) in enumerate(zip(outputs, specs, strict=True)):
        if output.shape != spec.shape or output.dtype != spec.dtype:
            raise ValueError(
                f"output {slot} of stage {stage.index} ({stage.name}) is {tuple(output.shape)} {output.dtype}, and was "
                f"{spec.shape} {spec.dtype} when shapes were inferred: expected a module whose output shapes and types "
                f"follow from those of its inputs alone"
            )

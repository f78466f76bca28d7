"""Evaluation: forwards alone, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from ..comm import Collectives, Guard
from ..schedules import Schedule
from .batch.batches import join_outputs
from .batch.reader import BatchReader
from .batch.results import EvalResult
from .run.engine import Engine
from .stages.randomness import Seeder
from .stages.shapes import InferredStages, Signature
from .stages.unchanged import Unchanged
from .training import Training
from .update.interface import Programs
from .update.rank_update import RankUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """The way of batches of one number of microbatches.

    Arguments:
        engine: of workers that evaluate, with the transports and recorders of the ones that train.
        ranks: what is known of the losses, by local rank.
        programs: of a batch, by local rank.
    """

    engine: Engine
    ranks: Sequence[RankUpdate]
    programs: Programs
    reader: BatchReader


class Evaluation:
    """Runs batches forwards.

    Arguments:
        forwards: (M, whether there is a target and so a loss) -> what runs such a batch.
        schedule: of training: a batch of fewer samples than its M makes fewer microbatches.
        example: the inputs of a microbatch.
        unchanged: what the user may not change.
        modules: that run, of this process.
        training: drained before; it counts the steps.
        num_replicas: of the data axis, each with a batch of its own.
    """

    def __init__(
        self,
        forwards: Callable[[int, bool], Forwards],
        *,
        seeder: Seeder,
        unchanged: Unchanged,
        schedule: Schedule,
        inference: InferredStages,
        example: Signature,
        modules: Sequence[nn.Module],
        training: Training,
        guard: Guard,
        collectives: Collectives,
        num_replicas: int,
        has_loss: bool,
    ) -> None:
        self._forwards = cache(forwards)
        self._seeder = seeder
        self._num_microbatches = schedule.num_microbatches
        self._least = max(map(len, schedule.owners))  # every replica of a stage has something to do
        self._inference = inference
        self._example = example
        self._modules = modules
        self._training = training
        self._guard = guard
        self._collectives = collectives
        self._num_replicas = num_replicas
        self._has_loss = has_loss
        self._unchanged = unchanged
        self._dimensions: list[int | None] | None = None

    def step(self, arguments: Sequence[Any]) -> EvalResult:
        """See PipelineModule.eval_step."""
        return self._run(arguments, has_target=self._has_loss)

    def predict(self, inputs: Sequence[Any]) -> object:
        """See PipelineModule.predict."""
        return self._run(inputs, has_target=False).output

    def join(self, columns: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor | list[torch.Tensor]]:
        """Flat outputs of a batch.

        Arguments:
            columns: by output, those of its microbatches.
        """
        if self._dimensions is None:
            with _evaluating(self._modules):
                self._dimensions = self._inference.batch_dimensions(self._example)
        return [join_outputs(parts, dim) for parts, dim in zip(columns, self._dimensions, strict=True)]

    def _run(self, arguments: Sequence[Any], *, has_target: bool) -> EvalResult:
        num_microbatches = self._microbatches_for(arguments)
        forwards = self._forwards(num_microbatches, has_target)
        batch = forwards.reader.read(arguments, step=self._training.num_steps)
        with self._guard.together():
            self._unchanged.check(training=False)
        self._training.drain()
        engine = forwards.engine
        for rank, local in zip(forwards.ranks, engine.ranks, strict=True):
            rank.enter(batch)
            local.recorder.begin()
        try:
            with _evaluating(self._modules), self._guard.together(), self._seeder.call():
                engine.run(forwards.programs)
            outputs = {k: flat for local in engine.ranks for k, flat in local.worker.outputs.items()}
        finally:
            engine.drop()
        loss = forwards.ranks[0].total(0)[0].mean if has_target else None
        output = None
        if outputs:
            columns = list(zip(*(outputs[k] for k in sorted(outputs)), strict=True))
            output = self._inference.output_form.assemble(self.join(columns))
        return EvalResult(loss=loss, output=output)

    def _microbatches_for(self, arguments: Sequence[Any]) -> int:
        """M, or fewer for a batch of fewer samples; the same on every rank. Collective over data replicas."""
        first, most = arguments[0] if arguments else None, self._num_microbatches // self._num_replicas
        fitting = min(len(first), most) if isinstance(first, torch.Tensor) and first.dim() else most
        if self._num_replicas > 1:
            with self._guard.together():
                fitting = min(self._collectives.gather(fitting, what="agreeing on the microbatches of an evaluation"))
        return max(fitting * self._num_replicas, self._least)


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within: all parts of the modules are in evaluation mode."""
    flags = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in flags:
        part.training = False
    try:
        yield
    finally:
        for part, training in flags:
            part.training = training

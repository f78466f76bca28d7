"""Evaluation: forwards alone, in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..comm import Guard
from .batch.batches import join_tensors
from .batch.reader import BatchReader
from .batch.results import EvalResult
from .run.engine import Engine
from .stages.build import CutModel
from .training import Training
from .update.flush import FlushRank
from .update.interface import Programs


class Evaluation:
    """Runs batches forwards.

    Arguments:
        engine: of workers that evaluate, with the transports and recorders of the ones that train.
        ranks: what is known of the losses, by local rank.
        programs: of a batch, by local rank.
        modules: that run, of this process.
        training: drained before; it counts the steps.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        ranks: Sequence[FlushRank],
        programs: Programs,
        modules: Sequence[nn.Module],
        reader: BatchReader,
        parts: CutModel,
        training: Training,
        guard: Guard,
        has_loss: bool,
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._programs = programs
        self._modules = modules
        self._reader = reader
        self._parts = parts
        self._training = training
        self._guard = guard
        self._has_loss = has_loss

    def step(self, arguments: Sequence[Any]) -> EvalResult:
        """See PipelineModule.eval_step."""
        batch = self._reader.read(arguments, step=self._training.num_steps)
        self._training.drain()
        for rank, local in zip(self._ranks, self._engine.ranks, strict=True):
            rank.enter(batch)
            local.recorder.begin()
        try:
            with _evaluating(self._modules), self._guard.together():
                self._engine.run(self._programs)
            outputs = {k: flat for local in self._engine.ranks for k, flat in local.worker.outputs.items()}
        finally:
            self._engine.drop()
        loss = self._ranks[0].total(0)[0].mean if self._has_loss else None
        output = None
        if outputs:
            columns = zip(*(outputs[k] for k in sorted(outputs)), strict=True)
            output = self._parts.output([join_tensors(column) for column in columns], training=False)
        return EvalResult(loss=loss, output=output)


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

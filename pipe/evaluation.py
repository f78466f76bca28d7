"""Evaluation: forwards alone, in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..comm import Guard
from .batch.batches import join_tensors
from .batch.reader import BatchReader
from .batch.results import EvalResult
from .run.engine import Engine
from .stages.build import CutModel
from .training import Training
from .update.interface import Programs
from .update.rank_update import RankUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Runs batches forwards.

    Arguments:
        engine: of workers that evaluate, with the transports and recorders of the ones that train.
        ranks: what is known of the losses, by local rank.
        programs: of a batch, by local rank.
        modules: that run, of this process.
        training: drained before; it counts the steps.
    """

    engine: Engine
    ranks: Sequence[RankUpdate]
    programs: Programs
    modules: Sequence[nn.Module]
    reader: BatchReader
    parts: CutModel
    training: Training
    guard: Guard
    has_loss: bool

    def step(self, arguments: Sequence[Any]) -> EvalResult:
        """See PipelineModule.eval_step."""
        batch = self.reader.read(arguments, step=self.training.num_steps)
        self.training.drain()
        for rank, local in zip(self.ranks, self.engine.ranks, strict=True):
            rank.enter(batch)
            local.recorder.begin()
        try:
            with _evaluating(self.modules), self.guard.together():
                self.engine.run(self.programs)
            outputs = {k: flat for local in self.engine.ranks for k, flat in local.worker.outputs.items()}
        finally:
            self.engine.drop()
        loss = self.ranks[0].total(0)[0].mean if self.has_loss else None
        output = None
        if outputs:
            columns = zip(*(outputs[k] for k in sorted(outputs)), strict=True)
            output = self.parts.output([join_tensors(column) for column in columns], training=False)
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

"""Pipelines of stages that sleep: any number of ranks on a few cores, with real processes and real messages."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from ...pipe import PipelineModule
from ...pipe.batch.results import StepResult
from ...schedules import Schedule
from ..bench.models import TINY_WIDTH, SleepingStage
from .equal_stages import costs_of


class SleepingPipe:
    """A pipeline of sleeping stages over the processes of this job, and the batch that it runs."""

    def __init__(self, schedule: Schedule) -> None:
        costs = costs_of(schedule).table(num_stages=schedule.num_stages)
        self.schedule = schedule
        self._batch = (torch.ones(schedule.num_microbatches, TINY_WIDTH),) * 2
        self.pipe = PipelineModule(
            stages=[SleepingStage(f, b) for f, b in zip(costs.forward, costs.backward, strict=True)],
            schedule=schedule,
            loss_fn=F.mse_loss,
            # a stream updates inside the pipeline: with as little as there is
            optimizer=_sgd if schedule.is_asynchronous else None,
            example_inputs=self._batch[:1],
        )

    def step(self) -> StepResult:
        """One batch, to its end on this rank."""
        if self.schedule.is_asynchronous:
            return self.pipe.train_step(*self._batch)
        result = self.pipe.forward_backward(*self._batch)
        for parameter in self.pipe.parameters():
            parameter.grad = None
        return result

    def run(self, num_batches: int) -> float:
        """Seconds a batch of many in a row, from this rank's return from one step to its last return."""
        self.step()
        began = time.perf_counter()
        for _ in range(num_batches):
            self.step()
        return (time.perf_counter() - began) / num_batches

    def close(self) -> None:
        """Drain and let go."""
        self.pipe.close()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6)

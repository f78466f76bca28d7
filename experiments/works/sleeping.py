"""Pipelines of stages that sleep: any number of ranks on a few cores, with real processes and real messages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...pipe import PipelineModule
from ...pipe.batch.results import StepResult
from ...schedules import Costs, Schedule
from ..bench.models import TINY_WIDTH, SleepingStage
from .equal_stages import costs_of


@contextmanager
def kept_groups() -> Iterator[Callable[[], None]]:
    """Pipelines that come one after the other use the same process groups; yields what to call in front of each.

    To make the groups of a pipeline takes some 200 round trips: 20 s and more over a link of 50 ms. A pipeline that is
    closed leaves nothing under way in them. All are over with the job.
    """
    make = dist.new_group
    made: dict[tuple[object, ...], dist.ProcessGroup] = {}
    wanted: Counter[tuple[object, ...]] = Counter()

    def new_group(members: Sequence[int], *, backend: str, timeout: object) -> dist.ProcessGroup:
        key = *members, backend
        wanted[key] += 1
        place = *key, wanted[key]
        if place not in made:
            made[place] = make(list(members), backend=backend, timeout=timeout)
        return made[place]

    with patch.multiple(dist, new_group=new_group, destroy_process_group=lambda group: None):
        yield wanted.clear


class SleepingPipe:
    """A pipeline of sleeping stages over the processes of this job, and the batch that it runs.

    Arguments:
        given: seconds of stage actions; None: those of equal stages.
    """

    def __init__(self, schedule: Schedule, given: Costs | None = None) -> None:
        costs = (given or costs_of(schedule)).table(num_stages=schedule.num_stages)
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

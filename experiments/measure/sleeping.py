"""Pipelines of stages that sleep, and actions that sleep, for given seconds.

Any number of ranks so run on a few cores, with real processes and real messages. In `sleeping_side` the stages sleep in
their forward and backward. `ours_asleep` and `put_asleep` make the actions of both sides sleep around almost no work,
so that I and W have separate seconds: each action of this runtime's worker, and the three calls of a stage of
torch.distributed.pipelining.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage

from ...pipe.run.worker import TrainingWorker
from ...schedules import Action, Costs, Op, Schedule
from ...schedules.timing.costs import CostTable
from .equal_stages import costs_of
from .models import TINY_WIDTH, SleepingStage, StagesProblem, sleep_until
from .sides import OurSide


def sleeping_side(schedule: Schedule, given: Costs | None = None) -> OurSide:
    """A pipeline of sleeping stages over the processes of this job, with its batch; `given`: costs (None: equal)."""
    costs = (given or costs_of(schedule)).table(num_stages=schedule.num_stages)
    batch = torch.ones(schedule.num_microbatches, TINY_WIDTH)
    problem = StagesProblem(
        stages=[SleepingStage(f, b) for f, b in zip(costs.column(Op.F), costs.column(Op.B), strict=True)],
        inputs=batch,
        target=batch,
        loss_fn=F.mse_loss,
        # a stream updates inside the pipeline, here with the cheapest optimizer
        optimizer=partial(torch.optim.SGD, lr=1e-6) if schedule.is_asynchronous else None,
        boundary=batch[:1],
    )
    return OurSide.of_schedule(schedule, problem)


@contextmanager
def ours_asleep(table: CostTable) -> Iterator[None]:
    """Inside, each action of this process's ranks takes the seconds of `table`; updates take their own time."""
    run = TrainingWorker.run

    def slow(worker: TrainingWorker, action: Action) -> None:
        end = time.perf_counter() + (0.0 if action.op is Op.U else table.of(action.op, action.stage, action.index))
        run(worker, action)
        sleep_until(end)

    with patch.object(TrainingWorker, "run", slow):
        yield


def put_asleep(stage: PipelineStage, table: CostTable) -> None:
    """Make each action of a torch stage take the seconds of `table`, a whole backward those of I and W."""
    forward, backward, weight = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk
    index = stage.stage_index

    def slow(call: Callable[..., Any], *ops: Op) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            end = time.perf_counter() + sum(table.of(op, index, 0) for op in ops)
            result = call(*args, **kwargs)
            sleep_until(end)
            return result

        return run

    def any_backward(*args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        ops = (Op.I, Op.W) if full_backward else (Op.I,)
        return slow(backward, *ops)(*args, full_backward=full_backward, **kwargs)

    own: Any = stage
    own.forward_one_chunk = slow(forward, Op.F)
    own.backward_one_chunk = any_backward
    own.backward_weight_one_chunk = slow(weight, Op.W)

"""Actions that take as long as they are told: the work of a microbatch is next to nothing, and the rest of it sleep.

Unlike a stage that sleeps in its own forward and backward, I and W take times of their own here, on both sides alike:
around each action of this runtime's worker, and around each of the three of a stage of torch.distributed.pipelining.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.pipelining import PipelineStage

from ...pipe.run.worker import TrainingWorker
from ...schedules import Action, Op
from ...schedules.timing.costs import CostTable
from .models import sleep_until


@contextmanager
def ours_asleep(table: CostTable) -> Iterator[None]:
    """Within: each action of this process's ranks takes the seconds of `table`, updates their own time."""
    run = TrainingWorker.run

    def slow(worker: TrainingWorker, action: Action) -> None:
        end = time.perf_counter() + (0.0 if action.op is Op.U else table.of(action.op, action.stage, action.index))
        run(worker, action)
        sleep_until(end)

    with patch.object(TrainingWorker, "run", slow):
        yield


def put_asleep(stage: PipelineStage, table: CostTable) -> None:
    """From now on each action of a stage of torch's takes the seconds of `table`; a whole backward those of I and W."""
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

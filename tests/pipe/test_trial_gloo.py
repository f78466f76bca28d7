"""Trials of plans over processes: training is the same with and without, and a failure on one rank is told on all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from support.trials import fails, make_batch, make_pipe, profiled
from torch import Tensor

from stagewright.partition import Plan

Trained = tuple[list[float], dict[str, Tensor], list[Any], str]


def train_with_and_without() -> tuple[Trained, Trained]:
    return train(1), train(0)


def train(trials: int) -> Trained:
    groups = len(dist.distributed_c10d._world.pg_map)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    with profiled():
        pipe = make_pipe(trials=trials, num_microbatches=4)
        losses = [pipe.train_step(*make_batch(step)).loss for step in range(3)]
    drawn = [torch.rand(2).tolist(), random.random(), np.random.rand()]
    state, found = pipe.full_state_dict(), pipe.plan
    drawn.append(len(dist.distributed_c10d._world.pg_map) - groups)
    assert found is not None
    pipe.close()
    return [loss for loss in losses if loss is not None], state, drawn, found.to_json()


@pytest.mark.thorough
def test_training_is_the_same_to_the_last_bit(gloo: Pool) -> None:
    with_trial, without = zip(*gloo.run(train_with_and_without, ranks=2), strict=True)
    for one, other in zip(with_trial, without, strict=True):
        assert one[0] == other[0]
        assert len(one[0]) == 3
        assert one[1].keys() == other[1].keys()
        assert all(torch.equal(one[1][name], value) for name, value in other[1].items())
        assert one[2] == other[2]
        assert one[3] == with_trial[0][3]  # the same plan on every rank
        tried, untried = (Plan.from_json(each[3]) for each in (one, other))
        assert [stage.nodes for stage in tried.stages] == [stage.nodes for stage in untried.stages]
        assert any(note.startswith("tried for ") for note in tried.notes)
        assert not any("tried for " in note for note in untried.notes)


def train_with_failures() -> tuple[str, ...]:
    """Outcome of a trial whose rank 1 has no memory left, of one in which the user's code fails there, and of one that
    the user interrupts there."""
    lost = torch.OutOfMemoryError("CUDA out of memory")
    return tuple(_with_a_failure(each) for each in (lost, KeyError("of the user"), KeyboardInterrupt("by hand")))


def _with_a_failure(error: BaseException) -> str:
    with profiled():
        pipe = make_pipe(optimizer=fails(error, on=1), num_microbatches=4, trials=1)
        try:
            pipe.build(*make_batch())
        except BaseException as failed:
            return f"{type(failed).__name__}: {failed}"
        assert pipe.plan is not None
        return "; ".join(pipe.plan.notes)


def test_a_failure_on_one_rank_is_told_on_all(gloo: Pool) -> None:
    of_memory, own, interrupted = zip(*gloo.run(train_with_failures, ranks=2), strict=True)
    assert own[1] == "KeyError: 'of the user'"
    assert interrupted[1] == "KeyboardInterrupt: by hand"
    for each, cause in ((own[0], "KeyError: 'of the user'"), (interrupted[0], "KeyboardInterrupt: by hand")):
        assert each.count("cause: ") == 1
        assert each.endswith(f"cause: rank 1 failed: {cause}")
    for each in of_memory:
        assert "out of memory on rank 1: CUDA out of memory" in each

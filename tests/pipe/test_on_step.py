"""`on_step`: each step is told once, in order, with its own loss, wherever that became known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import Pool
from support.small import X, Y, make, stream

from stagewright.pipe import StepRecord


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return X + step, Y


def steps_and_losses(records: list[StepRecord]) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in records]


def test_a_step_is_told_within_its_call_and_says_what_it_was() -> None:
    told: list[StepRecord] = []
    halving = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    pipe = make(on_step=told.append, max_grad_norm=1.0, lr_scheduler=halving)
    for step in range(3):
        result = pipe.train_step(*batch(step))
        assert (told[-1].loss, told[-1].grad_norm) == (result.loss, result.grad_norm)
    assert [record.step for record in told] == [0, 1, 2]
    assert [record.learning_rates for record in told] == [(0.1,), (0.05,), (0.025,)]
    assert {(record.num_samples, record.rank) for record in told} == {(8, 0)}
    assert all(record.seconds > 0 and record.peak_memory_bytes > 2**20 for record in told)


def test_batches_of_a_stream_are_told_with_their_own_losses() -> None:
    told: list[StepRecord] = []
    pipe = stream(on_step=told.append)
    results = [pipe.train_step(*batch(step)) for step in range(4)] + pipe.flush()
    assert steps_and_losses(told) == [(result.loss_step, result.loss) for result in results]


@pytest.mark.parametrize("build", [make, stream])
def test_verifying_and_accumulating_are_no_steps(build: Callable[..., Any]) -> None:
    told: list[StepRecord] = []
    pipe = build(on_step=told.append, verify=True)
    pipe.train_step(*batch(0))
    pipe.verify(*batch(1))
    pipe.train_step(*batch(1))
    pipe.flush()
    assert [record.step for record in told] == [0, 1]
    if build is make:
        pipe.forward_backward(*batch(2))
        assert len(told) == 2


def test_a_run_that_goes_on_from_a_checkpoint_goes_on_counting(tmp_path: Path) -> None:
    told: list[StepRecord] = []
    pipe = stream(on_step=told.append)
    for step in range(2):
        pipe.train_step(*batch(step))
    pipe.save(tmp_path)
    pipe.train_step(*batch(2))
    pipe.load(tmp_path)  # the third step is drained, then forgotten
    pipe.train_step(*batch(2))
    pipe.flush()
    assert [record.step for record in told] == [0, 1, 2, 2]
    assert told[2].loss == told[3].loss


def test_what_is_no_callable_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on_step=3: expected a callable; on_step=lambda record"):
        make(on_step=3)


def _told(end: str) -> tuple[int, list[tuple[int, float]], set[int]]:
    """Steps told before the end, all steps with their losses, and ranks that were named."""
    told: list[StepRecord] = []
    pipe = stream(on_step=told.append)
    for step in range(4):
        pipe.train_step(*batch(step))
    before = len(told)
    getattr(pipe, end)(*([X, Y] if end == "eval_step" else []))
    pipe.close()
    return before, steps_and_losses(told), {record.rank for record in told}


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["flush", "close", "eval_step"])
def test_every_process_is_told_every_step_however_it_ends(gloo: Pool, end: str) -> None:
    """When the last call returns, rank 0 does not know of the batches that are under way."""
    told: list[StepRecord] = []
    pipe = stream(on_step=told.append)
    for step in range(4):
        pipe.train_step(*batch(step))
    first, last = gloo.run(_told, ranks=2, args=(end,))
    assert first[0] < 4
    assert [steps for _, steps, _ in (first, last)] == [steps_and_losses(told)] * 2
    assert [ranks for _, _, ranks in (first, last)] == [{0}, {1}]

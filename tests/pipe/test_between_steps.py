"""Nothing of one step, failed or not, is left for the next one; what has to move on moves on."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.small import WIDTH, X, Y, make, stream
from torch import Tensor, nn

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule


class Failing:
    """A loss that raises at its n-th call, counted from 0."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("a broken sample")
        return F.mse_loss(output, target)


def under_way(pipe: PipelineModule) -> list[object]:
    workers = [one.worker for one in pipe._building.built("the engine").engine.ranks]
    stages = [stage for worker in workers for stage in worker._stages.values()]
    held: list[Any] = [table for worker in workers for table in (worker._inbox, worker._outbox, worker.outputs)]
    held += [table for stage in stages for table in (stage._live, stage._owed)]
    return [item for table in held for item in table]


@pytest.mark.thorough(
    but=["{'schedule': 'looped-bfs', 'mesh': {'pipe': 1}, 'num_chunks': 2}-3", "{'schedule': 'zb-h1'}-1"]
)
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        {"schedule": "zb-h1"},
        {"schedule": "looped-bfs", "mesh": {"pipe": 1}, "num_chunks": 2},
    ],
    ids=str,
)
def test_a_failed_step_leaves_nothing_for_the_next(options: dict[str, Any], at: int) -> None:
    torch.manual_seed(0)
    pipe = make(loss_fn=Failing(at), **options)
    torch.manual_seed(0)
    other = make(**options)
    with pytest.raises(RuntimeError, match="a broken sample"):
        pipe.train_step(Y, X)
    assert under_way(pipe) == []
    for _ in range(2):
        assert pipe.train_step(X, Y).loss == other.train_step(X, Y).loss
    assert under_way(pipe) == []


def test_a_full_state_is_no_view_of_what_trains_on() -> None:
    pipe = make()
    state = pipe.full_state_dict()
    values = [value.clone() for value in state.values()]
    pipe.train_step(X, Y)
    assert all(map(torch.equal, state.values(), values))


@pytest.mark.parametrize("at", [1, 99])
def test_an_evaluation_leaves_the_modes_as_they_were(at: int) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4)])
    model[1].eval()
    before = [module.training for module in model.modules()]
    pipe = make(model=model, loss_fn=Failing(at))
    with pytest.raises(RuntimeError, match="a broken sample") if at == 1 else nullcontext():
        pipe.eval_step(X, Y)
    assert [module.training for module in model.modules()] == before


def test_results_that_a_flush_returned_do_not_come_again() -> None:
    pipe = stream(max_grad_norm=1.0)  # the norm makes batches known late
    told = [pipe.train_step(X, Y).loss_step for _ in range(3)]
    rest = [result.loss_step for result in pipe.flush()]
    assert sorted({step for step in told if step is not None} | set(rest)) == [0, 1, 2]
    assert rest
    assert pipe.flush() == []
    pipe.train_step(X, Y)
    assert [result.loss_step for result in pipe.flush()] == [3]


def test_a_batch_behind_close_is_refused_and_what_is_known_stays() -> None:
    """In one process it trained on; over processes its messages had no links."""
    pipe = make()
    pipe.train_step(X, Y)
    weights = pipe.full_state_dict()
    with pipe:
        pass
    calls = (pipe.train_step, pipe.forward_backward, pipe.eval_step, pipe.verify, pipe.build)
    for call in (*((partial(call, X, Y)) for call in calls), partial(pipe.predict, X)):
        with pytest.raises(PipelineError, match=r"has ended: expected a new PipelineModule after close\(\)"):
            call()
    pipe.close()
    assert all(torch.equal(value, weights[name]) for name, value in pipe.full_state_dict().items())
    assert (pipe.num_steps, pipe.flush()) == (1, [])

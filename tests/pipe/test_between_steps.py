"""Nothing of one step, failed or not, is left for the next one; what has to move on moves on."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import Arguments, BatchReader, FlatGradients, Given, Identity
from support.small import WIDTH, X, Y, make, stream
from torch import Tensor, nn

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule
from stagewright.schedules import build


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


def test_each_step_draws_masks_of_its_own_and_a_second_run_the_same() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        pipe = make(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        runs.append([pipe.train_step(X, Y).loss for _ in range(3)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def test_results_that_a_flush_returned_do_not_come_again() -> None:
    pipe = stream(max_grad_norm=1.0)  # the norm makes batches known late
    told = [pipe.train_step(X, Y).loss_step for _ in range(3)]
    rest = [result.loss_step for result in pipe.flush()]
    assert sorted({step for step in told if step is not None} | set(rest)) == [0, 1, 2]
    assert rest
    assert pipe.flush() == []
    pipe.train_step(X, Y)
    assert [result.loss_step for result in pipe.flush()] == [3]


def test_a_gradient_that_no_rank_has_stays_none_on_its_way() -> None:
    parameters = [torch.zeros(2, 3), torch.zeros(4), torch.zeros((), dtype=torch.float64)]
    flat = FlatGradients([(str(number), p) for number, p in enumerate(parameters)])
    for present in ((True, False, True), (False, True, False), (False, False, False)):
        gradients = [torch.ones_like(p) if there else None for p, there in zip(parameters, present, strict=True)]
        found, note = flat.unpack(flat.pack(gradients, [4.0, 3.0, 2.0, 1.0]))
        assert note == [4.0, 3.0, 2.0, 1.0]
        assert [gradient is not None for gradient in found] == list(present)
        assert all(g is None or torch.equal(g, torch.ones_like(p)) for g, p in zip(found, parameters, strict=True))


class NoStages:
    """Stands in for inference: a microbatch's specs are its own signature."""

    stages = (SimpleNamespace(inputs=()), SimpleNamespace(inputs=()))

    def of(self, microbatch: object) -> object:
        return SimpleNamespace(stages=(), specs=microbatch, certain=(), float16=None, digest=str)


@pytest.mark.parametrize("replica", range(3))
def test_microbatches_of_a_data_replica_take_their_places_in_the_whole_batch(replica: int) -> None:
    schedule = build("gpipe", num_ranks=2, num_microbatches=6)
    own = range(replica, 6, 3)
    run = SimpleNamespace(
        options=SimpleNamespace(device=torch.device("cpu"), model_loss=None, grad_scaler=None),
        layout=SimpleNamespace(
            place=SimpleNamespace(replica=(replica, 3), world=SimpleNamespace(distributed=True), tensor=(0, 1))
        ),
        guard=SimpleNamespace(together=nullcontext),
        local_stages=[0, 1],
    )
    example = Arguments.of((torch.zeros(3, 1),))
    mode = SimpleNamespace(schedule=schedule, inference=NoStages())
    reader = BatchReader(run, mode, example=example, has_loss=True)  # type: ignore[arg-type]
    x = torch.arange(5.0).unsqueeze(1)  # microbatches of 3 and of 2 samples
    batch = reader.read(Given(arguments=Arguments.of((x,)), target=-x), step=4, call=Identity(0.0, 1.0))
    assert [None if part.inputs is None else part.inputs[0].flatten().tolist() for part in batch.parts] == [
        ([0.0, 1.0, 2.0] if k < 3 else [3.0, 4.0]) if k in own else None for k in range(6)
    ]
    assert [part.target is not None for part in batch.parts] == [k in own for k in range(6)]
    assert [part.size for part in batch.parts] == [3, 3, 3, 2, 2, 2]
    assert batch.replica == (replica, 3)


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

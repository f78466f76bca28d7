"""Nothing of a step is left for the next one; a failed update ends the run until a checkpoint is loaded."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from support.small import WIDTH, X, Y, make, stream
from torch import Tensor, nn

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule, StepRecord


class Failing:
    """A loss that raises at its n-th call, counted from 0; the last one is interrupted."""

    def __init__(self, at: int) -> None:
        self.left, self.error = at, KeyboardInterrupt if at == 3 else RuntimeError

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.left -= 1
        if self.left == -1:
            raise self.error("a broken sample")
        return F.mse_loss(output, target)


def under_way(pipe: PipelineModule) -> list[object]:
    workers = [one.worker for one in pipe._building.built("the engine").engine.ranks]
    stages = [stage for worker in workers for stage in worker._stages.values()]
    held: list[Any] = [table for worker in workers for table in (worker._inbox, worker._outbox, worker.outputs)]
    held += [table for stage in stages for table in (stage._live, stage._owed)]
    return [item for table in held for item in table]


@pytest.mark.thorough(but=["{'schedule': 'gpipe'}-0", "{'schedule': 'zb-h1'}-1"])
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
    with pytest.raises((RuntimeError, KeyboardInterrupt), match="a broken sample"):
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
    assert (pipe.num_steps, pipe.flush()) == (1, [])  # under a flush schedule there is nothing to say
    assert make(example_inputs=None).flush() == []


class Trips:
    """Raises once, when the second stage comes to it behind the first update."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind, self.calls = kind, 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1
        if self.calls == 4:
            raise self.kind("the disk of the log is full")


class Schedule(SimpleNamespace):
    def step(self) -> None:
        self.trips()


def steps(pipe: PipelineModule) -> None:
    for _ in range(3):
        pipe.train_step(X, Y)
    pipe.flush()


@pytest.mark.thorough(but=["1f1b-lr_scheduler-KeyboardInterrupt"])
@pytest.mark.parametrize(
    ("schedule", "where", "kind"),
    [
        ("1f1b", "optimizer", RuntimeError),
        ("1f1b", "lr_scheduler", KeyboardInterrupt),
        ("2bw", "lr_scheduler", RuntimeError),
    ],
)
def test_the_run_is_over_until_a_checkpoint_is_loaded(schedule: str, where: str, kind: Any, tmp_path: Path) -> None:
    trips = Trips(kind)

    def scheduled(trips: Trips) -> dict[str, Any]:
        made = Schedule(trips=trips, state_dict=dict, load_state_dict=lambda state: None)
        return {"lr_scheduler": lambda optimizer: made} if where == "lr_scheduler" else {}

    pipe, other = make(schedule=schedule, **scheduled(trips)), make(schedule=schedule, **scheduled(Trips(KeyError)))
    pipe.train_step(X, Y)
    pipe.save(tmp_path)
    if where == "optimizer":
        trips.calls = 2
        for optimizer in pipe.optimizers:
            optimizer.step = lambda step=optimizer.step: (trips(), step())
    with pytest.raises(kind, match="disk of the log"):
        steps(pipe)
    for call in (pipe.train_step, pipe.eval_step):
        with pytest.raises(ValueError, match=f"lost with {kind.__name__}: the disk .* of different updates. .*load"):
            call(X, Y)
    pipe.load(tmp_path)
    pipe.train_step(X, Y)
    other.load(tmp_path)
    other.train_step(X, Y)
    found, expected = pipe.full_state_dict(), other.full_state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return X + step, Y


def steps_and_losses(records: list[StepRecord]) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in records]


def test_steps_are_told_within_their_call_and_those_of_a_stream_with_their_losses() -> None:
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


@pytest.mark.thorough(but=["close"])
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

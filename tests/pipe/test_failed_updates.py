"""An update that fails on one stage: the run is over by name, until a checkpoint is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import X, Y, make

from stagewright.pipe import PipelineModule


class Trips:
    """Raises once, when the second stage comes to it behind the first update."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind, self.calls = kind, 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1
        if self.calls == 4:
            raise self.kind("the disk of the log is full")


class Schedule:
    def __init__(self, trips: Trips) -> None:
        self.trips = trips

    def step(self) -> None:
        self.trips()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


def steps(pipe: PipelineModule) -> None:
    for _ in range(3):
        pipe.train_step(X, Y)
    pipe.flush()


def in_the_optimizer(pipe: PipelineModule, trips: Trips) -> None:
    for optimizer in pipe.optimizers:
        step = optimizer.step
        optimizer.step = lambda step=step: (trips(), step())  # type: ignore[method-assign,misc]


def in_a_hook(pipe: PipelineModule, trips: Trips) -> None:
    for optimizer in pipe.optimizers:
        optimizer.register_step_post_hook(trips)


def nowhere(pipe: PipelineModule, trips: Trips) -> None:
    return


WHERE: dict[str, Any] = {"optimizer": in_the_optimizer, "hook": in_a_hook, "lr_scheduler": nowhere}


@pytest.mark.thorough(but=["1f1b-optimizer-RuntimeError"])
@pytest.mark.parametrize(
    ("schedule", "where", "kind"),
    [
        ("1f1b", "optimizer", RuntimeError),
        ("1f1b", "lr_scheduler", KeyboardInterrupt),
        ("zb-h1", "hook", KeyboardInterrupt),
        ("2bw", "lr_scheduler", RuntimeError),
    ],
)
def test_the_run_is_over_until_a_checkpoint_is_loaded(
    schedule: str, where: str, kind: type[BaseException], tmp_path: Path
) -> None:
    trips = Trips(kind)

    def scheduled(trips: Trips) -> dict[str, Any]:
        return {"lr_scheduler": lambda optimizer: Schedule(trips)} if where == "lr_scheduler" else {}

    pipe, other = make(schedule=schedule, **scheduled(trips)), make(schedule=schedule, **scheduled(Trips(KeyError)))
    pipe.train_step(X, Y)
    pipe.save(tmp_path)
    WHERE[where](pipe, trips)
    if where != "lr_scheduler":
        trips.calls = 2
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


def test_gradients_of_an_interrupted_batch_are_dropped() -> None:
    def interrupted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        interrupts.append(0)
        if len(interrupts) == 3:
            raise KeyboardInterrupt
        return torch.nn.functional.mse_loss(output, target)

    interrupts: list[int] = []
    torch.manual_seed(0)
    pipe = make(loss_fn=interrupted)
    torch.manual_seed(0)
    other = make()
    with pytest.raises(KeyboardInterrupt):
        pipe.train_step(X, Y)
    assert pipe.train_step(X, Y).loss == other.train_step(X, Y).loss
    found, expected = pipe.full_state_dict(), other.full_state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

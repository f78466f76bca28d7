"""Seconds of the runtime around actions and steps, and measured timelines of processes whose clocks are apart."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.inside import (
    HostClock,
    RankRecorder,
    building,
    clipping,
    early_messages,
    make_optimizers,
    measure_runtime_seconds,
    named,
    runtime_seconds,
)
from support.inside import PipeTrainingTraining as Training
from support.pool import Pool
from support.small import X, Y, make, sgd
from torch import nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import Op, Timeline, simulate

CPU = torch.device("cpu")


class FakeTime:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def thread_time(self) -> float:
        return self.seconds


def test_what_an_action_and_a_step_take_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each action takes 3 s of the runtime, each step 40 s more, and a microbatch's own compute 2 s here and there."""
    clock = FakeTime()
    monkeypatch.setattr(runtime_seconds, "time", clock)
    monkeypatch.setattr(runtime_seconds, "_ROUNDS", 2)
    took, batch, step = RankRecorder.action, Training.accumulate, Training.step
    plain = runtime_seconds._plain

    def action(self, what, *about):
        clock.seconds += 0.0 if what.op is Op.U else 3.0 + 0.5
        return took(self, what, *about)

    def accumulate(self, given):
        clock.seconds += 50.0
        return batch(self, given)

    def whole_step(self, given):
        clock.seconds += 40.0
        return step(self, given)

    def loop(modules, num_microbatches):
        clock.seconds += 2.0 * num_microbatches
        plain(modules, num_microbatches)

    monkeypatch.setattr(RankRecorder, "action", action)
    monkeypatch.setattr(Training, "accumulate", accumulate)
    monkeypatch.setattr(Training, "step", whole_step)
    monkeypatch.setattr(runtime_seconds, "_plain", loop)
    assert measure_runtime_seconds(CPU) == (3.0, 40.0)


def test_nothing_is_left_of_it() -> None:
    """Random numbers go on as if it had not been; where another device computes, the host works ahead: none."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        assert min(measure_runtime_seconds(CPU)) > 0
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected)
    assert measure_runtime_seconds(torch.device("cuda")) == (0.0, 0.0)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_timeline_has_what_a_step_takes(max_grad_norm: float | None) -> None:
    """From where train_step begins to where its result is made; where gradients alone are made nobody says so."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = PipelineModule(
        layers,
        schedule="1f1b",
        mesh={"pipe": 2},
        num_microbatches=2,
        loss_fn=F.mse_loss,
        optimizer=sgd,
        max_grad_norm=max_grad_norm,
    )
    x = torch.ones(4, 3)
    longest = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        timeline = pipe.train_step(x, x).timeline()
        assert timeline.makespan < timeline.batch_seconds < time.perf_counter() - begun
        assert timeline.batch_seconds == timeline.makespan + timeline.around
        longest = max(longest, timeline.batch_seconds)
        assert Timeline.from_json(timeline.to_json()) == timeline
    costs = pipe.measured_costs()
    assert 0 < costs.around < longest
    assert simulate(pipe.schedule, costs).around == costs.around
    assert pipe.forward_backward(x, x).timeline().around == 0.0


AHEAD = (0.0, 1234.5, -60.0)  # [s], a host each


def set_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host and a clock of its own for this process."""
    rank = dist.get_rank()
    monkeypatch.setattr(HostClock, "stamp", lambda self: time.perf_counter() + AHEAD[rank])
    monkeypatch.setattr(building, "machine", lambda: f"host {rank}")


def train() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_clock(monkeypatch)
        with make(mesh={"pipe": 3}) as pipe:
            results = [pipe.train_step(X, Y) for _ in range(3)]
            timelines = [result.timeline() for result in results[1:]]
    return {"timelines": [timeline.to_json() for timeline in timelines]}


@pytest.mark.thorough
def test_timelines_of_ranks_whose_clocks_are_apart(gloo: Pool) -> None:
    found = gloo.run(train, ranks=3)
    assert found[0] == found[1] == found[2]
    for text in found[0]["timelines"]:
        timeline = Timeline.from_json(text)
        assert timeline.makespan < 60  # not 1234
        assert timeline.clock_error[0] == 0.0
        assert 0 < min(timeline.clock_error[1:]) <= max(timeline.clock_error[1:]) < 30
        assert all(seconds <= allowed for _, seconds, allowed in early_messages(timeline))


def test_the_first_step_clips_by_the_norm_of_all_parameters() -> None:
    torch.manual_seed(0)
    plain, clipped = (nn.Linear(3, 2).double() for _ in range(2))
    clipped.load_state_dict(plain.state_dict())

    def make(parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([p], lr=0.1) for _, p in parameters]  # a step each for weight and bias

    for model, factory in ((plain, named(make)), (clipped, clipping(named(make), 0.5))):
        model(torch.arange(6.0, dtype=torch.float64).view(2, 3)).square().sum().backward()
        if model is plain:
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 1
        for optimizer in make_optimizers(factory, list(model.named_parameters()), where="here"):
            optimizer.step()
    for one, other in zip(plain.parameters(), clipped.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)  # the runtime adds 1e-6 to the norm, as torch does


def test_nothing_is_changed_where_nobody_clips() -> None:
    factory = named(lambda parameters: [])
    assert clipping(factory, None) is clipping(factory, 0.0) is factory

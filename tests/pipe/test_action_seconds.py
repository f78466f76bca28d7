"""Seconds of the runtime around actions: what counts to them."""

from __future__ import annotations

import pytest
import torch

from stagewright.pipe import action_seconds
from stagewright.pipe.action_seconds import measure_action_seconds
from stagewright.pipe.measure.recorder import Recorder
from stagewright.pipe.training import Training

CPU = torch.device("cpu")


class FakeTime:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def thread_time(self) -> float:
        return self.seconds


def test_what_an_action_takes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each action takes 3 s of the runtime, each batch 50 s more, and a microbatch's own compute 2 s here and there."""
    clock = FakeTime()
    monkeypatch.setattr(action_seconds, "time", clock)
    monkeypatch.setattr(action_seconds, "_ROUNDS", 2)
    took, batch, plain = Recorder.action, Training.accumulate, action_seconds._plain

    def action(self, *about):
        clock.seconds += 3.0 + 0.5
        return took(self, *about)

    def accumulate(self, given):
        clock.seconds += 50.0
        return batch(self, given)

    def loop(modules, num_microbatches):
        clock.seconds += 2.0 * num_microbatches
        plain(modules, num_microbatches)

    monkeypatch.setattr(Recorder, "action", action)
    monkeypatch.setattr(Training, "accumulate", accumulate)
    monkeypatch.setattr(action_seconds, "_plain", loop)
    assert measure_action_seconds(CPU) == 3.0


def test_nothing_is_left_of_it() -> None:
    """Random numbers go on as if it had not been; where another device computes, the host works ahead: none."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        assert measure_action_seconds(CPU) > 0
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected)
    assert measure_action_seconds(torch.device("cuda")) == 0.0

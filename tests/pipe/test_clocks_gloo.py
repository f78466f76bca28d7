"""Measured timelines of processes whose clocks are apart, as those of hosts are."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from support.inside import HostClock, building, early_messages
from support.pool import Pool
from support.small import X, Y, make

from stagewright.schedules import Timeline

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


def test_timelines_of_ranks_whose_clocks_are_apart(gloo: Pool) -> None:
    found = gloo.run(train, ranks=3)
    assert found[0] == found[1] == found[2]
    for text in found[0]["timelines"]:
        timeline = Timeline.from_json(text)
        assert timeline.makespan < 60  # not 1234
        assert timeline.clock_error[0] == 0.0
        assert 0 < min(timeline.clock_error[1:]) <= max(timeline.clock_error[1:]) < 30
        assert all(seconds <= allowed for _, seconds, allowed in early_messages(timeline))

"""The way of a microbatch: functions of ours between `train_step` and a layer of the user's."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest
import torch
from support.small import WIDTH, X, Y, make, stream
from torch import nn

MOST = 6  # train_step, Training.step, Engine.run, Worker.run, Stage.forward, and the chain of a stage's units


class Witness(nn.Linear):
    """A layer that notes the functions of ours that stand on the stack when it is called, the outermost first."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen: set[tuple[str, ...]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names, frame = [], sys._getframe(1)
        while frame.f_back is not None:
            if frame.f_globals.get("__name__", "").startswith("stagewright."):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if "PipelineModule.train_step" in names:  # and not the first run on fake tensors
            self.seen.add(tuple(reversed(names)))
        return super().forward(x)


@pytest.mark.parametrize("begin", [make, stream])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_walk_from_train_step_to_a_layer_is_short(begin: object, num_ranks: int) -> None:
    witnesses = [Witness() for _ in range(3)]
    assert callable(begin)
    pipe = begin(model=nn.Sequential(*witnesses), mesh={"pipe": num_ranks}, num_microbatches=4)
    for _ in range(3):
        pipe.train_step(X, Y)
    for witness in witnesses:
        assert witness.seen
        for walk in witness.seen:
            assert walk[0] == "PipelineModule.train_step"
            assert len(walk) <= MOST, " -> ".join(walk)


MOST_CALLS = 65  # of functions of ours per action: 60 now, and 88 while each decided what a program or a batch can


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_steady_action_calls_few_functions(schedule: str, num_chunks: int) -> None:
    """Counted, not timed: what the engine and all around it do per action costs seconds that all ranks share."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    pipe = make(model=model, schedule=schedule, num_chunks=num_chunks, mesh={"pipe": 2}, num_microbatches=8)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("stagewright."):
            calls[f"{name}: {frame.f_code.co_qualname}"] += 1

    for _ in range(3):
        pipe.train_step(X, Y)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        pipe.train_step(X, Y)
    finally:
        sys.setprofile(before)
    per_action = calls.total() / (2 * 8 * 2 * num_chunks)
    assert per_action <= MOST_CALLS, f"{per_action:.1f}: {calls.most_common(30)}"

"""The way of a microbatch: functions of ours between `train_step` and a layer of the user's."""

from __future__ import annotations

import sys

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

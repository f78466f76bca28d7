"""Memory of a rank under an asynchronous schedule: live storages, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.inside import TrainingWorker
from support.small import WIDTH, stream
from support.storages import Storages
from torch import nn


class Bulge(nn.Module):
    """[B, d] -> [B, d] through a hidden width of its own, so that its storages are told by their sizes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.thorough(but=["pipedream-1.0"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("schedule", ["2bw", "pipedream", "paci"])
def test_what_a_rank_holds(schedule: str, max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live storages between actions: weight versions with gradient sets, and activations of microbatches."""
    if schedule != "2bw" and max_grad_norm is not None:
        return
    P, M = 3, 5
    hidden = [11, 19, 17]  # the summary of losses has 13 numbers of 8 bytes
    stages = [Bulge(width) for width in hidden]
    pipe = stream(schedule, stages=stages, num_microbatches=M, mesh={"pipe": P}, max_grad_norm=max_grad_norm)
    storages = Storages()
    weights, activations = [0] * P, [0] * P
    work = TrainingWorker.run

    def watched(self: TrainingWorker, action: Any) -> None:
        work(self, action)
        for stage, width in enumerate(hidden):
            # up and down have as many elements; the versions that stood there before are not seen being made
            seen = storages.live[width * WIDTH * 4] / 2
            weights[stage] = max(weights[stage], int(seen))
            activations[stage] = max(activations[stage], storages.live[2 * width * 4])

    monkeypatch.setattr(TrainingWorker, "run", watched)
    x = torch.randn(2 * M, WIDTH)
    with storages:
        for one in pipe.parameters():
            storages.note(one)
        for _ in range(8):
            pipe.train_step(x, x)
    if schedule == "2bw":
        gradient_sets = 1 if max_grad_norm is None else 2
        assert weights == [2 + gradient_sets] * P
    elif schedule == "paci":
        assert weights == [2] * P  # one version, one gradient set
    else:
        assert weights == [P - stage + 1 for stage in range(P)]  # P - r versions, one gradient set
    assert activations == [P - stage for stage in range(P)]

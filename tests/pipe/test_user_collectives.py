"""Collectives that a module or a loss of the user calls: run where all of their processes run the stage, or refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import Pool
from support.small import X, Y, make, sgd
from torch import Tensor, nn

from stagewright.comm import PipelineError


class Centred(nn.Linear):
    """Takes off the mean over all processes."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return super().forward(x - mean)


def contrasted(output: Tensor, target: Tensor) -> Tensor:
    """As CLIP's loss, it sees the samples of all processes."""
    others = [torch.zeros_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(others, output.detach())
    return F.mse_loss(output, target) + 0.0 * torch.cat(others).sum()


def trained(kind: str, mesh: dict[str, int]) -> str | float:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Centred(6, 6) if kind == "unit" else nn.Linear(6, 6)]
    options: dict[str, Any] = {"loss_fn": contrasted if kind == "loss" else F.mse_loss, "example_inputs": None}
    pipe = make(model=nn.Sequential(*layers), optimizer=sgd, mesh=mesh, timeout=60.0, **options)
    try:
        return [loss for _ in range(2) if (loss := pipe.train_step(X, Y).loss) is not None][-1]
    except (ValueError, PipelineError) as error:
        return str(error)


@pytest.mark.thorough(but=["loss"])
@pytest.mark.parametrize("kind", ["unit", "loss"])
def test_processes_that_do_not_run_the_stage_would_never_come(gloo: Pool, kind: str) -> None:
    """It hung, and the error named the network."""
    for told in gloo.run(trained, ranks=2, args=(kind, {"pipe": 2})):
        assert "stage 1 (2 .. 3), or its loss, calls a collective of processes [0, 1], and only [1] run it" in str(told)
    losses = gloo.run(trained, ranks=2, args=(kind, {"pipe": 1, "data": 2}))  # the check of the first batch hung
    assert losses[0] == losses[1]
    assert isinstance(losses[0], float)
    assert math.isfinite(losses[0])

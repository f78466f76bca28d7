"""Tensor groups on a mesh: planes, orders of axes, one batch in a group. No module is divided here.

Each process of a group computes the same; what a group adds up or gathers must count once, whatever process a rank is.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule

WIDTH = 6
MESH = {"pipe": 2, "tensor": 2}


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).double()


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def make_pipe(model: nn.Module, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {
        "mesh": MESH,
        "tensor_parallel": {},
        "num_microbatches": 4,
        "loss_fn": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "max_grad_norm": 0.05,
        "timeout": 120.0,
    }
    return PipelineModule(model, **records(**(settings | options)))


def pass_other_inputs() -> str:
    """The second member of the second rank's group passes another batch."""
    pipe = make_pipe(make_model(0), example_inputs=make_batch(0)[:1])
    with pytest.raises((ValueError, PipelineError), match="passed other inputs") as told:
        pipe.train_step(*make_batch(int(dist.get_rank() == 3)))
    return str(told.value)


def test_a_tensor_group_passes_one_batch(gloo: Pool) -> None:
    told = gloo.run(pass_other_inputs, ranks=4)
    for member in (2, 3):
        assert (
            "process 3 (rank 1, tensor 1) passed other inputs to step 0 than process 2 (rank 1, tensor 0)"
            in (told[member])
        )


def test_in_one_process_there_is_no_tensor_axis() -> None:
    with pytest.raises(ValueError, match=r"in one process: the members of a tensor group are processes"):
        make_pipe(make_model(0))
    with pytest.raises(ValueError, match=r'with schedule="auto"'):
        make_pipe(make_model(0), schedule="auto")
    with pytest.raises(ValueError, match=r"order=\('pipe',\): expected the axes"):
        make_pipe(make_model(0), mesh={"pipe": 2}, order=("pipe",))
    assert math.isfinite(make_pipe(make_model(0), mesh={"pipe": 2}).train_step(*make_batch(0)).loss or math.nan)

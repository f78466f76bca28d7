"""A small pipeline that tests of errors break in one way each: six linear layers, two ranks, four microbatches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import Schedule
from support.records import records

WIDTH = 6
# The same in every process, whatever it drew before.
X, Y = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


def layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make(**options: Any) -> PipelineModule:
    """The small pipeline, with other options where they are given."""
    settings: dict[str, Any] = {"num_microbatches": 4, "mesh": {"pipe": 2}, "loss_fn": F.mse_loss}
    settings |= {"optimizer": sgd, "example_inputs": (X,)}
    if "stages" not in options:
        settings["model"] = layers()
    return PipelineModule(**records(**(settings | options)))


def trained(steps: int, **options: Any) -> PipelineModule:
    """The small pipeline after some steps, from the same weights each time."""
    torch.manual_seed(0)
    pipe = make(**({"model": layers()} | options))
    for _ in range(steps):
        pipe.train_step(X, Y)
    return pipe


def stream(schedule: str | Schedule = "2bw", **options: Any) -> PipelineModule:
    """The small pipeline under an asynchronous schedule, from the same weights each time."""
    torch.manual_seed(0)
    if isinstance(schedule, Schedule):
        options = {"num_microbatches": None, "mesh": None, **options}
    return make(schedule=schedule, **options)

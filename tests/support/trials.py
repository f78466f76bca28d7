"""Models and pipes that trials are tested with: layers that draw from every generator, losses that count their calls,
plans by a profile that nobody measured."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stagewright.partition import Cluster, Node, Profile
from stagewright.pipe import PipelineModule
from support.inside import AutoLayout, Given
from support.records import records

WIDTH, BATCH = 6, 8
seen: list[str] = []  # by a hook of the model


class Draws(nn.Module):
    """A layer with a generator, a counter and a buffer, that draws from all generators there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.own = torch.Generator().manual_seed(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(x.shape, generator=self.own) + torch.rand(x.shape) + random.random() + np.random.rand()
        return F.dropout(self.norm(self.linear(x)), 0.1) + 1e-3 * noise.to(x.dtype)


def make_model(num_layers: int = 4) -> nn.Sequential:
    torch.manual_seed(2)
    model = nn.Sequential(*[Draws() for _ in range(num_layers)]).double()
    model[0].register_forward_hook(lambda module, args, out: seen.append("hook"))
    return model


def make_loss() -> Callable[[Tensor, Tensor], Tensor]:
    calls = [0]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        return F.mse_loss(output, target) * (1 + 0.01 * calls[0])

    loss_fn.calls = calls  # type: ignore[attr-defined]
    return loss_fn


def make_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def fails(error: BaseException, *, on: int = 0) -> Any:
    class Failing(torch.optim.SGD):
        separable = "parameters"

        def step(self, closure: Any = None) -> None:
            if not dist.is_initialized() or dist.get_rank() == on:
                raise error

    return lambda parameters: Failing(parameters, lr=0.1)


def make_pipe(num_layers: int = 4, **options: Any) -> PipelineModule:
    def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)

    settings: dict[str, Any] = {
        "schedule": "auto",
        "loss_fn": make_loss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "lr_scheduler": warmed_up,
        "max_grad_norm": 0.5,
        "timeout": 120.0,
    }
    return PipelineModule(make_model(num_layers), **records(**(settings | options)))


@contextmanager
def profiled() -> Iterator[None]:
    """A profile and links by formula, so that every run has the same plan."""

    def profile(auto: AutoLayout, first: Given, seconds: float) -> Profile:
        del seconds
        samples = first.arguments.num_samples
        nodes = [
            Node(
                name=str(i),
                forward_seconds=1e-4 * samples,
                backward_seconds=2e-4 * samples,
                parameter_bytes=float(sum(p.numel() * p.element_size() for p in child.parameters())),
            )
            for i, child in enumerate(auto._model.children())
        ]
        return Profile(nodes=nodes, microbatch_size=samples)

    def cluster(auto: AutoLayout) -> Cluster:
        return Cluster.from_levels([(auto._num_ranks, 1e9)])

    with mock.patch.object(AutoLayout, "_profile", profile), mock.patch.object(AutoLayout, "_cluster", cluster):
        yield

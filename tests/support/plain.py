"""User code in a pipeline beside the same model in one plain process, float64, a few steps of SGD."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagewright.pipe import PipelineModule
from support.alone import near, train_alone
from support.records import records

WIDTH, MICROBATCHES, BATCH = 6, 4, 8
STEPS = 3
Make = Callable[[], nn.Sequential]
Between = Callable[[Any, int], None]  # (model, the step that comes)


def batch(step: int, width: int = WIDTH, *, samples: int = BATCH, out: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets: [samples, width] and [samples, out or width]."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(samples, n, dtype=torch.float64, generator=generator) for n in (width, out or width))
    return x, y


def made(make: Make) -> nn.Sequential:
    torch.manual_seed(0)
    return make().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def nothing(model: Any, step: int) -> None:
    """Between two steps."""


def plain(make: Make, between: Between = nothing, **options: Any) -> tuple[Any, list[float]]:
    model = made(make)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(STEPS):
            between(model, step)
            yield batch(step)

    found = train_alone(model, batches(), lambda _: sgd(model.parameters()), parts=MICROBATCHES, **options)
    return model, found.losses


def piped(make: Make, between: Between = nothing, **options: Any) -> tuple[Any, list[float]]:
    model = made(make)
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "cut": ["2"], "example_inputs": batch(0)[:1]}
    settings |= {"num_microbatches": MICROBATCHES, "loss_fn": F.mse_loss, "optimizer": sgd}
    pipe = PipelineModule(model, **records(**(settings | options)))
    losses = []
    for step in range(STEPS):
        between(model, step)
        loss = pipe.train_step(*batch(step)).loss
        assert loss is not None
        losses.append(loss)
    pipe.flush()
    return model, losses


def agree(make: Make, between: Between = nothing, **options: Any) -> tuple[Any, Any]:
    """Losses, weights and buffers after some steps; returns both models."""
    one, losses = plain(make, between)
    other, found = piped(make, between, **options)
    near([found, other.state_dict()], [losses, one.state_dict()])
    return one, other


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def between_layers(*middle: Callable[[], nn.Module]) -> Make:
    return lambda: nn.Sequential(linear(), nn.Sequential(*[one() for one in middle]), linear(), nn.Tanh(), linear())

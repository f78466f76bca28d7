"""Models run by their own modules: what their Python does beside computing tensors is what one process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import eager_models as models
from torch import nn

from stagewright.pipe import PipelineModule

WIDTH = models.WIDTH
X, Y = (torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
STEPS = 3

IN_UNITS = {
    "functions": models.FunctionBlock,
    "checkpoint": models.CheckpointedBlock,
    "reentrant checkpoint": models.ReentrantBlock,
    "hooks": models.HookedBlock,
    "buffers assigned anew": models.AssigningBlock,
    "counters": models.CountingBlock,
    "autocast": models.AutocastBlock,
    "experts": models.SparseBlock,
    "branches": models.BranchingBlock,
}
BETWEEN = {
    "functions": models.FunctionsBetween,
    "checkpoint": models.CheckpointedBetween,
    "reentrant checkpoint": models.ReentrantBetween,
    "one checkpoint over two blocks": models.CheckpointedTogether,
    "hooks": models.HooksBetween,
    "autocast": models.AutocastBetween,
    "twice": models.Twice,
    "u": models.UShaped,
    "encoder and decoder": models.EncoderDecoder,
    "cache": models.WithACache,
    "in place": models.InPlaceBetween,
    "buffers": models.Averaging,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"{name} in units": (lambda block=block: models.Stack(block)) for name, block in IN_UNITS.items()},
    **{f"{name} between units": make for name, make in BETWEEN.items()},
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def plain_steps(model: nn.Module, *, change: Callable[[nn.Module, int], None] | None = None) -> list[float]:
    """Losses of some steps of four microbatches, and what they leave in the model."""
    optimizer = sgd(list(model.parameters()))
    losses = []
    for step in range(STEPS):
        if change is not None:
            change(model, step)
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(X.split(2), Y.split(2), strict=True):
            loss = F.mse_loss(model(x.clone()), y) / 4
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
    return losses


def pipeline(model: nn.Module, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {
        "num_microbatches": 4,
        "mesh": {"pipe": 2},
        "loss_fn": F.mse_loss,
        "optimizer": sgd,
        "example_inputs": (X,),
    }
    return PipelineModule(model, **(settings | options))


def equal(model: nn.Module, twin: nn.Module, *, atol: float = 1e-12) -> None:
    """Parameters, gradients, buffers and plain attributes of every module."""
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=atol), name
    for (name, mine), (_, other) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=atol), name
    for (name, mine), other in zip(model.named_modules(), twin.modules(), strict=True):
        plain = {key: value for key, value in vars(mine).items() if isinstance(value, int | float | str | list)}
        assert plain == {key: vars(other)[key] for key in plain}, name


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # checkpoint says so in evaluation
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_is_that_of_one_process(make: Callable[[], nn.Module], stages: int) -> None:
    model, twin = made(make), made(make)
    pipe = pipeline(model, mesh={"pipe": stages})
    losses = [pipe.train_step(X, Y).loss for _ in range(STEPS)]
    assert losses == pytest.approx(plain_steps(twin), abs=1e-12)
    equal(model, twin)
    with torch.no_grad():
        expected = torch.cat([twin.eval()(x.clone()) for x in X.split(2)])
    assert torch.allclose(pipe.predict(X), expected, rtol=0, atol=1e-12)  # type: ignore[arg-type]

"""User code in stages behaves as in plain PyTorch: compared with one plain process in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

WIDTH, MICROBATCHES, BATCH = 6, 4, 8
STEPS = 3
Make = Callable[[], nn.Sequential]
Between = Callable[[Any, int], None]  # (model, the step that comes)


def batch(step: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, width, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def made(make: Make) -> nn.Sequential:
    torch.manual_seed(0)
    return make().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def nothing(model: Any, step: int) -> None:
    """Between two steps."""


def plain(make: Make, between: Between = nothing) -> tuple[Any, list[float]]:
    """The model after STEPS steps, and the losses."""
    model = made(make)
    optimizer, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        between(model, step)
        x, y = batch(step)
        optimizer.zero_grad()
        total = 0.0
        for mine, target in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            loss = F.mse_loss(model(mine.clone()), target) / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return model, losses


def piped(make: Make, between: Between = nothing, **options: Any) -> tuple[Any, list[float]]:
    """The same in a pipeline."""
    model = made(make)
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "split_points": ["2"], "example_inputs": batch(0)[:1]}
    pipe = PipelineModule(
        model, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss, optimizer=sgd, **(settings | options)
    )
    losses = []
    for step in range(STEPS):
        between(model, step)
        loss = pipe.train_step(*batch(step)).loss
        assert loss is not None
        losses.append(loss)
    return model, losses


def agree(make: Make, between: Between = nothing, **options: Any) -> tuple[Any, Any]:
    """Losses, weights and buffers after some steps; returns both models."""
    one, losses = plain(make, between)
    other, found = piped(make, between, **options)
    assert found == pytest.approx(losses, abs=1e-12)
    theirs = one.state_dict()
    for name, tensor in other.state_dict().items():
        assert torch.allclose(tensor, theirs[name], rtol=0, atol=1e-12), name
    return one, other


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def between_layers(*middle: Callable[[], nn.Module]) -> Make:
    """A chain with these in its first stage."""
    return lambda: nn.Sequential(linear(), nn.Sequential(*[one() for one in middle]), linear(), nn.Tanh(), linear())


# --- code that reads values ---


class SparseExperts(nn.Module):
    """Each sample goes to one expert, found by `nonzero`; an expert without samples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(linear() for _ in range(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[:, 0]
            if rows.numel():
                self.load[number] += rows.numel()
                out[rows] = weights[rows, number, None] * expert(x[rows])
        return x + out


class Masked(nn.Module):
    """A boolean mask, a number read from a tensor, numpy, sizes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.tensor([2, 4]))

    def forward(self, x: Tensor) -> Tensor:
        positive = x[x > 0]
        top = float(x.detach().abs().max())
        left, right = x.split(self.sizes.tolist(), dim=-1)
        again = torch.from_numpy(x.detach().numpy() * 1.0)
        return torch.cat([right, left], -1) + positive.mean() / (1 + top) + again


class ScalesItsInput(nn.Module):
    """In place, by a number that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1 / (1 + float(x.detach().norm())))


READ_VALUES: dict[str, Callable[[], nn.Module]] = {
    "experts": SparseExperts,
    "masks": Masked,
    "in place": ScalesItsInput,
    "cumulative statistics": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("middle", READ_VALUES.values(), ids=READ_VALUES)
def test_code_that_reads_values(middle: Callable[[], nn.Module], recompute: str) -> None:
    agree(between_layers(middle), recompute=recompute)
    agree(lambda: nn.Sequential(linear(), linear(), middle(), linear()), recompute=recompute)


class Selects(nn.Module):
    """Returns as many rows as are positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def test_shapes_that_follow_from_values_are_refused_where_they_travel() -> None:
    with pytest.raises(ValueError, match=r"output 0 of stage 0 .* when shapes were inferred: expected a module whose"):
        piped(lambda: nn.Sequential(linear(), Selects(), linear()))


def experts(**options: Any) -> list[list[float]]:
    """Other batch sizes too: each process then lacks the weights of the other's stage."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), SparseExperts(), SparseExperts(), linear()).double()
    pipe = PipelineModule(
        model, num_microbatches=2, loss_fn=F.mse_loss, optimizer=sgd, example_inputs=batch(0)[:1], **options
    )
    found = []
    for step, size in enumerate((8, 6, 8)):
        x, y = batch(step)
        loss = pipe.train_step(x[:size], y[:size]).loss
        assert loss is not None
        found.append(loss)
    state = pipe.full_state_dict()
    pipe.close()
    return [found, *(state[name].flatten().tolist() for name in ("1.load", "2.load", "1.router.weight"))]


@pytest.mark.gloo
def test_code_that_reads_values_over_processes(gloo: Pool) -> None:
    one = experts(mesh={"pipe": 1})
    for other in gloo.run(experts, ranks=2):
        for mine, theirs in zip(one, other, strict=True):
            assert theirs == pytest.approx(mine, abs=1e-12)

"""A forward that changes the type of a weight, or the shape of a buffer: state is right on every rank, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from torch import nn

from stagewright import Mesh, PipelineModule


class _Caster(nn.Module):
    """Turns its router into float32, as that of Switch Transformers does, and lets a buffer grow."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router.to(torch.float32)
        if len(self.seen) == 1:
            self.seen = torch.full((3,), 7.0)
        routed: torch.Tensor = self.router(x.float())
        return x + routed.to(x.dtype)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), _Caster(), nn.Linear(4, 4)).double()


def _pipeline(**mesh: Any) -> PipelineModule:
    return PipelineModule(
        _model(),
        mesh=Mesh(**mesh),
        num_microbatches=2,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def _batch(replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    return x[0].repeat(replicas, 1), x[1].repeat(replicas, 1)


def _worst(state: dict[str, Any], plain: dict[str, Any]) -> float:
    assert [(x.dtype, x.shape) for x in state.values()] == [(x.dtype, x.shape) for x in plain.values()]
    return max(float((state[name] - x).abs().max()) for name, x in plain.items())


def _saved(folder: Path, mesh: dict[str, int]) -> list[float]:
    plain = _model()
    F.mse_loss(plain(_batch(1)[0]), _batch(1)[1]).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = plain.state_dict()
    with _pipeline(**mesh) as pipe:
        pipe.build(*_batch(1))
        pipe.save(folder / "before")  # who writes what is agreed on here
        pipe.train_step(*_batch(1))
        pipe.save(folder / "after")
        found = [_worst(pipe.full_state_dict(), expected)]
        with pytest.raises(ValueError, match=r"is of another model|float64, and it is in float32"):
            pipe.load(folder / "before")
    with _pipeline(**mesh) as pipe:
        pipe.train_step(*_batch(1))
        pipe.train_step(*_batch(1))
        pipe.load(folder / "after")
        return [*found, _worst(pipe.full_state_dict(), expected)]


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 1, "data": 2}], ids=str)
def test_state_has_the_types_and_shapes_after_the_forward(gloo: Pool, tmp_path: Path, mesh: dict[str, int]) -> None:
    for differences in gloo.run(_saved, ranks=2, args=(tmp_path, mesh)):
        assert max(differences) < 1e-6


def _divided(kind: str) -> None:
    text = r"parameter '2.router.weight' was torch.float64 when the stages were built, .* into torch.float32"
    with pytest.raises(ValueError, match=text), _pipeline(pipe=1, data=2, data_parallel=kind) as pipe:
        pipe.train_step(*_batch(1))


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
def test_replicas_that_divide_the_weight_name_it(gloo: Pool, kind: str) -> None:
    gloo.run(_divided, ranks=2, args=(kind,))


def _on_one_of_two() -> None:
    model = _model()
    with PipelineModule(model, mesh=Mesh(pipe=1, data=2), num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.forward_backward(*_batch(1))
        if pipe.replica[0] == 1:
            model[2].double()
        text = r"'2.seen' was float64 .* is float32 .* on process 0 and float64 .* on process 1"
        with pytest.raises(ValueError, match=text):
            pipe.full_state_dict()


@pytest.mark.gloo
@pytest.mark.thorough
def test_processes_that_differ_are_named(gloo: Pool) -> None:
    gloo.run(_on_one_of_two, ranks=2)

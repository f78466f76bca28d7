"""Embeddings with sparse gradients: as one plain process, or refused by name where ranks would have to add them up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.alone import near, train_piped
from support.inside import profile_model
from support.parts import Parts
from support.pool import Pool
from support.records import records
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

import stagewright
from stagewright.pipe import PipelineModule
from stagewright.schedules import build

X = torch.randint(0, 11, (8, 3), generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Embedding(11, 4, sparse=True), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2)
    return nn.Sequential(*layers).double()


@stagewright.named
def optimizers(parameters: list[tuple[str, nn.Parameter]]) -> list[Optimizer | None]:
    sparse, others = ([p for name, p in parameters if (name == "0.weight") is wanted] for wanted in (True, False))
    return [SparseAdam(sparse, lr=0.05) if sparse else None, SGD(others, lr=0.1) if others else None]


def make(schedule: Any = "1f1b", **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"schedule": schedule, "optimizer": optimizers, "example_inputs": (X,)}
    settings |= {"num_microbatches": 4, "mesh": {"pipe": 2}} if isinstance(schedule, str) else {}
    return PipelineModule(make_model(), **records(loss_fn=nn.functional.mse_loss, **(settings | options)))


def plain(*, delay: int, max_norm: float | None, steps: int = 4) -> dict[str, Tensor]:
    """The weights after some steps of one process; gradients are those at the weights `delay` steps before."""
    model = make_model()
    made = [one for one in optimizers(list(model.named_parameters())) if one is not None]
    versions: list[dict[str, Tensor]] = []
    for t in range(steps):
        versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
        other = make_model()
        other.load_state_dict(versions[max(t - delay, 0)])
        for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
            (nn.functional.mse_loss(other(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in other.parameters()]
        assert gradients[0] is not None
        assert gradients[0].is_sparse
        norm = torch.stack([g.to_dense().norm() for g in gradients if g is not None]).norm()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert gradient is not None
            factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
            parameter.grad = gradient * factor
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.thorough(but=["1f1b-0-0.05", "2bw-1-None"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize(
    ("schedule", "delay"),
    [
        ("1f1b", 0),
        ("interleaved", 0),
        ("2bw", 1),
        pytest.param(build("1f1b", num_ranks=3, num_microbatches=4, replicas=(2, 1)), 0, id="replicas"),
    ],
)
def test_sparse_gradients_and_their_norm(schedule: Any, delay: int, max_norm: float | None) -> None:
    """Plain PyTorch does not clip them at all. Replicas in one process add up by themselves."""
    pipe = make(schedule, max_grad_norm=max_norm)
    found = train_piped(pipe, [(X, Y)] * 4)
    near(found.state, plain(delay=delay, max_norm=max_norm))


def test_gradients_of_several_calls_add_up() -> None:
    pipe = make(optimizer=None)
    pipe.forward_backward(X, Y)
    once = [p.grad.to_dense().clone() for p in pipe.parameters() if p.grad is not None]
    pipe.forward_backward(X, Y)
    twice = [p.grad for p in pipe.parameters() if p.grad is not None]
    assert twice[0].is_sparse
    for before, after in zip(once, twice, strict=True):
        assert torch.allclose(after.to_dense(), 2 * before, rtol=0, atol=1e-15)
    assert pipe.clip_grad_norm_(0.1) == pytest.approx(torch.stack([2 * g.norm() for g in once]).norm().item())


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_verify(schedule: str) -> None:
    make(schedule, max_grad_norm=0.05).verify(X, Y)


def test_a_checkpoint(tmp_path: Any) -> None:
    pipe = make()
    pipe.train_step(X, Y)
    assert pipe.held_bytes() > 0
    pipe.save(tmp_path)
    loss = pipe.train_step(X, Y).loss
    other = make("gpipe", mesh={"pipe": 3})
    other.load(tmp_path)
    assert other.train_step(X, Y).loss == loss


def test_the_profiler_steps_with_sparse_gradients() -> None:
    """As under schedule="auto"; SparseAdam takes no others."""
    options = {"loss_fn": nn.functional.mse_loss, "optimizer": optimizers, "seconds": 0.1}
    profile = profile_model(make_model(), (X,), target=Y, **options)
    assert profile.nodes[0].update_seconds > 0


# --- sums over ranks ---


MESSAGE = r"module '0' has sparse gradients, and ranks that hold copies of its weight .* Embedding\(..., sparse=False\)"


def test_replicas_of_a_stream_are_refused() -> None:
    with pytest.raises(ValueError, match=MESSAGE):
        make(build("2bw", num_ranks=3, num_microbatches=4, replicas=(2, 1)))
    make(build("2bw", num_ranks=3, num_microbatches=4, replicas=(1, 2)))


class Tied(Parts, weight=lambda: nn.Parameter(torch.zeros(11, 4))):
    """Its function asks for sparse gradients, which no module says."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True).flatten(1)


def test_a_sparse_gradient_that_no_module_announces_is_refused_in_a_sum() -> None:
    model = nn.Sequential(Tied(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    schedule = build("2bw", num_ranks=3, num_microbatches=4, replicas=(2, 1))
    pipe = PipelineModule(model, schedule=schedule, loss_fn=nn.functional.mse_loss, optimizer=lambda p: SGD(p, lr=0.1))
    with pytest.raises(ValueError, match=r"the gradient of '0.weight' is sparse, and ranks that hold copies of it"):
        train_piped(pipe, [(X, Y)] * 3)


def _over_processes(replicas: tuple[int, ...]) -> Any:
    try:
        pipe = make(build("1f1b", num_ranks=sum(replicas), num_microbatches=4, replicas=replicas), max_grad_norm=0.05)
    except ValueError as error:
        return str(error)
    return train_piped(pipe, [(X, Y)] * 4).state


@pytest.mark.thorough
def test_over_processes(gloo: Pool) -> None:
    for state in gloo.run(_over_processes, ranks=3, args=((1, 2),)):
        near(state, plain(delay=0, max_norm=0.05))
    answers = gloo.run(_over_processes, ranks=3, args=((2, 1),))
    assert all("module '0' has sparse gradients" in answer for answer in answers)

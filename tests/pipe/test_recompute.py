"""recompute="full": a forward that runs twice changes buffers, targets and generators once, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parts import Parts
from support.small import WIDTH, X, Y, make
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

ZEROS_FIRST = torch.cat([torch.zeros(2, WIDTH), X[2:]])


class Average(nn.Module):
    """A mean that begins to move with a real forward; `large` makes it a buffer of a megabyte."""

    def __init__(self, *, large: bool = False, begins: int = 3) -> None:
        super().__init__()
        self.begins = begins
        self.register_buffer("mean", torch.zeros(1 << 18 if large else 1))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and torch.is_grad_enabled() is not self.training:  # the first run of each microbatch
            self.seen += 1
        if self.seen >= self.begins:
            self.mean.mul_(0.5).add_(x.detach().mean())
        return x + self.mean[0]


class Reassigned(nn.Module):
    """A new tensor each time; two names for one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.twin = nn.Module()
        self.twin.register_buffer("count", torch.zeros(()))
        self.register_buffer("count", self.twin.count)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        self.count += 1
        return x + self.mean * self.twin.count


def plain(model: nn.Module, batch: Tensor) -> None:
    """Gradients of one batch in four microbatches, on one process."""
    for x, y in zip(batch.split(2), Y.split(2), strict=True):
        (F.mse_loss(model(x), y) / 4).backward()


@pytest.mark.thorough(but=["none-batch norm", "full-reassigned"])
@pytest.mark.parametrize("middle", [lambda: nn.BatchNorm1d(WIDTH), Reassigned], ids=["batch norm", "reassigned"])
@pytest.mark.parametrize("recompute", ["none", "full", "layer", "selective"])
def test_buffers_that_a_first_forward_leaves_as_they_are(middle: Callable[[], nn.Module], recompute: str) -> None:
    """Which buffers move was learned from values: zeros leave a running mean at 0, and then it moved twice."""
    torch.manual_seed(0)
    model, twin = (nn.Sequential(middle(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    plain(twin, ZEROS_FIRST)
    make(model=model, optimizer=None, recompute=recompute, cut=["2"]).forward_backward(ZEROS_FIRST, Y)
    for (name, one), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.allclose(one, other), name
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6), name


def averaging(*, recompute: str = "full", **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    model = nn.Sequential(Average(**options), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return make(model=model, optimizer=None, recompute=recompute, cut=["2"])


def test_a_buffer_that_begins_to_move_later() -> None:
    pipe = averaging()
    pipe.forward_backward(X, Y)
    expected = 0.0
    for x in X.split(2)[2:]:
        expected = expected / 2 + float(x.mean())
    assert float(pipe.state_dict()["0.mean"]) == pytest.approx(expected)


def test_a_large_buffer_that_begins_to_move_later_is_refused() -> None:
    """Its value from before the change is not kept: that would be a second copy of every mask."""
    with pytest.raises(ValueError, match=r"buffer 'mean' of Average .*Expected .* recompute= that leaves it out"):
        averaging(large=True).forward_backward(X, Y)


def test_a_large_buffer_that_moves_is_what_it_was_in_the_second_run() -> None:
    pipes = [averaging(large=True, begins=0, recompute=recompute) for recompute in ("none", "full")]
    for pipe in pipes:
        for _ in range(2):
            pipe.forward_backward(X, Y)
    assert torch.equal(*(pipe.state_dict()["0.mean"] for pipe in pipes))
    for one, other in zip(*(pipe.parameters() for pipe in pipes), strict=True):
        assert torch.equal(one.grad, other.grad)


# --- the loss ---


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(F.dropout(output, 0.5), target)


def doubling(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.mul_(2.0))


class Centered(Parts, center=lambda: torch.zeros(WIDTH)):
    """A moving target, as DINO's center."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.center.mul_(0.5).add_(output.detach().mean(0))
        return F.mse_loss(output - self.center, target)


@pytest.mark.parametrize(
    "loss", [lambda: noisy, lambda: doubling, Centered], ids=["random", "changes its target", "with a buffer"]
)
def test_a_loss_is_computed_again_as_it_was(loss: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> None:
    """It drew other numbers, doubled the target once more and moved its buffers twice: other gradients, no word."""
    gradients, targets, buffers = [], [], []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        loss_fn, target = loss(), Y.clone()
        make(model=model, optimizer=None, recompute=recompute, loss_fn=loss_fn).forward_backward(X, target)
        gradients.append([p.grad for p in model.parameters()])
        targets.append(target)
        buffers.append(list(loss_fn.buffers()) if isinstance(loss_fn, nn.Module) else [])
    for one, other in zip(gradients[0] + buffers[0], gradients[1] + buffers[1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*targets)

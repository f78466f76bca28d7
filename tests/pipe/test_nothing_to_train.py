"""Losses from which nothing, or not all that they are made of, would learn: refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.small import WIDTH, X, Y, layers, make
from torch import Tensor, nn


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


CASES: dict[str, dict[str, Any]] = {
    "all frozen": {"model": lambda: frozen(layers())},
    "no parameters": {"model": lambda: nn.Sequential(nn.Tanh(), nn.ReLU())},
    "detached": {"model": lambda: nn.Sequential(*layers(), Detached())},
    "2bw": {"model": lambda: frozen(layers()), "schedule": "2bw"},
    "full": {"model": lambda: frozen(layers()), "recompute": "full"},
    "no optimizer": {"model": lambda: frozen(layers()), "optimizer": None},
    "a loss that learns no more": {"model": lambda: frozen(layers()), "loss_fn": frozen(nn.HuberLoss())},
}


@pytest.mark.thorough(but=["no parameters", "no optimizer"])
@pytest.mark.parametrize("case", CASES)
def test_a_batch_that_trains_nothing_is_refused(case: str) -> None:
    options = CASES[case]
    pipe = make(**options | {"model": options["model"]()})
    train = pipe.train_step if options.get("optimizer", 0) is not None else pipe.forward_backward
    with pytest.raises(ValueError, match=r"nothing to train: .* plain PyTorch would raise in loss.backward\(\)"):
        train(X, Y)
    assert pipe.eval_step(X, Y).loss is not None


def test_what_is_frozen_later_is_refused_too() -> None:
    model = layers()
    pipe = make(model=model)
    pipe.train_step(X, Y)
    frozen(model)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        pipe.train_step(X, Y)
    model.requires_grad_(True)
    pipe.train_step(X, Y)


def test_a_frozen_first_stage_and_a_loss_that_alone_learns_are_fine() -> None:
    model = layers()
    frozen(model[:3])
    make(model=model).train_step(X, Y)
    scale = torch.ones(WIDTH, requires_grad=True)
    pipe = make(model=frozen(layers()), optimizer=None, loss_fn=lambda output, y: F.mse_loss(output * scale, y))
    pipe.forward_backward(X, Y)
    assert scale.grad is not None
    assert scale.grad.abs().sum() > 0


@pytest.mark.thorough(but=["{}"])
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"schedule": "2bw"}], ids=str)
def test_a_count_that_wants_a_gradient_is_refused(options: dict[str, Any]) -> None:
    def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weight = output.detach().sigmoid() if is_detached else output.sigmoid()
        return (weight * (output - target) ** 2).sum(), weight.sum()

    is_detached = False
    with pytest.raises(ValueError, match=r"count that requires a gradient, .* count.detach\(\)"):
        make(loss_fn=weighted, **options).train_step(X, Y)
    is_detached = True
    make(loss_fn=weighted, **options).train_step(X, Y)

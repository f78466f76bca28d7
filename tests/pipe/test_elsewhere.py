"""Parameters that another process holds: a use that needs their values answers by name, and never silently."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from support.small import X, Y, layers, make, sgd
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Joined(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


def _by_hand(average: nn.Module, model: nn.Module) -> None:
    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.mul_(0.9).add_(now.data, alpha=0.1)


USES: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "clip": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "norm of weights": lambda model, _: [float(p.detach().norm()) for p in model.parameters()],
    "all weights": lambda model, _: torch.cat([p.data.flatten() for p in model.parameters()]),
    "on the host": lambda model, _: [p.detach().numpy() for p in model.parameters()],
    "pickled": lambda model, _: [p.__reduce_ex__(2) for p in model.parameters()],
    "forward": lambda model, _: model(X),
    "by hand": lambda model, before: _by_hand(before, model),
    "AveragedModel": lambda model, before: AveragedModel(before).update_parameters(model),
    "own optimizer": lambda model, _: Joined(model.parameters(), lr=0.1).step(),
}


def _norm_by_hand(model: nn.Module) -> str:
    """What a norm of all gradients, taken twice, is told: once."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None)
    (warned,) = told
    assert warned.filename == __file__
    return str(warned.message)


def uses() -> tuple[dict[str, str], Mapping[str, torch.Tensor]]:
    """What each use says; and the weights behind two steps of the user's own optimizer over all parameters."""
    torch.manual_seed(0)
    model = layers()
    before = copy.deepcopy(model)
    pipe = make(model=model, optimizer=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    told: dict[str, str] = {}
    for _ in range(2):
        optimizer.zero_grad()
        pipe.forward_backward(X, Y)
        pipe.clip_grad_norm_(0.1)
        if pipe.world.distributed and not told:
            for name, use in USES.items():
                try:
                    told[name] = f"returned {use(model, before)!r:.60}"
                except ValueError as error:
                    told[name] = str(error)
            told["norm by hand"] = _norm_by_hand(model)
        optimizer.step()
    state = pipe.full_state_dict()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    AveragedModel(model).update_parameters(model)  # of what this process holds
    assert [p.shape for p in copy.deepcopy(model).parameters()] == [p.shape for p in before.parameters()]
    return told, state


def test_each_use_answers_by_name(gloo: Pool) -> None:
    """torch's clip_grad_norm_ took one stage's norm in silence; the rest were raw errors of meta tensors."""
    _, expected = uses()
    for rank, (told, state) in enumerate(gloo.run(uses, ranks=2)):
        assert list(told) == [*USES, "norm by hand"]
        said = told.pop("own optimizer")
        assert said.startswith("the step of optimizer Joined computes something over several parameters")
        for name, text in told.items():
            assert f"is held by rank {1 - rank}, and this process has no values of it" in text, (name, text)
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], msg=name)


def averaged() -> dict[str, torch.Tensor]:
    """Weights of the recipe of docs/guides/optimizers.md behind three steps."""
    average: dict[str, torch.Tensor] = {}

    def keep(record: object) -> None:
        for name, weight in pipe.state_dict().items():
            if weight.requires_grad:
                average.setdefault(name, weight.detach().clone()).lerp_(weight.detach(), 0.1)

    torch.manual_seed(0)
    pipe = make(model=layers(), on_step=keep)
    for _ in range(3):
        pipe.train_step(X, Y)
    now = {name: weight.detach().clone() for name, weight in pipe.state_dict().items()}
    pipe.load_state_dict(now | average)
    state = {name: weight.clone() for name, weight in pipe.full_state_dict().items()}
    pipe.load_state_dict(now)
    pipe.train_step(X, Y)
    return state


@pytest.mark.thorough
def test_an_average_of_the_weights(gloo: Pool) -> None:
    torch.manual_seed(0)
    model = layers()
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = sgd(list(model.parameters()))
    for _ in range(3):
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.update_parameters(model)
    for state in [averaged(), *gloo.run(averaged, ranks=2)]:
        for name, weight in plain.module.named_parameters():
            torch.testing.assert_close(state[name], weight.detach(), msg=name)


class Scaled(nn.Module):
    """Computes its own loss; between its layers it reads a parameter of its own in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        h = x * self.scale
        for layer in self.layers[:2]:
            h = layer(h)
        memory = h
        for layer in self.layers[2:]:
            h = layer(h + memory * self.scale)
        return h if labels is None else {"loss": F.mse_loss(h, labels), "out": h}


def predicted() -> tuple[str, float]:
    torch.manual_seed(0)
    pipe = make(model=Scaled(), mesh={"pipe": 3}, loss_fn="model", example_inputs=None)
    pipe.train_step(x=X, labels=Y)
    try:
        pipe.predict(X)
    except ValueError as error:
        return str(error), pipe.train_step(x=X, labels=Y).loss
    return "", 0.0


@pytest.mark.thorough
def test_weights_that_arguments_move_to_another_stage_are_refused_everywhere(gloo: Pool) -> None:
    """One rank raised an error alone, and the others waited for it."""
    (said, loss), *others = gloo.run(predicted, ranks=3)
    assert said.startswith("with these arguments stage 1 computes with 'scale', which another holds: expected")
    assert others == [(said, loss)] * 2

"""Changes between two batches: as plain PyTorch does, or refused; losses that would train nothing: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, stream
from torch import Tensor, nn


class Net(nn.Module):
    """Run by its own modules, with a multiplication behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.alpha = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(self.one(x)).relu()) * self.alpha


ANY: dict[str, tuple[Callable[[Any], object], str]] = {
    "a parameter": (
        lambda m: setattr(next(m.children()), "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
        r"weight' is another object than when the stages were built: expected the same parameters and submodules",
    ),
    "a submodule": (
        lambda m: setattr(m, next(iter(m._modules)), nn.Linear(WIDTH, WIDTH)),
        r"is another object than when the stages were built",
    ),
}


@pytest.mark.thorough(but=["a submodule"])
@pytest.mark.parametrize(("change", "message"), ANY.values(), ids=ANY)
def test_a_recorded_model(change: Callable[[Any], object], message: str) -> None:
    model = Net()
    pipe = make(model=model)
    pipe.train_step(X, Y)
    pipe.eval_step(X, Y)
    change(model)
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)


@pytest.mark.parametrize(("change", "message"), ANY.values(), ids=ANY)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_chain(change: Callable[[Any], object], message: str, schedule: str) -> None:
    model = layers()
    pipe = make(model=model, schedule=schedule)
    pipe.train_step(X, Y)
    change(model)
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)


def test_an_evaluation_has_its_own_mode() -> None:
    model = Net()
    pipe = make(model=model)
    model.eval()
    pipe.eval_step(X, Y)
    model.train()
    pipe.train_step(X, Y)


# --- requires_grad ---


def test_unfreezing_is_refused_by_name() -> None:
    for begin in (make, stream):
        model = layers()
        model[0].requires_grad_(False)
        pipe = begin(model=model)
        pipe.train_step(X, Y)
        pipe.flush()
        model[0].requires_grad_(True)
        pipe.eval_step(X, Y)
        message = r"parameter '0.weight' requires a gradient and did not when the stages were"
        with pytest.raises(ValueError, match=message):
            pipe.train_step(X, Y)


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_freezing_under_way_is_refused(schedule: str) -> None:
    model = layers()
    pipe = stream(schedule, model=model)
    pipe.train_step(X, Y)
    model[4].requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of parameter '4.weight' was changed while batches 0 to 0 are"):
        pipe.train_step(X, Y)
    pipe.flush()
    pipe.train_step(X, Y)


# --- learning rates of copies ---


def _change_a_rate(who: list[int], data: int) -> str:
    torch.manual_seed(0)
    pipe = make(mesh={"pipe": 2, "data": data}, model=layers(), optimizer=torch.optim.AdamW)
    pipe.train_step(X, Y)
    if pipe.rank in who:
        for optimizer in pipe.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5
    try:
        for _ in range(2):
            pipe.train_step(X, Y)
    except ValueError as error:
        return str(error)
    pipe.close()
    return ""


@pytest.mark.thorough
def test_learning_rates_that_differ_between_copies_are_refused(gloo: Pool) -> None:
    assert gloo.run(_change_a_rate, ranks=4, args=([0, 1, 2, 3], 2)) == [""] * 4
    assert gloo.run(_change_a_rate, ranks=2, args=([0], 1)) == [""] * 2  # stages of their own may have their own rates
    answers = gloo.run(_change_a_rate, ranks=4, args=([0, 2], 2))
    assert all("their optimizers have different options for '0.weight', '0.bias'" in answer for answer in answers[:2])
    assert all("their optimizers have different options for '3.weight', '3.bias'" in answer for answer in answers[2:])


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

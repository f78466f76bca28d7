"""Where a model or its user reaches around the pipeline: as plain PyTorch does, or refused by name."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, stream
from torch import Tensor, nn

from stagewright.pipe.update.gradients import clip_factor

# --- a norm that is no number ---


class Poison(torch.autograd.Function):
    """The value as it is, and a gradient that is no number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


class Poisoned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Poison.apply(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("begin", [make, stream])
def test_a_norm_that_is_no_number_makes_every_gradient_one(begin: Callable[..., Any]) -> None:
    """As torch.nn.utils.clip_grad_norm_; the stage behind the poisoned layer has finite gradients."""
    model = nn.Sequential(Poisoned(WIDTH, WIDTH), *layers(5))
    pipe = begin(model=model, max_grad_norm=1.0)
    pipe.train_step(X, Y)
    pipe.flush()
    assert all(value.isnan().all() for value in pipe.full_state_dict().values())


@pytest.mark.parametrize("norm", [0.0, 0.5, 2.0, math.inf, math.nan])
def test_the_factor_is_torchs(norm: float) -> None:
    parameter = nn.Parameter(torch.zeros(()))
    parameter.grad = torch.tensor(norm)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(
        torch.tensor(norm) * clip_factor(norm=norm, max_norm=1.0), parameter.grad, equal_nan=True
    )


# --- a model whose weights other processes hold ---


class Branches(nn.Module):
    """Traced, with a child of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())  # type: ignore[no-any-return]


def _ask_for_state(kind: str) -> list[str]:
    """Errors of every way to the state of a model that this process has a part of."""
    torch.manual_seed(0)
    model = layers() if kind == "chain" else Branches()
    pipe = make(model=model)
    pipe.train_step(torch.zeros(8, WIDTH), torch.zeros(8, WIDTH))
    errors = []
    ways: list[Callable[[], object]] = [
        model.state_dict,
        lambda: torch.save(model, io.BytesIO()),
        copy.deepcopy(model).state_dict,
    ]
    for ask in ways:
        try:
            ask()
        except ValueError as error:
            errors.append(str(error))
    mine = [child for child in model.children() if not any(p.is_meta for p in child.parameters())]
    for child in mine:
        child.state_dict()
    assert not any(value.is_meta for value in pipe.state_dict().values())
    assert not any(value.is_meta for value in pipe.full_state_dict().values())
    pipe.load_state_dict(pipe.full_state_dict())
    pipe.close()
    return errors


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["chain", "traced"])
def test_state_that_is_elsewhere_is_not_given_as_meta_tensors(gloo: Pool, kind: str) -> None:
    for errors in gloo.run(_ask_for_state, ranks=2, args=(kind,)):
        assert len(errors) == 3
        assert all(r"Expected pipe.full_state_dict() for all weights" in error for error in errors)

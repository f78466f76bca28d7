"""PACI runs: one set of weights a stage, changed between the forward and the backward of a microbatch.

Against two references that import nothing of stagewright: three weights by hand, and the replay of
support/async_reference.py for other models, optimizers and drains.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.async_pipeline import make_pipeline, run
from support.async_reference import UNEVEN, AsyncCase, agree, make_model
from support.records import records
from torch import Tensor, nn

from stagewright import PipelineModule
from stagewright.schedules import build

PACI = AsyncCase(task="conv-norm", schedule="paci", num_ranks=3, update_every=2, sizes=UNEVEN[:4])


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


def sgd(rate: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def scalars(*weights: float) -> nn.Sequential:
    """A chain y = w_n .. w_1 x."""
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in weights]).double()
    for layer, weight in zip(model, weights, strict=True):
        nn.init.constant_(layer.weight, weight)
    return model


def test_three_weights_by_hand() -> None:
    """Stage 0 has w1 and w2, stage 1 has w3; x = 1, target 0, so that the gradient of the output is the output.

    step  stage 1                             stage 0
    F0                                        w = (1, 2): keeps w1 x = 1, gives 2
    F1                                        the same
    B0    y = 2, to stage 0 2, w3: 1 -> 0.6   w2 -= 0.1 * 2 * 1 = 1.8, w1 -= 0.1 * 2 * 2 = 0.6
    B1    y = 1.2, to stage 0 0.72,           w2 -= 0.1 * 0.72 * 1 (kept) = 1.728,
          w3 -= 0.1 * 2.4 = 0.36              w1 -= 0.1 * 0.72 * 1.8 (new; it was 2) = 0.4704
    """
    model = scalars(1.0, 2.0, 1.0)
    schedule = build("paci", num_ranks=2, num_microbatches=1)
    options: dict[str, Any] = {"loss_fn": half_square, "optimizer": sgd(0.1), "cut": ["2"]}
    with PipelineModule(model, **records(schedule=schedule, mesh={"pipe": 2}, **options)) as pipe:
        for _ in range(2):
            pipe.train_step(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
        pipe.flush()
        state = pipe.full_state_dict()
    assert [value.item() for value in state.values()] == pytest.approx([0.4704, 1.728, 0.36], abs=1e-15)


@pytest.mark.parametrize("recompute", ["none", "selective", "layer", "full"])
def test_recomputation_runs_with_the_new_weights(recompute: str) -> None:
    """A unit from its input, or the whole stage; what "selective" keeps, the products, is as old as without it.

    As above, with a tanh behind w1: a unit of w1 and its tanh, and one of w2.
    """
    model = scalars(1.0, 2.0, 1.0)
    model = nn.Sequential(nn.Sequential(model[0], nn.Tanh()), model[1], model[2])
    schedule = build("paci", num_ranks=2, num_microbatches=1)
    options: dict[str, Any] = {"loss_fn": half_square, "optimizer": sgd(0.1), "cut": ["2"], "recompute": recompute}
    with PipelineModule(model, **records(schedule=schedule, mesh={"pipe": 2}, **options)) as pipe:
        for _ in range(2):
            pipe.train_step(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
        pipe.flush()
        found = [value.item() for value in pipe.full_state_dict().values()]
    a = math.tanh(1.0)
    y = 2.0 * a
    w1, w2, w3 = 1.0 - 0.1 * y * 2.0 * (1 - a**2), 2.0 - 0.1 * y * a, 1.0 - 0.1 * y * 2.0 * a  # behind B0
    y = w3 * 2.0 * a  # F1 of stage 0 was before B0
    again = math.tanh(w1)
    slope = 1 - (again if recompute in ("layer", "full") else a) ** 2
    given = again if recompute == "full" else a  # to w2
    w1, w2 = w1 - 0.1 * y * w3 * w2 * slope, w2 - 0.1 * y * w3 * given
    assert found == pytest.approx([w1, w2, w3 - 0.1 * y * 2.0 * a], abs=1e-14)


# --- other models, optimizers, drains ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        replace(PACI, num_ranks=4, optimizer="adamw-fused", decay=True, flushes=(1,), evals=(2,), sizes=UNEVEN),
        replace(PACI, num_ranks=4, replicas=(2, 1, 1), flushes=(3,)),
        replace(PACI, task="mlp", num_ranks=4, update_every=1, flushes=(0, 2)),
        replace(PACI, task="small-gpt", autocast=True, optimizer="adamw", sizes=UNEVEN[:3]),  # casts are the forward's
    ],
    ids=["drains", "replicas", "each microbatch", "autocast"],
)
def test_other_models_against_the_replay(case: AsyncCase) -> None:
    agree(run(case), case)


def test_no_norm_over_all_stages() -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 under schedule 'paci': .* Expected schedule='2bw'"):
        make_pipeline(PACI, make_model(PACI), max_grad_norm=1.0)

"""Plans that run nodes of a stage by samples, divided or whole on each tensor rank: against one plain process."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from support.tensor_models import make_pipe
from support.uneven import plan_of, stage
from torch import Tensor, nn

from stagewright.partition import Plan

pytestmark = pytest.mark.concerns("partition/plans", "pipe/build.py", "pipe/shards", "pipe/verify")

WIDE = {"fc1": "column", "fc2": "row"}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {
        "c1": nn.Conv2d(2, 4, 3, padding=1),
        "r1": nn.ReLU(inplace=True),
        "c2": nn.Conv2d(4, 3, 3),
        "pool": nn.AvgPool2d(2),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(12, 8),
        "r2": nn.ReLU(),
        "fc2": nn.Linear(8, 5),
    }
    return nn.Sequential(OrderedDict(parts)).double()


def batch(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 6, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5, (size,), generator=generator)


def train(plan: Plan, **options: Any) -> dict[str, Any]:
    settings = {"tensor_parallel": WIDE, "loss_fn": F.cross_entropy, "optimizer": SGD, "verify": True}
    with make_pipe(cnn(), num_microbatches=None, plan=plan, **(settings | options)) as pipe:
        results = [pipe.train_step(*batch(step)) for step in range(3)]
        return {
            "losses": [one.loss for one in results],
            "norms": [one.grad_norm for one in results],
            "eval": pipe.eval_step(*batch(3)).loss,
            "state": pipe.full_state_dict(),
        }


def train_plain() -> dict[str, Any]:
    model = cnn()
    steps = SGD(model.parameters())
    losses, norms = [], []
    for step in range(3):
        x, y = batch(step)
        steps.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)))
        steps.step()
        losses.append(loss.item())
    x, y = batch(3)
    return {"losses": losses, "norms": norms, "eval": F.cross_entropy(model(x), y).item(), "state": model.state_dict()}


ON, BY, CUT, WHOLE = "samples on", "samples", "divided", "whole"
ONE = plan_of(stage("c1 r1 c2 pool flat fc1 r2 fc2", 0, 1, ways=(ON, ON, ON, ON, BY, CUT, CUT, CUT)))
CASES = {
    "one stage": ONE,
    "a cut between parts": plan_of(
        stage("c1 r1 c2", 0, 1, ways=(ON, ON, ON)), stage("pool flat fc1 r2 fc2", 2, 3, ways=(ON, BY, CUT, CUT, CUT))
    ),
    "all by samples, and one size a stage": plan_of(
        stage("c1 r1 c2", 0, ways=()), stage("pool flat fc1 r2 fc2", 1, 2, ways=(ON, ON, ON, BY, BY))
    ),
    "whole": plan_of(stage("c1 r1 c2 pool flat fc1 r2 fc2", 0, 1, ways=(BY, BY, ON, BY, CUT, WHOLE, WHOLE, WHOLE))),
}


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_process(gloo: Pool, case: str) -> None:
    plan, wanted = CASES[case], train_plain()
    for found in gloo.run(train, ranks=plan.num_devices, args=(plan,)):
        for what in ("losses", "norms", "eval"):
            assert found[what] == pytest.approx(wanted[what], abs=1e-12), what
        for name, value in wanted["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=0, atol=1e-12)

"""Plans whose stages have tensor groups of their own sizes: against one plain process, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.pool import Pool
from support.tensor_models import loss_fn, make_batch, make_model, make_pipe

from stagewright.partition import Plan, PlanStage
from stagewright.schedules import Costs

NODES = {
    2: (("embed", "blocks.0"), ("blocks.1", "norm", "head")),
    3: (("embed", "blocks.0"), ("blocks.1",), ("norm", "head")),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def plan_of(*sizes: int, **fields: Any) -> Plan:
    """A stage for each size of tensor group, on ranks in a row."""
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    stages = [
        PlanStage(nodes=nodes, ranks=tuple(range(begin, begin + size)), tensor=size, step_seconds=3.0)
        for nodes, begin, size in zip(NODES[len(sizes)], begins, sizes, strict=True)
    ]
    settings: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "num_devices": sum(sizes)}
    return Plan(
        stages=tuple(stages),
        costs=Costs(forward=1.0, backward=2.0),
        cost_model="default",
        predicted_step_time=3,
        bound=3,
        **(settings | fields),
    )


def train(plan: Plan, optimizer: str = "sgd", **options: Any) -> dict[str, Any]:
    with make_pipe(make_model(), num_microbatches=None, plan=plan, optimizer=OPTIMIZERS[optimizer], **options) as pipe:
        results = [pipe.train_step(*make_batch(step)) for step in range(3)]
        return {
            "losses": [one.loss for one in results],
            "norms": [one.grad_norm for one in results],
            "eval": pipe.eval_step(*make_batch(3, size=5)).loss,
            "state": pipe.full_state_dict(),
            "held": sum(p.numel() for p in pipe.parameters()),
        }


def train_plain(optimizer: str = "sgd") -> dict[str, Any]:
    model = make_model()
    steps = OPTIMIZERS[optimizer](model.parameters())
    losses, norms = [], []
    for step in range(3):
        x, y = make_batch(step)
        steps.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)))
        steps.step()
        losses.append(loss.item())
    x, y = make_batch(3, size=5)
    return {"losses": losses, "norms": norms, "eval": loss_fn(model(x), y).item(), "state": model.state_dict()}


def check(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-12) -> None:
    for what in ("losses", "norms", "eval"):
        assert found[what] == pytest.approx(wanted[what], abs=tolerance), what
    for name, value in wanted["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=0, atol=tolerance)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("sizes", "optimizer", "options"),
    [
        ((2, 1), "sgd", {"verify": True}),
        ((2, 1, 1), "sgd", {}),
        ((1, 2, 1), "adam", {}),
        ((1, 1, 2), "sgd", {}),
    ],
    ids=str,
)
def test_it_equals_one_process(gloo: Pool, sizes: tuple[int, ...], optimizer: str, options: dict[str, Any]) -> None:
    wanted = train_plain(optimizer)
    for found in gloo.run(train, ranks=sum(sizes), args=(plan_of(*sizes), optimizer), kwargs=options):
        check(found, wanted, 1e-10 if optimizer == "adam" else 1e-12)

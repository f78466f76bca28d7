"""Every registered family runs, and cases that suites of other runtimes hold: against one plain process, float64.

An optimizer notes the gradients that it is given and leaves the weights alone, so that batches that overlap, too, have
those of one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parts import Parts
from support.records import records
from support.sizes import fitting
from support.small import WIDTH, sgd
from torch import Tensor, nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import FAMILIES, build

RANKS, BATCHES = 4, 2
D = 3


def make_model(num_stages: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(num_stages)]).double()


def make_batch(step: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """[B, T, D], one microbatch larger than the others."""
    generator = torch.Generator().manual_seed(step)
    shape = (num_microbatches + 1, 2 * RANKS, D)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


class Noting(torch.optim.SGD):
    """Keeps gradients instead of using them."""

    def __init__(self, parameters: Any, noted: dict[int, list[Tensor]]) -> None:
        super().__init__(parameters, lr=1.0)
        self.noted = noted

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                self.noted.setdefault(id(parameter), []).append(parameter.grad.clone())


@pytest.mark.thorough(but=["eager-1f1b"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs(name: str) -> None:
    P, M = fitting(name, RANKS, RANKS)
    once = {"update_every": M} if "update_every" in FAMILIES[name].options else {}
    schedule = build(name, num_ranks=P, num_microbatches=M, **once)
    model, plain = make_model(schedule.num_stages), make_model(schedule.num_stages)
    noted: dict[int, list[Tensor]] = {}
    pipe = PipelineModule(
        model,
        schedule=schedule,
        mesh={"pipe": P},
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: Noting(parameters, noted),
    )
    batches = [make_batch(step, M) for step in range(BATCHES)]
    results = [pipe.train_step(*batch) for batch in batches]
    results += pipe.flush()
    evaluated = pipe.eval_step(*batches[0]).loss
    pipe.close()
    losses = {result.loss_step: result.loss for result in results if result.loss is not None}
    for step, (x, y) in enumerate(batches):
        plain.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        assert losses[step] == pytest.approx(float(loss.detach()), abs=1e-12)
        if step == 0:
            assert evaluated == pytest.approx(losses[0], abs=1e-12)
        for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert len(noted[id(mine)]) == BATCHES, key
            torch.testing.assert_close(noted[id(mine)][step], theirs.grad, rtol=0, atol=1e-12)


X, Y = (torch.randn(14, WIDTH, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(2))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def assert_trains(model: nn.Module, *, loss: Any = F.mse_loss, stages: bool = False, **options: Any) -> None:
    """Three steps, whose losses and weights are those of the plain model."""
    model = model.double()
    plain, plain_loss = copy.deepcopy((model, loss))
    trained = [*plain.parameters(), *(plain_loss.parameters() if isinstance(plain_loss, nn.Module) else [])]
    optimizer, expected = sgd(trained), []
    for _ in range(3):
        optimizer.zero_grad()
        value = plain_loss(plain(X), Y)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    what = {"stages": list(model.children())} if stages else {"model": model}
    pipe = PipelineModule(**records(**what, loss_fn=loss, optimizer=sgd, **options))
    assert [pipe.train_step(X, Y).loss for _ in range(3)] == pytest.approx(expected, rel=1e-12)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


# --- torch.distributed.pipelining ---


# --- Megatron-LM ---


class Head(Parts, linear=lambda: linear().double()):
    """A loss with parameters, alone on its stage."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.linear(output), target)


LAYOUTS: dict[str, tuple[Callable[[], Sequence[nn.Module]], Callable[[], Any]]] = {
    "empty inside": (lambda: [linear(), nn.Sequential(), nn.Identity(), linear()], lambda: F.mse_loss),
    "empty at first": (lambda: [nn.Identity(), linear(), nn.Sequential(), linear()], lambda: F.mse_loss),
    "loss alone": (lambda: [linear(), linear(), linear(), nn.Identity()], lambda: F.mse_loss),
    "loss with weights alone": (lambda: [linear(), linear(), nn.Sequential(), nn.Identity()], Head),
    "one stage has all": (lambda: [nn.Identity(), nn.Identity(), linear(), nn.Identity()], lambda: F.mse_loss),
}
ORDERS = [("1f1b", 4), ("zb-h1", 4), ("interleaved", 2), ("interleaved-zb", 2), ("dualpipe-v", 2)]


@pytest.mark.thorough(but=["one stage has all-zb-h1-4"])
@pytest.mark.parametrize(("schedule", "num_ranks"), ORDERS[1:3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_without_layers(layout: str, schedule: str, num_ranks: int) -> None:
    make_stages, make_loss = LAYOUTS[layout]
    stages = nn.Sequential(*make_stages())
    options = {"schedule": schedule, "mesh": {"pipe": num_ranks}, "num_microbatches": 4}
    assert_trains(stages, loss=make_loss(), stages=True, **options)

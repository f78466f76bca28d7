"""Every registered family runs: gradients in float64 against one plain process; a family added later is here by itself.

The optimizer notes the gradients that it is given and leaves the weights alone, so that batches that overlap, too, have
those of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.sizes import fitting
from torch import Tensor, nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import FAMILIES, build

RANKS, BATCHES = 4, 2
WIDTH = 3


def make_model(num_stages: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]).double()


def make_batch(step: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """[B, T, D], one microbatch larger than the others."""
    generator = torch.Generator().manual_seed(step)
    shape = (num_microbatches + 1, 2 * RANKS, WIDTH)
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

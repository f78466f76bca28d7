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

from stagewright import named
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


@named
def muon_and_adamw(parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer | None]:
    """Muon for the matrices, but the first; AdamW for the rest, without decay."""
    matrices = [p for name, p in parameters if p.ndim == 2 and not name.startswith("0.")]
    others = [p for name, p in parameters if p.ndim != 2 or name.startswith("0.")]
    return [
        torch.optim.Muon(matrices, lr=1e-2) if matrices else None,
        torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0) if others else None,
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, one in FAMILIES.items() if not one.rule.is_asynchronous])
def test_muon_and_adamw_under_every_flush_family(name: str) -> None:
    """Two optimizers a stage, each with its schedule, clipped: weights as of one process."""
    P, M = fitting(name, RANKS, RANKS)
    schedule = build(name, num_ranks=P, num_microbatches=M)
    model, plain = make_model(schedule.num_stages), make_model(schedule.num_stages)

    def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    pipe = PipelineModule(
        model,
        schedule=schedule,
        mesh={"pipe": P},
        loss_fn=F.mse_loss,
        optimizer=muon_and_adamw,
        lr_scheduler=halved,
        max_grad_norm=1e-3,
    )
    optimizers = [one for one in muon_and_adamw(list(plain.named_parameters())) if one is not None]
    schedulers = [halved(optimizer) for optimizer in optimizers]
    for step in range(3):
        x, y = make_batch(step, M)
        result = pipe.train_step(x, y)
        F.mse_loss(plain(x), y).backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
        assert norm > 1e-3
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        for one in (*optimizers, *schedulers):
            one.step()
        plain.zero_grad()
    for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9, msg=key)

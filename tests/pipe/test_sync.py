"""Data replicas that average their weights every H-th step, or as seldom as their data allows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import next_interval
from support.pool import Pool
from torch import nn

import stagewright as sw
from stagewright.pipe import PipelineModule

STEPS, LR = 7, 0.05
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=LR),
}


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def tied_model() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model[3].weight = model[0].weight
    return model


def masked(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count), which differ from microbatch to microbatch."""
    counts = target[:, 0] > 0
    return ((output - target).square().mean(1) * counts).sum(), counts.sum()


def batch(step: int, replica: int, *, skew: float = 0.0, samples: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As many samples in each replica as it likes."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(samples or 8 + 2 * replica, 6, generator=generator, dtype=torch.float64)
    return x, (x.roll(1, dims=1) + skew * (2 * replica - 1))


def make(pipe: int, every: int | str, optimizer: str = "sgd", **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"lr_scheduler": halved, "max_grad_norm": 0.5, "loss_fn": F.mse_loss, "timeout": 60.0}
    settings = settings | {"num_microbatches": 2, "optimizer": OPTIMIZERS[optimizer]} | options
    model = settings.pop("model", None) or tied_model()
    return PipelineModule(model, mesh=sw.Mesh(pipe=pipe, data=2, sync=every), **settings)


def plain(every: int, optimizer: str, *, loss_fn: Any) -> tuple[list[float], list[list[float]], dict[str, torch.Tensor]]:
    """Losses, norms by replica and the last average, of replicas that one process trains one after the other."""
    models = [tied_model() for _ in range(2)]
    made = [OPTIMIZERS[optimizer](list(model.parameters())) for model in models]
    schedulers = [halved(one) for one in made]
    losses, norms = [], []
    for step in range(STEPS):
        sums, counts = [], []
        norms.append([])
        for replica, (model, one, scheduler) in enumerate(zip(models, made, schedulers, strict=True)):
            x, y = batch(step, replica)
            value = loss_fn(model(x), y)
            total, count = value if isinstance(value, tuple) else (value * len(x), torch.tensor(len(x)))
            one.zero_grad()
            (total / count).backward()
            norms[-1].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            one.step()
            scheduler.step()
            sums.append(float(total.detach()))
            counts.append(float(count))
        losses.append(sum(sums) / sum(counts))
        if (step + 1) % every == 0 or step == STEPS - 1:  # the last: flush
            for both in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.detach() for p in both]).mean(0)
                for p in both:
                    p.data.copy_(mean)
    return losses, norms, models[0].state_dict()


def train(pipe: int, every: int, optimizer: str, loss: str) -> dict[str, Any]:
    loss_fn = masked if loss == "masked" else F.mse_loss
    module = make(pipe, every, optimizer, loss_fn=loss_fn, verify=True)
    replica = module.rank % 2
    results = [module.train_step(*batch(step, replica)) for step in range(STEPS)]
    told = ""
    try:
        module.state_dict()
    except ValueError as error:
        told = str(error)
    module.flush()
    timeline = results[-1].timeline()
    local = sum(p.numel() * 8 for p in module.parameters())
    found = {
        "losses": [one.loss for one in results],
        "norms": [one.grad_norm for one in results],
        "weights": module.full_state_dict(),
        "averaging": module.averaging,
        "bytes": local,
        "told": told,
        "measured": timeline.measured and (pipe == 1 or module.measured_costs() is not None),
    }
    module.close()
    return found


@pytest.mark.gloo
@pytest.mark.concerns("pipe/update", "pipe/build.py", "pipe/run/training.py")
@pytest.mark.parametrize(
    ("pipe", "every", "optimizer", "loss"), [(1, 3, "sgd", "masked"), (2, 2, "adamw", "mean"), (2, 3, "sgd", "masked")]
)
def test_replicas_step_alone_and_are_averaged(gloo: Pool, pipe: int, every: int, optimizer: str, loss: str) -> None:
    """With tied weights, clipping, a rate that falls, batches of other sizes, and a first batch that is verified."""
    losses, norms, weights = plain(every, optimizer, loss_fn=masked if loss == "masked" else F.mse_loss)
    tolerance = 1e-12 if optimizer == "sgd" else 1e-10
    for rank, found in enumerate(gloo.run(train, ranks=2 * pipe, args=(pipe, every, optimizer, loss))):
        assert found["losses"] == pytest.approx(losses, rel=tolerance)
        assert found["norms"] == pytest.approx([both[rank % 2] for both in norms], rel=tolerance)
        for name, expected in weights.items():
            torch.testing.assert_close(found["weights"][name], expected, rtol=tolerance, atol=tolerance)
        count = -(-STEPS // every)
        assert found["averaging"] == (every, count, count * found["bytes"], None)
        assert "state_dict between two averagings" in found["told"]
        assert found["measured"]

"""Cut, placement and order that are chosen together run as they are: unequal chunks a rank, over processes."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import Layer, Schedule, synthesize_jointly

P, M, D = 4, 8, 8
KINDS = {"E": (0.004, 0.006), "M": (0.014, 0.021), "-": (0.006, 0.009), "*": (0.010, 0.014), "L": (0.030, 0.040)}
CHAIN = "EM-M*-M-M*-M-L"  # [s] of F, and of I, by emulation; W take next to nothing
X, Y = (torch.randn(16, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


class Nap(torch.autograd.Function):
    """The same values, later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: tuple[float, float]) -> Tensor:
        ctx.back = seconds[1]
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.back)
        return gradient.clone(), None


class Block(nn.Module):
    def __init__(self, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        later: Tensor = Nap.apply(torch.tanh(self.linear(x)), self.seconds)  # type: ignore[no-untyped-call]
        return later


def make(*, naps: bool) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(KINDS[kind] if naps else (0.0, 0.0)) for kind in CHAIN)).double()


def run(text: str, cut: tuple[int, ...]) -> tuple[float, dict[str, Tensor], float]:
    """Loss and gradients of a batch, and the bubble that was measured."""
    model = make(naps=True)
    with PipelineModule(
        model,
        **records(
            schedule=Schedule.from_json(text),
            cut=[str(first) for first in cut[1:-1]],
            mesh={"pipe": P},
            num_microbatches=M,
            loss_fn=F.mse_loss,
            example_inputs=(X,),
            timeout=120.0,
        ),
    ) as pipe:
        for _ in range(2):  # the first one is longer
            model.zero_grad()
            result = pipe.forward_backward(X, Y)
        gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        return result.loss, gradients, result.timeline().bubble


@pytest.mark.gloo
def test_what_is_chosen_runs_with_unequal_chunks_a_rank(gloo: Pool) -> None:
    layers = [Layer(forward=f, input_grad=i, weight_grad=0.0005) for f, i in (KINDS[kind] for kind in CHAIN)]
    many = {"cuts": 20, "evaluations": 400, "seconds": 300}
    found = synthesize_jointly(layers, num_ranks=P, num_microbatches=M, placements=["any"], **many)
    best = found.best
    assert not isinstance(best.placement, str)
    assert len({len(own) for own in best.placement}) > 1
    assert found.lower_bound <= best.value < found.separate.value
    assert all(start < end for start, end in pairwise(best.cut))

    plain = make(naps=False)
    losses = [F.mse_loss(plain(x), y) / M for x, y in zip(X.chunk(M), Y.chunk(M), strict=True)]
    for loss in losses:
        loss.backward()
    outcomes = gloo.run(run, ranks=P, args=(best.synthesis.schedule.to_json(), best.cut))
    gradients: dict[str, Tensor] = {}
    for loss, own, measured in outcomes:
        assert loss == pytest.approx(sum(each.item() for each in losses), abs=1e-13)
        gradients |= own
        print(f"bubble: predicted {best.synthesis.timeline.bubble:.3f}, measured {measured:.3f}")
        assert 0 <= measured < 1  # how far it is from the prediction, a busy machine decides
    assert gradients.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-13)

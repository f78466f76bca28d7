"""What a plan does with a stage's activations beside recompute: profile, plan, run, exact and as large as predicted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import profile_model
from support.pool import Pool
from torch import Tensor, nn

from stagewright.partition import Cluster, Plan, plan
from stagewright.pipe import PipelineModule

WIDTH, SAMPLES, M = 32, 2048, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.mlp(x)
        return made


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).double()
    return model, torch.randn(SAMPLES, WIDTH, dtype=torch.float64)


def planned(treatments: tuple[str, ...], limit: float | None = None, **of_cluster: Any) -> Plan:
    model, x = made()
    part = x[: SAMPLES // M]
    profile = profile_model(model, (part,), loss_fn=F.mse_loss, target=part, repetitions=2, seconds=0.2)
    return plan(
        profile,
        Cluster.from_levels([(2, 1e10)], **of_cluster),
        global_batch=SAMPLES,
        memory_limit=limit,
        pipeline_sizes=(2,),
        schedules="1f1b",
        recompute=treatments,
        optimizer_bytes=0,
        runnable=True,
    )


def trained(found: Plan) -> tuple[float, dict[str, Tensor], int]:
    """Loss and state behind two steps, and the most bytes that this process held in the second."""
    model, x = made()
    options = {"loss_fn": F.mse_loss, "optimizer": lambda own: torch.optim.SGD(own, lr=0.05)}
    with PipelineModule(model, schedule=found, example_inputs=(x,), **options) as pipe:  # type: ignore[arg-type]
        pipe.train_step(x, x)
        with pipe.watch_memory() as memory:
            loss = pipe.train_step(x, x).loss
        assert loss is not None
        return loss, pipe.full_state_dict(), memory.peak_bytes


def alone() -> dict[str, Tensor]:
    model, x = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def agree(found: Plan, plain: Plan, results: list[Any], wanted: list[Any]) -> None:
    reference = alone()
    for rank, ((loss, state, most), (other, kept, more)) in enumerate(zip(results, wanted, strict=True)):
        assert loss == other
        for name, value in state.items():
            assert torch.equal(value, kept[name])
            torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-12)
        if len(results) > 1:
            assert found.memory_bytes[rank] == pytest.approx(most, rel=0.05)
            assert plain.memory_bytes[rank] == pytest.approx(more, rel=0.05)


@pytest.mark.gloo
def test_the_first_stage_keeps_no_results_of_gelus(gloo: Pool) -> None:
    """Its two microbatches in flight are 512 KB less a block; the last, with one, keeps all: equal to the bit."""
    plain = planned(("none",))
    one = SAMPLES // M * 4 * WIDTH * 8
    found = planned(("none", "keep_less"), limit=plain.memory_bytes[0] - 2 * one)
    assert [stage.recompute for stage in found.stages] == ["keep_less", "none"]
    assert plain.memory_bytes[0] - found.memory_bytes[0] == 2 * 2 * one - one  # one is there again in a backward
    assert [stage.recompute for stage in plain.stages] == ["none", "none"]
    assert "recompute keep_less in 1 of 2 stages" in found.explain().replace("\n  ", " ")
    assert Plan.from_json(found.to_json()) == found
    agree(found, plain, [trained(found)], [trained(plain)])
    agree(found, plain, *(gloo.run(trained, ranks=2, args=(each,)) for each in (found, plain)))

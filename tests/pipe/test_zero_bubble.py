"""Zero bubble schedules run: models over a V, over processes, and orders for the costs that a run has measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import Layout, agree
from support.matrix import make_case
from support.pipeline import run
from support.records import records
from support.reference import reference
from torch import nn

from stagewright import PipelineModule
from stagewright.schedules import Costs, build


@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "task", "recompute"), [("zb-v", "tied-gpt", "none"), ("v-half", "gpt", "full")])
def test_models_under_them(schedule: str, task: str, recompute: str) -> None:
    """Tied embeddings on one rank of a V; blocks that run again in front of their I."""
    layout = Layout(schedule=schedule, num_ranks=2, num_chunks=2, recompute=recompute)
    case = make_case(task, layout, 5)
    agree(run(case, layout), reference(case), case)


def test_a_schedule_for_measured_costs_runs() -> None:
    """Profile, order for it, run: the costs that a run has measured are what the automatic schedules take."""
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "mesh": {"pipe": 3}}
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    x, y = torch.randn(2, 8, 4)
    first = PipelineModule(model, **records(schedule="zb-h1", num_microbatches=4, **options))
    first.forward_backward(x, y)
    costs = first.measured_costs()
    assert isinstance(costs, Costs)
    schedule = build("zb-2p", num_ranks=3, num_microbatches=8, costs=costs, memory_limit=4)
    result = PipelineModule(model, **records(schedule=schedule, **options)).forward_backward(x, y)
    assert result.timeline().peak_activations <= (4, 4, 4)

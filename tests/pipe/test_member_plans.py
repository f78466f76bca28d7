"""Plans that divide experts or sequences train as one plain process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import experts, sliced
from support.plain import trained_plainly
from support.pool import Pool
from torch import Tensor, nn

from stagewright import PipelineModule
from stagewright.partition import Plan, PlanStage
from stagewright.schedules import Costs

STEPS = 3


def _plan(
    schedule: str, nodes: list[str], rows: list[list[int]], *, chunks: int, sizes: dict[str, int], **of: Any
) -> Plan:
    stages = [
        PlanStage(nodes=tuple(each.split()), ranks=tuple(rows[at % len(rows)]), step_seconds=1, **of)
        for at, each in enumerate(nodes)
    ]
    return Plan(
        stages=tuple(stages),
        num_devices=4,
        num_chunks=chunks,
        costs=Costs(forward=1, backward=2),
        cost_model="default",
        bottleneck=1,
        bound=1,
        schedule=schedule,
        **{"num_microbatches": 4, **sizes},  # type: ignore[arg-type]
    )


def _trained(
    plan: Plan, model: Callable[[], nn.Module], loss_fn: Any, batch: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[PipelineModule, float]:
    """A pipeline after its steps, in which all ranks pass the same batch, and the largest difference of a loss, a
    weight, or an evaluation in two microbatches."""
    expected, plain = trained_plainly(model(), batch, loss_fn, steps=STEPS, delay=int(plan.schedule == "2bw"))
    optimizer = partial(torch.optim.AdamW, lr=0.05)
    pipe = PipelineModule(model(), schedule=plan, loss_fn=loss_fn, optimizer=optimizer, max_grad_norm=1.0, verify=True)
    results = [pipe.train_step(*batch(step)) for step in range(STEPS)] + pipe.flush()
    found = [result.loss for result in results if result.loss is not None]
    differences = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    state = pipe.full_state_dict()
    differences += [float((state[name] - x).abs().max()) for name, x in plain.state_dict().items()]
    x, y = batch(STEPS, 3)
    plain.load_state_dict(state)
    differences.append(abs((pipe.eval_step(x, y).loss or 0.0) - loss_fn(plain(x), y).item()))
    return pipe, max(differences)


def _over_experts(schedule: str, rows: list[list[int]], overlaps: bool = False, **of: Any) -> float:
    nodes, chunks = (["0 1", "2", "3 4", "5"], 2) if schedule == "interleaved" else (["0 1 2", "3 4 5"], 1)
    sizes = {"expert": 2, "overlaps": overlaps, "num_microbatches": 8 if overlaps else 4}  # fewer make no pair
    plan = _plan(schedule, nodes, rows, chunks=chunks, sizes=sizes, **of)
    pipe, difference = _trained(plan, experts.model, F.mse_loss, lambda step, n=9: experts.batch(0, step, n))
    assert bool(pipe.schedule.overlapped) == overlaps
    with pipe, pytest.raises(ValueError, match="a batch of 1 samples over 2 members of an expert group: expected 2"):
        pipe.eval_step(*experts.batch(0, STEPS, 1))
    return difference


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "rows", "of"),
    [
        ("1f1b", [[0, 1], [2, 3]], {}),
        ("1f1b", [[0, 2], [1, 3]], {"recompute": "full", "optimizer_shards": 2}),
        ("interleaved", [[0, 1], [2, 3]], {}),
        ("interleaved", [[0, 1], [2, 3]], {"overlaps": True}),
        ("2bw", [[0, 2], [1, 3]], {}),
    ],
)
def test_a_plan_divides_experts(gloo: Pool, schedule: str, rows: list[list[int]], of: dict[str, Any]) -> None:
    assert max(gloo.run(_over_experts, ranks=4, args=(schedule, rows), kwargs=of)) < 1e-10


def _over_sequences(schedule: str, rows: list[list[int]], **of: Any) -> float:
    nodes = ["0 1", "2 3"] if len(rows) == 2 else ["0 1 2 3"]
    plan = _plan(schedule, nodes, rows, chunks=1, sizes={"context": 2}, **{"tensor": 2, **of})

    def batch(step: int, samples: int = 9) -> tuple[Tensor, Tensor]:
        tokens, targets = sliced.batch(samples + step)
        return tokens[step:], targets[step:]

    pipe, difference = _trained(plan, sliced.chain, sliced.mean_loss, batch)
    with pipe:
        assert (pipe.schedule.num_ranks, pipe.schedule.num_microbatches) == (2 * 4 // plan.tensor, 2 * 4)
        assert pipe.replica == (0, 1)
    return difference


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "rows", "of"),
    [
        ("1f1b", [[0, 1], [2, 3]], {"recompute": "full"}),
        ("2bw", [[0, 1], [2, 3]], {}),
        ("1f1b", [[0, 1, 2, 3]], {"optimizer_shards": 2}),
        ("gpipe", [[0, 1, 2, 3]], {"tensor": 4}),
    ],
)
def test_a_plan_divides_sequences(gloo: Pool, schedule: str, rows: list[list[int]], of: dict[str, Any]) -> None:
    assert max(gloo.run(_over_sequences, ranks=4, args=(schedule, rows), kwargs=of)) < 1e-12

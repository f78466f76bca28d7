"""Tensor groups on a mesh: planes, orders of axes, one batch in a group. No module is divided here.

Each process of a group computes the same; what a group adds up or gathers must count once, whatever process a rank is.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule

WIDTH = 6
MESH = {"pipe": 2, "tensor": 2}
USUAL = ("pipe", "data", "tensor")
ODD = ("tensor", "data", "pipe")
FIRSTS = {USUAL: (0, 2), ODD: (0, 1)}  # processes of each tensor group


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).double()


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def make_pipe(model: nn.Module, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {
        "mesh": MESH,
        "tensor_parallel": {},
        "num_microbatches": 4,
        "loss_fn": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "max_grad_norm": 0.05,
        "timeout": 120.0,
    }
    return PipelineModule(model, **records(**(settings | options)))


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Three steps, a timeline and a state; others of a tensor group than the first have other weights."""
    is_first = dist.get_rank() in FIRSTS[options["mesh_order"]]
    with make_pipe(make_model(0 if is_first else dist.get_rank()), verify=True, **options) as pipe:
        results = [pipe.train_step(*make_batch(step)) for step in range(3)]
        timeline = results[-1].timeline()
        results += pipe.flush()
        known = {one.loss_step: one for one in results if one.loss is not None}
        state = pipe.full_state_dict()
        output = pipe.predict(make_batch(7)[0])
        return {
            "losses": [known[step].loss for step in range(3)],
            "norms": [known[step].grad_norm for step in range(3)],
            "state": state,
            "rank": pipe._building.decided().place.local_ranks[0],
            "stages": [{span.what.stage for span in rank.compute} for rank in timeline.ranks],
            "output": output,
        }


@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "order"), [("1f1b", USUAL), ("2bw", ODD)], ids=["1f1b", "2bw-odd"])
def test_groups_that_hold_the_same_count_once(gloo: Pool, schedule: str, order: tuple[str, ...]) -> None:
    """The weights of a tensor group are those of its first process."""
    answers = gloo.run(train, ranks=4, args=({"schedule": schedule, "mesh_order": order},))
    alone = make_pipe(make_model(0), schedule=schedule, mesh={"pipe": 2})
    results = [*(alone.train_step(*make_batch(step)) for step in range(3)), *alone.flush()]
    known = {one.loss_step: one for one in results if one.loss is not None}
    wanted = alone.full_state_dict()
    for answer in answers:
        assert answer["losses"] == [known[step].loss for step in range(3)]
        assert answer["norms"] == pytest.approx([known[step].grad_norm for step in range(3)], rel=1e-12)
        # Clipped by norms that are summed in another order.
        assert all(
            torch.allclose(answer["state"][name], value, rtol=1e-12, atol=1e-14) for name, value in wanted.items()
        )
        assert answer["stages"] == [{0}, {1}]
        assert (answer["output"] is None) == (answer["rank"] == 0)
        if answer["rank"] == 1:
            assert torch.allclose(answer["output"], alone.predict(make_batch(7)[0]), rtol=1e-12, atol=1e-14)
    assert sorted(answer["rank"] for answer in answers) == [0, 0, 1, 1]


def pass_other_inputs() -> str:
    """The second member of the second rank's group passes another batch."""
    pipe = make_pipe(make_model(0), example_inputs=make_batch(0)[:1])
    with pytest.raises((ValueError, PipelineError), match="passed other inputs") as told:
        pipe.train_step(*make_batch(int(dist.get_rank() == 3)))
    return str(told.value)


def test_a_tensor_group_passes_one_batch(gloo: Pool) -> None:
    told = gloo.run(pass_other_inputs, ranks=4)
    for member in (2, 3):
        assert (
            "process 3 (rank 1, tensor 1) passed other inputs to step 0 than process 2 (rank 1, tensor 0)"
            in (told[member])
        )


def test_in_one_process_there_is_no_tensor_axis() -> None:
    with pytest.raises(ValueError, match=r"in one process: the members of a tensor group are processes"):
        make_pipe(make_model(0))
    with pytest.raises(ValueError, match=r'beside schedule="auto"'):
        make_pipe(make_model(0), schedule="auto")
    with pytest.raises(ValueError, match=r"order=\('pipe',\): expected the axes"):
        make_pipe(make_model(0), mesh={"pipe": 2}, mesh_order=("pipe",))
    assert math.isfinite(make_pipe(make_model(0), mesh={"pipe": 2}).train_step(*make_batch(0)).loss or math.nan)

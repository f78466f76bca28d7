"""Plans of a joint search run as they were found, and train as one process does in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.alone import train_alone
from support.pool import Pool
from support.small import sgd
from torch import Tensor, nn

from stagewright.partition import Cluster, Node, Plan, Profile, plan
from stagewright.pipe import Auto, PipelineModule

WIDTH, DEPTH = 6, 9
X, Y = (torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2))
BYTES = 8 * WIDTH * (WIDTH + 1)
SECONDS = (2.0, 1.0, 3.0, 1.0, 1.0, 2.5, 1.0, 0.5, 4.0)


def make_model() -> nn.Module:
    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(*layers).double()


def joint_plan() -> Plan:
    """With unequal numbers of stages on its three ranks, for layers that take as long as SECONDS says."""
    nodes = [
        Node(name=str(i), forward_seconds=s, backward_seconds=2 * s, parameter_bytes=BYTES)
        for i, s in enumerate(SECONDS)
    ]
    found = plan(
        Profile(nodes=nodes, microbatch_size=2),
        Cluster.parse("3:net=1GB/s"),
        global_batch=8,
        data_sizes=(1,),
        search="joint",
        seconds=0.5,
    )
    assert found.schedule == "auto"
    return found


def trained(schedule: Plan | Auto, mesh: dict[str, int] | None = None) -> tuple[dict[str, Tensor], Plan]:
    pipe = PipelineModule(make_model(), schedule=schedule, mesh=mesh, loss_fn=F.mse_loss, optimizer=sgd, timeout=120.0)
    for _ in range(2):
        pipe.train_step(X, Y)
    state = pipe.full_state_dict()
    pipe.close()
    assert pipe.plan is not None
    return state, pipe.plan


def assert_as_alone(state: dict[str, Tensor]) -> None:
    wanted = train_alone(make_model(), [(X, Y)] * 2, partial(torch.optim.SGD, lr=0.1)).state
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@pytest.mark.thorough
def test_a_found_plan_in_one_process() -> None:
    found = joint_plan()
    state, ran = trained(found)
    assert_as_alone(state)
    assert ran == found


@pytest.mark.thorough
def test_auto_searches_jointly(gloo: Pool) -> None:
    auto = Auto(search="joint", seconds=0.5, trials=0)
    answers = [*gloo.run(trained, ranks=2, args=(auto, {"pipe": 2})), trained(auto, {"pipe": 4})]
    for state, ran in answers:
        assert_as_alone(state)
        assert any(note.startswith("joint search: ") for note in ran.notes)


def test_bad_input() -> None:
    for auto, said in (
        (Auto(search="jointly"), "search='jointly'"),
        (Auto(search="joint", replan="batch"), "expected one of them"),
        (Auto(seconds=0), "seconds=0"),
    ):
        with pytest.raises(ValueError, match=said):
            PipelineModule(make_model(), schedule=auto, loss_fn=F.mse_loss)

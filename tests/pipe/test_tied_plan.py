"""Plans of a measured profile of a model with tied weights, beside what a real run of it holds and sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.inside import GPT, GPTConfig, profile_model
from support.pool import Pool
from torch import Tensor

from stagewright.comm import Collectives
from stagewright.partition import Cluster, Plan, Profile, plan
from stagewright.pipe import PipelineModule

BANDWIDTH, BATCH = 1e3, 4


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=600, length=8, layers=4, width=128, heads=2, tied=True))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def profile() -> Profile:
    """Measured, but for seconds, which no plan here may depend on."""
    found = profile_model(model(), (torch.randint(600, (1, 8)),), repetitions=1, seconds=0.1)
    return replace(found, nodes=tuple(replace(node, forward_seconds=1.0, backward_seconds=2.0) for node in found.nodes))


def planned(ranks: int, **options: Any) -> Plan:
    cluster = Cluster.from_levels([(ranks, BANDWIDTH)])
    return plan(profile(), cluster, global_batch=BATCH, microbatch_sizes=(1,), optimizer_sharding=("none",), **options)


def run(found: Plan) -> tuple[list[int], dict[int, float]]:
    """One step on this rank: bytes of gradients in each sum over ranks, weights that its stages hold [bytes]."""
    pipe = PipelineModule(model(), schedule=found, loss_fn=loss, optimizer=torch.optim.SGD, example_inputs=(inputs(),))
    sums, plain = [], Collectives.begin_all_reduce

    def counted(self: Collectives, tensor: Tensor, **more: Any) -> Callable[[], None]:
        if tensor.dtype == torch.float32:  # others are flags
            sums.append(tensor.nbytes)
        return plain(self, tensor, **more)

    with mock.patch.object(Collectives, "begin_all_reduce", counted):
        pipe.train_step(inputs(), inputs())
    with pipe.watch_memory() as memory:
        pipe.train_step(inputs(), inputs())
    held = {stage: each.weights for stage, each in enumerate(pipe.stage_bytes(memory))}
    pipe.close()
    return sums, held


def inputs() -> Tensor:
    return torch.arange(BATCH * 8).view(BATCH, 8) % 600


@pytest.mark.thorough
def test_two_stages_hold_and_sum_the_tied_weight_as_planned(gloo: Pool) -> None:
    shared = 600 * 128 * 4
    found = planned(2, pipeline_sizes=(2,), data_sizes=(1,), schedules="1f1b")
    ((stages, seconds),) = found.costs.tied
    assert (stages, seconds * BANDWIDTH) == ((0, 1), pytest.approx(shared))
    for sums, held in gloo.run(run, ranks=2, args=(found,)):
        assert sums == [shared]
        for number, stage in enumerate(found.stages):
            assert stage.held is not None
            assert held[number] == stage.held.weights == stage.parameter_bytes


def test_both_ends_on_one_rank_have_it_once_and_sum_nothing(gloo: Pool) -> None:
    found = planned(2, pipeline_sizes=(2,), data_sizes=(1,), schedules="zb-v", chunk_sizes=(2,))
    assert found.schedule == "zb-v"
    assert found.costs.tied == ()
    whole = sum(p.numel() * 4 for p in model().parameters())
    assert sum(stage.held.weights for stage in found.stages if stage.held is not None) == whole
    for sums, _ in gloo.run(run, ranks=2, args=(found,)):
        assert sums == []

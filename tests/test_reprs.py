"""The large records as a session or a debugger shows them: one short line each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stagewright.partition import Cluster, Node, Profile, plan
from stagewright.pipe import EvalResult, PipelineModule, StepResult
from stagewright.schedules import Costs, build, simulate


def test_records_are_shown_in_a_line() -> None:
    schedule = build("interleaved", num_ranks=2, num_microbatches=4)
    nodes = [Node(name=name, forward_seconds=0.01, backward_seconds=0.02) for name in "ab"]
    profile = Profile(nodes=nodes, microbatch_size=2)
    found = plan(profile, Cluster.from_levels([(1, 1e9)]), global_batch=8, pipeline_sizes=(1,), schedules=("1f1b",))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = PipelineModule(model, mesh={"pipe": 2}, num_microbatches=4)
    streamed = build("2bw", num_ranks=2, num_microbatches=2)
    shown = {
        repr(schedule): "<Schedule interleaved: 2 ranks, 4 stages, 4 microbatches>",
        repr(streamed): "<Schedule 2bw: 2 ranks, 2 stages, 2 microbatches, 8 batches>",
        repr(
            simulate(schedule, Costs(forward=1.0, backward=2.0))
        ): "<Timeline simulated: <Schedule interleaved: 2 ranks, "
        "4 stages, 4 microbatches>, makespan 27.0 s, bubble 11.1%>",
        repr(profile): "<Profile measured: 2 nodes on device, float32, microbatch of 2>",
        repr(found): "<Plan 1f1b, 1 stage on 1 device, 240 ms a batch>",
        repr(pipe): "<PipelineModule Sequential: <Schedule 1f1b: 2 ranks, 2 stages, 4 microbatches>>",
        repr(EvalResult(loss=0.5, output={"logits": torch.zeros(3, 2), "n": 1})): "EvalResult(loss=0.5, "
        "output={'logits': Tensor[3, 2], 'n': 1})",
    }
    assert list(shown) == list(shown.values())


def test_a_step_shows_what_is_known() -> None:
    result = StepResult(loss=0.5, loss_step=3, _timeline=lambda: pytest.fail("not asked for"))
    assert repr(result) == "StepResult(loss=0.5, loss_step=3, grad_norm=None, skipped=False)"
    late = replace(result, loss=None, loss_step=None)
    assert repr(late).startswith("StepResult(loss=None: batches overlap")

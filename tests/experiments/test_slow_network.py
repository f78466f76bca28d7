"""The experiment on slow networks: what the planner makes of its model, and what the report says of it."""

import time

import pytest
import torch
from support.inside import slow_network

from stagewright.partition import Cluster


@pytest.mark.thorough
def test_slow_links_turn_the_choice_around():
    slow = slow_network.ways_of(Cluster.parse("4:eth=125MB/s@0.1ms"))
    fast = slow_network.ways_of(Cluster.parse("4:eth=1.2GB/s@0.1ms"))
    assert slow["pipeline"].simulated_step_time < slow["data parallel"].simulated_step_time
    assert fast["pipeline"].simulated_step_time > fast["data parallel"].simulated_step_time
    assert {stage.replicas for stage in slow["planner"].stages} != {4}
    assert {stage.replicas for stage in fast["planner"].stages} == {4}  # no pipeline, if in chunks: sums go on beside
    assert fast["planner"].simulated_step_time < fast["data parallel"].simulated_step_time


def test_a_unit_sleeps_and_has_real_gradients():
    unit = slow_network._unit(slow_network.Unit(seconds=0.01, sent=400.0, held=80.0))
    x = torch.zeros(2, 8, requires_grad=True)
    began = time.perf_counter()
    out = unit(x)
    assert out.shape == (2, 100)
    out.sum().backward()
    assert time.perf_counter() - began >= 0.06  # two samples: 20 ms forward, 40 ms backward
    assert unit.weight.grad.shape == (20,)
    assert x.grad.shape == x.shape

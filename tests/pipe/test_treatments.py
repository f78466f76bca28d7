"""Treatments of a stage's activations beside recompute: profile, plan, run, exact and as large as predicted."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.alone import train_alone
from support.inside import profile_model
from support.pool import Pool
from torch import Tensor, nn

from stagewright.partition import Cluster, DeviceKind, Plan, plan
from stagewright.pipe import PipelineModule
from stagewright.schedules import Op, memory_curves, simulate

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


def planned(treatments: tuple[str, ...], limits: tuple[float | None, float | None], *, schedule: str) -> Plan:
    """On two devices of so much memory; seconds are made up, so that no noise moves the cut."""
    model, x = made()
    part = x[: SAMPLES // M]
    profile = profile_model(model, (part,), loss_fn=F.mse_loss, target=part, repetitions=1, seconds=0.1)
    assert all(node.keep_less_seconds is not None for node in profile.nodes)
    seconds = {"forward_seconds": 1e-3, "backward_seconds": 2e-3, "keep_less_seconds": 1e-4}
    halves = {"input_grad_seconds": 0.0, "weight_grad_seconds": 0.0}
    nodes = tuple(replace(node, **seconds, **halves) for node in profile.nodes)
    cluster = Cluster.from_levels([(1, 1e10), (2, 1e10)])
    kinds = [DeviceKind(name=n, memory_bytes=m, host_bandwidth=1e10) for n, m in zip("ab", limits, strict=True)]
    return plan(
        replace(profile, nodes=nodes, step_seconds=None, slowdown=1.0),
        replace(cluster, kinds=tuple(kinds), nodes=("a", "b")),
        global_batch=SAMPLES,
        pipeline_sizes=(2,),
        schedules=schedule,
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
    return train_alone(model, [(x, x)] * 2, partial(torch.optim.SGD, lr=0.05)).state


def agree(found: Plan, plain: Plan, gloo: Pool) -> list[tuple[int, int]]:
    """To the bit with the plan that keeps all, to rounding with plain training; peaks by rank with and without it."""
    reference, peaks = alone(), []
    one, ranks = (
        ([trained(each)] for each in (found, plain)),
        (gloo.run(trained, ranks=2, args=(each,)) for each in (found, plain)),
    )
    for results, wanted in (tuple(one), tuple(ranks)):
        for (loss, state, most), (other, kept, more) in zip(results, wanted, strict=True):
            assert loss == other
            for name, value in state.items():
                assert torch.equal(value, kept[name])
                torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-12)
            peaks.append((most, more))
    return peaks[1:]


@pytest.mark.thorough
def test_the_first_stage_keeps_no_results_of_gelus(gloo: Pool) -> None:
    """Its two microbatches in flight are 256 KiB less a block; the last, with one, keeps all: equal to the bit."""
    plain = planned(("none",), (None, None), schedule="1f1b")
    one = SAMPLES // M * 4 * WIDTH * 8
    limit = plain.memory_bytes[0] - 2 * one
    found = planned(("none", "keep_less"), (limit, limit), schedule="1f1b")
    assert [stage.recompute for stage in found.stages] == ["keep_less", "none"]
    assert plain.memory_bytes[0] - found.memory_bytes[0] == 2 * 2 * one - one  # one is there again in a backward
    assert "recompute keep_less in 1 of 2 stages" in found.explain().replace("\n  ", " ")
    assert Plan.from_json(found.to_json()) == found
    for rank, peaks in enumerate(agree(found, plain, gloo)):
        # Two of the gradients that it posted have come when the first stage is fullest.
        assert [each.memory_bytes[rank] for each in (found, plain)] == pytest.approx(peaks, rel=0.06)


@pytest.mark.thorough
def test_activations_of_the_first_stage_wait_on_the_host(gloo: Pool) -> None:
    """Two of eight microbatches are there at once; four are predicted, of which one is on its way and one may be. The
    last stage has room for all."""
    plain = planned(("none",), (None, None), schedule="gpipe")
    limits = 0.6 * plain.memory_bytes[0], plain.memory_bytes[1]
    found = planned(("none", "offload"), limits, schedule="gpipe")
    assert [stage.recompute for stage in found.stages] == ["offload", "none"]
    assert "offload in 1 of 2 stages" in found.explain().replace("\n  ", " ")
    assert Plan.from_json(found.to_json()) == found
    moved = [any(action.op is Op.OFFLOAD for action in program) for program in found.build_schedule().programs]
    assert moved == [True, False]
    (first, all_of_first), (last, all_of_last) = agree(found, plain, gloo)
    assert first <= found.memory_bytes[0]
    here = simulate(found.build_schedule(), replace(found.costs, offload=0.0, reload=0.0), found.links)
    assert memory_curves(here, found.stage_bytes)[0].peak == pytest.approx(first, rel=0.1)
    assert first < 0.4 * all_of_first
    assert last == pytest.approx(all_of_last, rel=0.05) == found.memory_bytes[1]


@pytest.mark.thorough
def test_units_keep_less_or_run_again() -> None:
    """Less and less is held, and gradients are the same to the bit."""
    held, states = [], []
    for word in ("none", "keep_less:1", "keep_less", "layer"):
        model, x = made()
        options = {"loss_fn": F.mse_loss, "mesh": {"pipe": 1}, "num_microbatches": 2, "schedule": "gpipe"}
        with PipelineModule(model, recompute=word, example_inputs=(x,), **options) as pipe:  # type: ignore[arg-type]
            with pipe.watch_memory() as memory:
                pipe.forward_backward(x, x)
            held.append(memory.peak_bytes)
        states.append([p.grad for p in model.parameters()])
    assert held == sorted(held, reverse=True)
    assert len({*held}) == len(held)
    for state in states[1:]:
        assert all(map(torch.equal, state, states[0]))


@pytest.mark.parametrize("word", ["layer:1+keep_less", "layer:0", "offload"])
def test_words_that_are_none(word: str) -> None:
    model, x = made()
    with pytest.raises(ValueError, match=f"recompute='{re.escape(word)}': expected one of 'none'"):
        PipelineModule(model, recompute=word, mesh={"pipe": 1}, example_inputs=(x,), loss_fn=F.mse_loss)

"""The bench of partitioner and planner: a real run of each job at a tiny size. No timing is judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import DECLARATION, Case, Declaration, Target, bench_command, bench_planning, bench_plans, lines_of
from support.inside import JobsFigureFigure as Figure
from support.pool import Pool

from stagewright.partition import Plan

PARTS = {part.name: part for part in Declaration.load(DECLARATION).parts}
PLANNED, CUTS = PARTS["planned-run"].cases, PARTS["uneven-cut"].cases


def test_without_the_published_profiles_the_case_says_what_is_missing(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(bench_planning, "PIPEDREAM_DATA", tmp_path)
    with pytest.raises(ValueError, match=r"runs\.json is not there: expected a checkout of the repository"):
        bench_command.run(["--only", "partitioner"])


def test_the_partitioner_on_a_published_profile_and_a_short_chain():
    case = PARTS["partitioner"].cases[0].also(layers=12, cluster="2x2")
    found = [*bench_planning.published(case, ["alexnet"]), *bench_planning.large_chain(case)]
    first, last = lines_of(found, ["partitioner"])
    assert (first.workload, first.unit, last.workload) == ("alexnet on 16", "ms", "12 layers on 2x2")
    assert min(first.value.low, last.value.low) > 0
    assert "gap" in last.note


@pytest.mark.thorough
def test_the_planner_on_a_small_cluster():
    case = PARTS["planner"].cases[0].also(layers=4, cluster="2x4", batch=8)
    seconds, peak = bench_planning.planner(case, 1)
    assert seconds.value > 0
    assert "on 8 devices" in seconds.note
    assert (peak.name, peak.target) == ("peak memory", None)
    cpu, _ = lines_of(list(bench_planning.scale(case.also(limit=60.0, case="planning-scale"), 1)), ["planning-scale"])
    assert "the rest at most 0.0% faster" in cpu.note
    assert (cpu.workload, cpu.what, cpu.note[-3:]) == ("8 devices, 4 layers", "CPU, batch of 8", " MB")


@pytest.mark.thorough(but=["<lambda>1"])
@pytest.mark.parametrize(
    "make", [lambda: bench_plans.planned_problem(PLANNED[0]), lambda: bench_plans.contest_problem(CUTS[0])]
)
def test_models_are_the_same_each_time(make: Any):
    one, other = make(), make()
    assert torch.equal(one.inputs, other.inputs)
    for mine, theirs in zip(one.make_model().parameters(), other.make_model().parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", CUTS, ids=str)
def test_the_cut_by_layers_is_at_a_module(case: Any):
    assert case.text("cut") in dict(bench_plans.contest_problem(case).make_model().named_modules())


def _plan_and_run(case: Any) -> Sequence[Figure]:
    step = list(bench_plans.planned(case, 1))
    torch.distributed.barrier()
    return [*step, *bench_plans.memory(case.also(kind="resident"), 1)]


@pytest.mark.thorough
@pytest.mark.gloo
@pytest.mark.parametrize("model", ["sleep", pytest.param("gpt", marks=pytest.mark.nightly)])
def test_a_planned_run(gloo: Pool, tmp_path: Path, model: str):
    sizes = {"ranks": 2, "microbatches": 4, "layers": 2, "replicas": "none", "limit": 0.05}
    case = Case.of({"case": "planned-run", "model": model, "folder": str(tmp_path), **sizes})
    for figures in gloo.run(_plan_and_run, ranks=2, args=(case,)):
        step, *memory = lines_of(figures, ["planned-run"])
        assert (step.what, step.target) == ("error of the step", Target(limit=0.05))
        assert "F and B took" in step.note
        assert [line.what for line in memory] == [f"error of rank {rank}'s peak, resident" for rank in (0, 1)]
        assert step.origin == ("planned / emulated" if model == "sleep" else "planned / measured")
    (file,) = tmp_path.glob("*.plan.json")
    plan = Plan.load(file)
    assert plan.replicas == (1,) * len(plan.stages)
    assert plan.num_microbatches == 4


def _cuts(case: Any) -> Sequence[Figure]:
    return list(bench_plans.cuts(case, 1))


@pytest.mark.thorough
@pytest.mark.gloo
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_contest(gloo: Pool, number: int):
    case = CUTS[number].also(microbatches=2, samples=2, size=16, steps=1)
    for figures in gloo.run(_cuts, ranks=2, args=(case,)):
        lines = lines_of(figures, ["uneven-cut"])
        assert [line.what for line in lines] == ["step, equal layers / profile", "step, equal parameters / profile"]
        assert all(" | " in line.note and line.value.low > 0 for line in lines)
        assert all(line.target.at_least for line in lines)

"""The bench: its declaration, verdicts and report on made-up figures, its stages, one real run. No timing is judged."""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.commands import Done
from support.inside import (
    CASES,
    DECLARATION,
    BenchOptions,
    Case,
    Declaration,
    How,
    Judged,
    Sharing,
    Spread,
    Target,
    bench_beside,
    bench_command,
    bench_parts,
    bench_planning,
    bench_plans,
    bench_report,
    bench_steps,
    lines_of,
    parts_for,
    repeated,
    replicate,
)
from support.inside import JobsFigureFigure as Figure
from support.pool import Pool
from torch import nn

from stagewright.partition import Plan
from stagewright.schedules import Collective, Costs, Op, build, lower, simulate

PARTS = {part.name: part for part in Declaration.load(DECLARATION).parts}


def ratio(case: str, *values: float, target: Target | None = None, run: str = "1f1b P=2", **keys: str) -> list[Figure]:
    shown = Case.of({"case": case, "run": run, **keys})
    made = repeated(values, case=shown, name="step", unit="ratio", how=How.MEASURED, note="from", target=target)
    return list(made)


# The declaration


def test_every_case_is_measured_and_its_works_are_there():
    assert {case.text("case") for part in PARTS.values() for case in part.cases} | {"prediction"} == set(CASES)
    for part in PARTS.values():
        module, _, function = part.work.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_parts_are_repeated_and_are_a_job_each_where_a_peak_counts(tmp_path: Path):
    names = ("sleep-1f1b", "planned-run", "planning-scale")
    parts = parts_for(tuple(PARTS.values()), names, BenchOptions(repetitions=2), tmp_path)
    found = {part.name: part for part in parts}
    assert (found["steps"].repetitions, found["planning-scale"].repetitions) == (2, 1)
    assert [case.get("repetition") for case in found["memory-in-use"].cases] == [0, 0, 1, 1]
    assert {case.text("folder") for case in found["memory-in-use"].cases} == {str(tmp_path)}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "overhead"], r"--only: unknown case 'overhead'; did you mean overhead-1f1b"),
        (["--repetitions", "0"], "--repetitions 0: expected at least 1"),
    ],
)
def test_a_users_mistake_is_said_before_anything_starts(argv, message):
    with pytest.raises(ValueError, match=message):
        bench_command.run(argv)


# Verdicts


@pytest.mark.parametrize(
    ("target", "samples", "met"),
    [
        (Target(limit=1.1), [1.0, 1.1, 2.0], True),  # the median counts
        (Target(limit=1.1, judged=Judged.BEST), [1.0, 1.2, 2.0], True),  # unless no difference can be seen
        (Target(limit=1.1, judged=Judged.BEST), [1.11, 1.2, 2.0], False),
        (Target(limit=5.0, at_least=True), [4.0, 4.9, 6.0], False),
        (Target(limit=5.0, at_least=True, judged=Judged.BEST), [4.0, 4.9, 6.0], True),
        (Target(limit=5.0, at_least=True, judged=Judged.WORST), [4.0, 5.0, 6.0], False),
        (Target(limit=5.0, judged=Judged.WORST), [4.0, 4.5, 5.1], False),
    ],
)
def test_a_target_is_met_by_the_median(target, samples, met):
    assert target.met(Spread.of(samples)) is met


def test_a_line_is_all_repetitions_of_a_figure_and_its_verdict():
    figures = [
        *ratio("gpt", 1.1, 0.9, 1.3, target=Target(limit=1.0)),
        *ratio("overhead-1f1b", 0.7, target=Target(limit=1.1)),
        *ratio("sleep-1f1b", 2.0),
    ]
    first, second = lines_of(figures, ["gpt", "overhead-1f1b"])
    assert (first.case, first.verdict, first.origin) == ("overhead-1f1b", "ok", "measured")  # as the cases stand
    assert (second.value, second.verdict) == (Spread(median=1.1, low=0.9, high=1.3), "missed")
    keys = {"predicted": "planned"}
    figures = ratio("planned-run", -0.2, 0.01, -0.06, target=Target(limit=0.05), **keys)
    (line,) = lines_of([replace(figure, unit="error") for figure in figures], ["planned-run"])
    assert line.value == Spread(median=0.06, low=0.01, high=0.2)
    assert (line.origin, line.verdict) == ("planned / measured", "missed")
    by_default = ratio("partitioner", 0.01, variant="default", target=Target(limit=0.02))
    slow = ratio("partitioner", 0.03, 0.02, 0.05, variant="pipedream", target=Target(limit=0.02))
    (line,) = lines_of([*by_default, *slow], ["partitioner"])
    assert (line.value.median, line.verdict, line.note) == (0.03, "missed", "default 0.01 ratio, from")


# Report


def of_no_compute() -> list[Figure]:
    raw = Case.of({"run": "interleaved P=2 V=2 M=32", "model": "tiny"})
    values = {"step, ours": 0.0064, "step, torch": 0.0128, "message, tight": 4e-5, "message, paced": 8e-5}
    values |= {"autograd": 1e-4, "in process": 3e-4}
    note = "[ncalls] run_backward"
    return [Figure(case=raw, name=n, value=v, unit="s", how=How.MEASURED, note=note) for n, v in values.items()]


def test_the_report_says_where_each_figure_comes_from(capsys: pytest.CaptureFixture[str]):
    figures = [*ratio("gpt", 1.5, target=Target(limit=1.0)), *of_no_compute()]
    bench_report.report(figures, ["gpt"], repetitions=2)
    text = capsys.readouterr().out
    for expected in (
        "missed",
        "[1.500 .. 1.500]",
        "where the time goes, interleaved P=2 V=2 M=32",
        "step, ours                200.0   over gloo",
        "engine (Python)           200.0",
        "one way; 6 a microbatch",
        "[ncalls] run_backward",  # brackets are no markup
        "[smallest .. largest]",
        "Only 2 repetitions",
        f"torch {torch.__version__}",
    ):
        assert expected in text


# Stages and measurements


def test_sums_behind_all_backwards_are_predicted_one_after_the_other():
    schedule = replicate(build("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2), 2)
    costs = Costs(forward=0.01, backward=0.02, reduce_grad=0.04)
    assert bench_beside.predicted_after(schedule, costs) == pytest.approx(0.27 + 2 * 0.04)
    assert simulate(schedule, costs).makespan == pytest.approx(0.27 + 0.04)  # one of them beside two backwards
    programs = lower(schedule, sharing=Sharing(collectives=(Collective((2,), Op.REDUCE_GRAD, 0),))).programs
    last = programs[0].steps[-1]
    assert not isinstance(last, Collective)
    assert str(bench_beside.sums_last(programs[0].steps)[-1]) == "2REDUCE_GRAD0"


def once(work: Callable[[Any, int], Any], case: Any) -> Sequence[Figure]:
    return list(work(case, 1))


@pytest.mark.thorough
def test_steps_with_checkpoints_beside_and_between_run(gloo: Pool):
    case = PARTS["checkpoints"].cases[0].also(length=8, layers=2, width=16, steps=4, auto_steps=12)
    for beside, share in gloo.run(once, ranks=2, args=(bench_beside.checkpoints, case)):
        assert beside.name == "4 steps, checkpoint beside / blocking"
        assert beside.case.text("run").startswith("GPT, AdamW, ")
        assert share.value >= 0


def test_the_halves_of_a_small_backward():
    small = {"small": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (2, 4))}
    case = Case.of({"case": "split-backward", "stage": "small", "limit": 1.25, "runs": 1})
    with mock.patch.object(bench_parts, "STAGES", small):
        found = lines_of(list(bench_parts.halves(case, 2)), ["split-backward"])
    assert [line.what for line in found] == ["(I + W) / B, ours", "(I + W) / B, torch", "F / F, ours"]
    assert all(line.value.low > 0 for line in found)
    assert [line.target is None for line in found] == [False, True, True]


@pytest.mark.thorough
@pytest.mark.parametrize("case", PARTS["start"].cases[:2], ids=str)
def test_the_first_step_of_a_gpt(case: Case):
    (figure,) = bench_parts.start(case, 1)
    assert figure.value > 0
    assert figure.note.startswith("build() ") is bool(case.get("built"))


@pytest.mark.thorough
def test_a_race(gloo: Pool):
    case = PARTS["races"].cases[0].also(ranks=2, microbatches=2, seconds=0.001, batches=2)
    for figures in gloo.run(once, ranks=2, args=(bench_steps.races, case)):
        lines = lines_of(figures, ["async-sleep"])
        assert [line.what for line in lines] == [
            "throughput / ours 1f1b",
            "throughput / torch 1f1b",
            "error of the period",
        ]
        assert lines[0].target == Target(limit=1.68, at_least=True)
        assert lines[2].origin == "simulated / emulated"


@pytest.mark.thorough
def test_a_real_run_of_two_ranks(command: Callable[..., Done]):
    done = command("bench", "--only", "overhead-1f1b", "--repetitions", "1", "--json")  # one job here, one on two ranks
    assert done.status == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {figure["case"] for figure in answer["figures"]} == {"overhead-1f1b"}
    assert answer["where_time_goes"]
    assert "steps-ranks=2: done in" in done.stderr


CUTS = PARTS["uneven-cut"].cases


@pytest.mark.thorough
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


def _plan_and_run(case: Any) -> Sequence[Figure]:
    step = list(bench_plans.planned(case, 1))
    torch.distributed.barrier()
    return [*step, *bench_plans.memory(case.also(kind="resident"), 1)]


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_contest(gloo: Pool, number: int):
    case = CUTS[number].also(microbatches=2, samples=2, size=16, steps=1)
    for figures in gloo.run(once, ranks=2, args=(bench_plans.cuts, case)):
        lines = lines_of(figures, ["uneven-cut"])
        assert [line.what for line in lines] == ["step, equal layers / profile", "step, equal parameters / profile"]
        assert all(" | " in line.note and line.value.low > 0 for line in lines)
        assert all(line.target.at_least for line in lines)

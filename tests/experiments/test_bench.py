"""The bench: its tables, verdicts and report on made-up records, its stages, and one real run. No timing is judged."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from support.commands import Done
from support.inside import (
    CASES,
    RACES,
    WORKLOADS,
    BenchReport,
    Breakdown,
    CheckpointTimes,
    GPTConfig,
    HalvedStage,
    HalvesTimes,
    Judged,
    Measurement,
    ModelKind,
    OverlapTimes,
    RaceTimes,
    ReceiveBytes,
    Record,
    Sharing,
    SimulatorSpeed,
    SleepingStage,
    Spread,
    Target,
    Workload,
    break_down,
    figures_of,
    make_problem,
    measure_halves,
    measure_simulator,
    predicted_behind,
    read_records,
    replicate,
    run,
    run_checkpoints,
    run_overlap,
    select_cases,
    sleep_until,
    sums_last,
    workloads_of,
    write_records,
)
from support.inside import BenchFigureFigure as Figure
from support.inside import RecordsPingPong as PingPong
from support.pool import Pool
from torch import nn

from stagewright.schedules import Collective, Costs, Op, build, lower, simulate


def measurement(workload: Workload, *, ours: list[float], torch: list[float]) -> Measurement:
    S = workload.num_stages
    return Measurement(
        workload=workload.name,
        torch=torch,
        ours=ours,
        makespans=ours,
        forward=[0.01] * S,
        backward=[0.02] * S,
        predicted=0.99 * median(ours),
        latency=5e-5,
        boundary_bytes=32,
    )


# One of everything; the 1F1B without compute misses its target, everything else meets its own.
RECORDS: list[Record] = [
    *(
        measurement(
            workload,
            ours=[1.01 * workload.ideal_makespan or 0.12, 1.0 * workload.ideal_makespan or 0.11],
            torch=[1.05 * workload.ideal_makespan or (0.1 if workload.name == "overhead-1f1b" else 0.4)] * 2,
        )
        for workload in WORKLOADS.values()
    ),
    *(
        RaceTimes(
            race=race.name,
            seconds={entry.label: [0.101 * (entry.at_least or 0.99)] * 2 for entry in race.entries},
            predicted=0.1,
            bubbles=[0.01, 0.02],
        )
        for race in RACES.values()
    ),
    PingPong(num_bytes=32, tight=[4e-5], paced=[8e-5]),
    Breakdown(schedule="1f1b", in_process=[3e-4], autograd=[1e-4], profile="[ncalls] run_backward"),
    ReceiveBytes(schedule="1f1b", num_microbatches=8, ours=96, torch=256),
    ReceiveBytes(schedule="1f1b", num_microbatches=64, ours=96, torch=2048),
    OverlapTimes(seconds={"beside": [0.31, 0.32], "behind": [0.35, 0.36]}, predicted={"beside": 0.31, "behind": 0.35}),
    CheckpointTimes(
        seconds={"without": [1.0, 1.1], "blocking": [1.4, 1.5], "beside": [1.1, 1.2]},
        steps=10,
        num_bytes=30_000_000,
        shares=[0.02, 0.03],
        every=[20, 21],
    ),
    HalvesTimes(
        stage="GPT block",
        backward={"whole": [0.020, 0.021], "ours": [0.0205, 0.0215], "torch": [0.030, 0.031]},
        forward={"whole": [0.010, 0.011], "ours": [0.0101, 0.0111]},
    ),
    SimulatorSpeed(actions_per_second=3e5, build_check_simulate=3.0, num_actions=262_144, peak_bytes=2 * 10**8),
]


def all_figures() -> list[Figure]:
    return [figure for case in CASES.values() for figure in figures_of(case, RECORDS)]


# Sums of gradients


def test_sums_behind_all_backwards_are_predicted_one_after_the_other():
    schedule = replicate(build("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2), 2)
    costs = Costs(forward=0.01, backward=0.02, reduce_grad=0.04)
    assert predicted_behind(schedule, costs) == pytest.approx(0.27 + 2 * 0.04)
    assert simulate(schedule, costs).makespan == pytest.approx(0.27 + 0.04)  # one of them beside two backwards
    programs = lower(schedule, sharing=Sharing(collectives=(Collective((2,), Op.REDUCE_GRAD, 0),))).programs
    last = programs[0].steps[-1]
    assert not isinstance(last, Collective)
    assert str(sums_last(programs[0].steps)[-1]) == "2REDUCE_GRAD0"


def overlap_once() -> Any:
    return run_overlap(repetitions=1)


@pytest.mark.gloo
@pytest.mark.nightly
def test_steps_with_sums_beside_and_behind_run(gloo: Pool):
    for times in gloo.run(overlap_once, ranks=4):
        assert {side: len(seconds) for side, seconds in times.seconds.items()} == {"beside": 1, "behind": 1}
        assert times.predicted["beside"] < times.predicted["behind"]


def checkpoints_once() -> Any:
    model = GPTConfig(length=8, layers=2, width=16, heads=2)
    return run_checkpoints(repetitions=1, model=model, steps=4, auto_steps=12)


@pytest.mark.gloo
@pytest.mark.slow
def test_steps_with_checkpoints_beside_and_between_run(gloo: Pool):
    for times in gloo.run(checkpoints_once, ranks=2):
        assert {side: len(seconds) for side, seconds in times.seconds.items()} == dict.fromkeys(
            ("without", "blocking", "beside"), 1
        )
        assert times.num_bytes > 10_000


# Tables


def test_every_race_is_needed_by_a_case_and_its_entries_are_of_one_size():
    assert {name for case in CASES.values() for name in case.races} == set(RACES)
    for race in RACES.values():
        sizes = {(entry.workload.num_ranks, entry.workload.num_microbatches) for entry in race.entries}
        assert len(sizes) == 1
        assert len({entry.label for entry in race.entries}) == len(race.entries)


def test_every_workload_is_needed_by_a_case_and_every_case_finds_its_workloads():
    assert {name for case in CASES.values() for name in case.workloads} == set(WORKLOADS)


@pytest.mark.parametrize(
    "workload", [w for w in WORKLOADS.values() if w.model is ModelKind.SLEEP], ids=lambda w: w.name
)
def test_the_ideal_makespan_is_what_the_simulator_finds_for_free_messages(workload):
    schedule = build(
        workload.schedule,
        num_ranks=workload.num_ranks,
        num_microbatches=workload.num_microbatches,
        num_chunks=workload.num_chunks,
    )
    costs = Costs(forward=workload.forward, backward=workload.backward)
    assert simulate(schedule, costs).makespan == pytest.approx(workload.ideal_makespan)


def test_cases_are_selected_by_name_and_share_their_workloads():
    assert [case.name for case in select_cases([])] == list(CASES)
    cases = select_cases(["prediction", "sleep-1f1b"])
    assert [case.name for case in cases] == ["sleep-1f1b", "prediction"]
    names = [workload.name for workload in workloads_of(cases)]
    assert len(names) == len(set(names)) == 10


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "overhead"], r"--only overhead: no such case; did you mean overhead-1f1b"),
        (["--repetitions", "0"], "--repetitions 0: expected at least 1"),
    ],
)
def test_a_users_mistake_is_said_before_anything_starts(argv, message):
    with pytest.raises(ValueError, match=message):
        run(argv)


# Verdicts


@pytest.mark.parametrize(
    ("target", "samples", "met"),
    [
        (Target(limit=1.1), [1.0, 1.1, 2.0], True),
        (Target(limit=1.1), [1.0, 1.2, 2.0], False),  # the median counts
        (Target(limit=1.1, judged=Judged.BEST), [1.0, 1.2, 2.0], True),  # unless no difference can be seen
        (Target(limit=1.1, judged=Judged.BEST), [1.11, 1.2, 2.0], False),
        (Target(limit=5.0, at_least=True), [4.0, 5.0, 6.0], True),
        (Target(limit=5.0, at_least=True), [4.0, 4.9, 6.0], False),
        (Target(limit=5.0, at_least=True, judged=Judged.BEST), [4.0, 4.9, 6.0], True),
        (Target(limit=5.0, at_least=True, judged=Judged.WORST), [4.0, 5.0, 6.0], False),
        (Target(limit=5.0, at_least=True, judged=Judged.WORST), [5.0, 5.1, 6.0], True),
        (Target(limit=5.0, judged=Judged.WORST), [4.0, 4.5, 5.1], False),
    ],
)
def test_a_target_is_met_by_the_median(target, samples, met):
    assert target.met(Spread.of(samples)) is met


def test_every_case_has_figures_and_a_missed_target_is_named():
    figures = all_figures()
    about_plans = {"partitioner", "planner", "planning-scale", "planned-run", "uneven-cut"}  # test_bench_plans.py
    assert {figure.case for figure in figures} == set(CASES) - about_plans
    asked = [figure for figure in figures if figure.target is not None]
    assert [figure.case for figure in asked if figure.verdict != "ok"] == ["overhead-1f1b"]


def test_a_race_is_won_by_throughput():
    race = RACES["async-sleep-4"]
    seconds = {entry.label: [0.21, 0.22] for entry in race.entries} | {race.entries[0].label: [0.12, 0.11]}
    record = RaceTimes(race=race.name, seconds=seconds, predicted=0.12, bubbles=[0.0, 0.1])
    first, second, error = figures_of(CASES["async-sleep"], [record])
    assert first.value.low == second.value.low == pytest.approx(1.75)
    assert first.verdict == "ok"
    assert (first.target, error.target) == (Target(limit=1.68, at_least=True), None)
    assert error.value.median == pytest.approx(0.12 / 0.115 - 1)


def test_ratios_are_of_neighbouring_repetitions():
    # the machine was twice as slow in the second repetition, on both sides
    workload = WORKLOADS["overhead-1f1b"]
    records = [measurement(workload, ours=[1.0, 2.0], torch=[2.0, 4.0])]
    (figure,) = figures_of(CASES["overhead-1f1b"], records)
    assert figure.value == Spread(median=0.5, low=0.5, high=0.5)


def test_receive_bytes_that_grow_are_missed():
    few, many = (r for r in RECORDS if isinstance(r, ReceiveBytes))
    (figure,) = figures_of(CASES["receive-bytes"], [few, replace(many, ours=128)])
    assert figure.verdict == "missed"


# Report


def test_records_survive_their_file(tmp_path: Path):
    write_records(tmp_path / "records.jsonl", RECORDS)
    assert read_records(tmp_path / "records.jsonl") == RECORDS


def test_the_report_says_where_each_figure_comes_from():
    stream = io.StringIO()
    report = BenchReport(repetitions=2, figures=all_figures(), records=RECORDS)
    report.print_on(Console(file=stream, width=250))
    text = stream.getvalue()
    for expected in (
        "measured",
        "emulated",
        "simulated / emulated",
        "missed",
        "where the time goes, 1f1b P=2 M=32",
        "[ncalls] run_backward",  # brackets are no markup
        "[smallest .. largest]",
        "Only 2 repetitions",
        f"torch {torch.__version__}",
    ):
        assert expected in text


def test_the_json_is_one_object_with_targets_and_verdicts():
    answer = json.loads(json.dumps(BenchReport(repetitions=5, figures=all_figures(), records=RECORDS).as_json()))
    first = answer["figures"][0]
    assert (first["case"], first["target"]["limit"], first["verdict"]) == ("overhead-1f1b", 1.1, "missed")
    assert {record["type"] for record in answer["records"]} == {type(record).__name__ for record in RECORDS}


# Stages and measurements


def test_a_sleeping_stage_computes_and_takes_its_time():
    stage = SleepingStage(0.004, 0.006)
    x = torch.randn(2, 8, requires_grad=True)
    start = time.perf_counter()
    out = stage(x)
    middle = time.perf_counter()
    out.backward(torch.full_like(out, 3.0))
    end = time.perf_counter()
    assert middle - start >= 0.004
    assert end - middle >= 0.006
    assert torch.equal(out, x)
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert torch.allclose(stage.weight.grad, 3.0 * x.detach().sum(0))


def test_sleep_until_does_not_wait_for_the_past():
    with mock.patch.object(time, "sleep", side_effect=AssertionError):
        sleep_until(time.perf_counter() - 1.0)


@pytest.mark.parametrize("name", ["overhead-interleaved", "sleep-1f1b-4", "gpt-interleaved-4"])
def test_both_sides_get_the_same_stages_and_batch(name):
    one, other = make_problem(WORKLOADS[name]), make_problem(WORKLOADS[name])
    assert len(one.stages) == WORKLOADS[name].num_stages
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.target, other.target)
    for mine, theirs in zip(one.stages, other.stages, strict=True):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert p is not q
            assert torch.equal(p, q)


def test_the_breakdown_in_one_process():
    small = replace(WORKLOADS["overhead-interleaved"], num_microbatches=4)
    record = break_down(small, repetitions=2, profile=True)
    assert len(record.in_process) == len(record.autograd) == 2
    assert "run_backward" in record.profile


def test_the_halves_of_a_small_backward():
    stage = HalvedStage(
        name="small", make=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), shape=(2, 4)
    )
    times = measure_halves(stage, repetitions=2, runs=1)
    found = figures_of(CASES["split-backward"], [times])
    assert [figure.what for figure in found] == ["(I + W) / B, ours", "(I + W) / B, torch", "F / F, ours"]
    assert all(figure.value.low > 0 for figure in found)


def test_the_simulators_speed_on_a_small_schedule():
    speed = measure_simulator(num_ranks=4, num_chunks=2, num_microbatches=8)
    assert speed.num_actions == 4 * 2 * 8 * 2
    assert speed.actions_per_second > 0
    assert speed.peak_bytes > 10**6


@pytest.mark.gloo
@pytest.mark.slow
def test_a_real_run_of_two_ranks(command: Callable[..., Done]):
    done = command("bench", "--only", "overhead-1f1b", "receive-bytes", "--repetitions", "1", "--json")
    assert done.status == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {figure["case"] for figure in answer["figures"]} == {"overhead-1f1b", "receive-bytes"}
    assert answer["where_time_goes"]
    assert "overhead-1f1b: repetition 1/1: torch" in done.stderr

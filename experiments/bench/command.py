"""`stagewright bench`: runs the workloads that the cases need, and prints every figure beside its target.

simulator, partitioner, planner   a process of its own a repetition
planning-scale                    a process of its own a problem, once
split-backward                    a process of its own
overhead                          its own process (in one: the engine without messages), and P = 2 processes
memory of a planned run           fresh processes a repetition, under both settings of malloc
the rest                          P = 2, 4 and 8 processes: one set for each P, in which all sides run in turn
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from ..launcher import launch
from .figures import figures_of
from .plan_workloads import (
    CONTESTS,
    MEMORY_JOBS,
    PLANNED_RUNS,
    SCALE,
    SCALES,
    CutContest,
    MemoryKind,
    PlannedRun,
    check_pipedream_data,
)
from .races import RACES, Race
from .records import Record, read_records
from .workloads import (
    CASES,
    CHECKPOINTS,
    HALVES,
    OVERLAP,
    PING_PONG,
    RECEIVE_BYTES,
    Case,
    ModelKind,
    Workload,
    select_cases,
    workloads_of,
)

_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# A fixed threshold [bytes], above which glibc's malloc gives memory back when it is freed. By default the threshold
# grows to what has been freed, and most tensors stay with the process.
_MALLOC = {MemoryKind.IN_USE: {"MALLOC_MMAP_THRESHOLD_": "65536"}, MemoryKind.RESIDENT: {}}
_PLANNING = ("partitioner", "planner")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Measure this runtime beside torch.distributed.pipelining, in one run with alternating repetitions."""

    only: tuple[str, ...] = ()
    """Cases to run (default: all)."""
    repetitions: int = 5
    """Repetitions of each workload and side; a figure worth keeping needs at least 5."""
    profile: bool = False
    """Also show where the in-process step spends its time (cProfile; with the overhead cases)."""
    json: bool = False
    """Print one JSON object; progress goes to the standard error in any case."""


class BenchError(RuntimeError):
    """A process of the bench failed; the message is its story."""


def run(argv: Sequence[str]) -> int:
    """Run the cases and print; 1 if a process failed. A missed target is a result, not a failure."""
    listed = "\n".join(f"  {case.name:<21} {case.summary}" for case in CASES.values())
    options = tyro.cli(
        BenchOptions,
        args=argv,
        prog="stagewright bench",
        description=f"{BenchOptions.__doc__}\n\ncases:\n{listed}",
    )
    cases = select_cases(options.only)
    if options.repetitions < 1:
        raise ValueError(f"--repetitions {options.repetitions}: expected at least 1")
    if any(case.name == "partitioner" for case in cases):
        check_pipedream_data()
    try:
        with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
            records = collect(cases, options, Path(folder))
    except BenchError as error:
        print(f"stagewright bench: {error}", file=sys.stderr)
        return 1
    from .report import BenchReport

    figures = [figure for case in cases for figure in figures_of(case, records)]
    report = BenchReport(repetitions=options.repetitions, figures=figures, records=records)
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 200  # a file has no width; a table folded at 80 columns is hard to read
        report.print_on(console)
    return 0


def collect(cases: Sequence[Case], options: BenchOptions, folder: Path) -> list[Record]:
    """Start what the cases need, one set of processes after the other."""
    names = {case.name for case in cases}
    workloads = workloads_of(cases)
    records: list[Record] = []
    if "simulator" in names:
        records += _run_often("simulator", "simulator", [], options, folder)
    if HALVES in names:
        _say("one process: whole backwards and halves")
        out = folder / "halves.jsonl"
        _run_alone("halves", ["--repetitions", str(options.repetitions), "--out", str(out)])
        records += read_records(out)
    for name in _PLANNING:
        if name in names:
            records += _run_often(name, "planning_speed", ["--case", name], options, folder)
    records += _run_scales(folder) if SCALE in names else []
    tiny = [workload for workload in workloads if workload.model is ModelKind.TINY]
    if tiny:
        records += _run_in_process(tiny, options, folder)
    sized: list[Workload | Race | PlannedRun | CutContest] = [*workloads]
    for case in cases:
        sized += [RACES[name] for name in case.races]
        sized += [PLANNED_RUNS[name] for name in case.planned_runs]
        sized += [CONTESTS[name] for name in case.contests]
    for num_ranks in sorted({one.num_ranks for one in sized} | {2, 4}):
        jobs = [one.name for one in sized if one.num_ranks == num_ranks]
        if num_ranks == 2:
            jobs = [PING_PONG] * bool(tiny) + jobs
            jobs += [name for name in (RECEIVE_BYTES, CHECKPOINTS) if name in names]
        jobs += [OVERLAP] * (num_ranks == 4 and OVERLAP in names)
        if jobs:
            records += _run_ranks(num_ranks, jobs, options, folder)
    for job, (run, kind) in MEMORY_JOBS.items():
        if run in sized:
            for _ in range(options.repetitions):
                records += _run_ranks(run.num_ranks, [job], options, folder, environment=_MALLOC[kind])
    return records


def _run_ranks(
    num_ranks: int,
    jobs: Sequence[str],
    options: BenchOptions,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> list[Record]:
    out = folder / f"ranks-{num_ranks}.jsonl"
    _say(f"{num_ranks} processes: {', '.join(jobs)}")
    arguments = ["--jobs", *jobs, "--repetitions", str(options.repetitions), "--out", str(out)]
    result = launch(
        _module("worker", arguments), num_ranks=num_ranks, environment={**_ENVIRONMENT, **(environment or {})}
    )
    if result.status != 0:
        raise BenchError(result.report)
    if result.report:
        _say(result.report)
    return read_records(out)


def _run_in_process(workloads: Sequence[Workload], options: BenchOptions, folder: Path) -> list[Record]:
    out = folder / "in-process.jsonl"
    _say("one process: the engine without messages")
    arguments = ["--workloads", *(w.name for w in workloads), "--repetitions", str(options.repetitions)]
    _run_alone("in_process", [*arguments, "--out", str(out), *(["--profile"] if options.profile else [])])
    return read_records(out)


def _run_scales(folder: Path) -> list[Record]:
    """A process a problem, once: their peaks of memory are their own."""
    records: list[Record] = []
    for number, (cluster, layers, *_) in enumerate(SCALES):
        _say(f"{SCALE}: {layers} layers on {cluster}")
        out = folder / f"{SCALE}-{number}.jsonl"
        _run_alone("planning_speed", ["--case", SCALE, "--number", str(number), "--out", str(out)])
        records += read_records(out)
    return records


def _run_often(name: str, module: str, arguments: Sequence[str], options: BenchOptions, folder: Path) -> list[Record]:
    """A process a repetition."""
    records: list[Record] = []
    for repetition in range(options.repetitions):
        _say(f"{name}: repetition {repetition + 1}/{options.repetitions}")
        out = folder / f"{name}-{repetition}.jsonl"
        _run_alone(module, [*arguments, "--out", str(out)])
        records += read_records(out)
    return records


def _run_alone(module: str, arguments: Sequence[str]) -> None:
    done = subprocess.run(
        _module(module, arguments),
        env={**os.environ, **_ENVIRONMENT},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BenchError(f"the process {module!r} failed (exit status {done.returncode}):\n{done.stderr}")


def _module(name: str, arguments: Sequence[str]) -> list[str]:
    # -P: the folder that the user stands in may hold modules with any name.
    return [sys.executable, "-P", "-m", f"{__package__}.{name}", *arguments]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""`stagewright bench`: runs the jobs of `bench.toml` for the chosen cases, and prints every figure with its target.

Jobs run one after the other: first those in one process, then those on ranks, with all sides of a case in turn in the
same processes. For peaks of memory each repetition is a job.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...cli.launcher import launch
from ...cli.options import check_known, read
from ...cli.tables import table
from ..backends.records import Nodes, Outcome, Work
from ..jobs.declaration import Declaration, Part, find_declaration
from ..jobs.figure import Figure, read_figures
from ..jobs.job import Job, State, jobs_of
from ..jobs.report import write_report
from ..jobs.results import gather
from ..jobs.runner import JobProgress, alone, intend, run_jobs
from ..works.bench_report import CASES, report
from ..works.suite import PARTS, told

_MEASURED_FOR = {"prediction": ("sleep-1f1b", "sleep-interleaved", "gpt")}  # cases that measure another case's figures
# parts with a job per repetition
_A_JOB_EACH = ("simulator", "start", "partitioner", "planner", "memory-in-use", "memory-resident")
_ONCE = ("planning-scale",)
_WITH_PLANS = ("planned-run", "memory-in-use", "memory-resident")  # the first writes plans for the others
DECLARATION = Path(__file__).parents[1] / "bench.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Measure this runtime against torch.distributed.pipelining, in one run with alternating repetitions."""

    only: tuple[str, ...] = ()  # Cases to run (default: all).
    repetitions: int = 5  # Repetitions of each workload and side; a figure worth keeping needs at least 5.
    profile: bool = False  # Also show where the in-process step spends its time (cProfile; with the overhead cases).
    json: bool = False  # Print one JSON object; progress always goes to standard error.


def run(argv: Sequence[str]) -> int:
    """Run the cases and print. Returns 1 after a failed process; a missed target is not a failure."""
    if argv[:1] == ["suite"]:
        return run_suite(argv[1:])
    listed = "\n".join(f"  {name:<21} {summary}" for name, summary in CASES.items())
    description = (
        f"{BenchOptions.__doc__}\n\n`bench suite`: five models, profiled, planned and run.\n\ncases:\n{listed}"
    )
    options = read(BenchOptions, argv, "bench", description=description)
    for name in options.only:
        check_known("--only: unknown case", name, CASES, listed="cases")
    if options.repetitions < 1:
        raise ValueError(f"--repetitions {options.repetitions}: expected at least 1")
    names = [name for name in CASES if name in options.only or not options.only]
    if "partitioner" in names:
        from ..works.bench_planning import check_pipedream_data

        check_pipedream_data()
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
        declaration = Declaration.load(DECLARATION)
        parts = tuple(parts_for(declaration.parts, names, options, Path(folder)))
        jobs = sorted(jobs_of(replace(declaration, parts=parts)), key=lambda job: job.nodes is not None)
        figures, failed = _ran(jobs, Path(folder))
    if failed:
        print(f"stagewright bench: {failed}", file=sys.stderr)
        return 1
    report(figures, names, repetitions=options.repetitions, as_json=options.json)
    return 0


def _ran(jobs: Sequence[Job], folder: Path) -> tuple[list[Figure], str]:
    figures: list[Figure] = []
    with JobProgress(total=len(jobs), stream=sys.stderr) as progress:
        for job in jobs:
            intent = intend(job, folder / job.name, fresh=True)
            (status,) = run_jobs([intent], progress=progress, make_backend=lambda name: LaunchedRanks(), workers=1)
            if status.state is not State.DONE:
                return figures, f"{job.name}: {status.state.value}: {status.reason}"
            figures += read_figures(folder / job.name / "figures.jsonl")
    return figures, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """Profile, plan and run five models on this machine: throughput, utilisation, and memory of each stage."""

    models: str = ""  # Some of gpt,lstm,cnn,unet,moe (default: all).
    ranks: int = 2  # Processes, one per stage.
    folder: Path = Path("runs/experiments")  # Figures and a picture go to FOLDER/suite/report.
    json: bool = False  # Print one JSON object; progress goes to standard error.


def run_suite(argv: Sequence[str]) -> int:
    """Run the experiment `suite` again, for all models or some, and print a table. Returns 1 after a failed process."""
    options, declared = read(SuiteOptions, argv, "bench suite"), find_declaration("suite")
    (part,) = declared.parts
    models = [case.text("model") for case in part.cases]
    chosen = options.models.split(",") if options.models else models
    for name in chosen:
        check_known("--models: unknown model", name, models, listed="models")
    cases = tuple(case.also(ranks=options.ranks) for case in part.cases if case.text("model") in chosen)
    declaration, folder = replace(declared, parts=(replace(part, cases=cases),)), options.folder / "suite"
    jobs = jobs_of(declaration)
    with alone(folder):
        figures, failed = _ran(jobs, folder / "jobs")
        if failed:
            print(f"stagewright bench suite: {failed}", file=sys.stderr)
            return 1
        path = write_report(declaration, gather(declaration, folder / "jobs"), folder / "report")
    if options.json:
        print(json.dumps({"ranks": options.ranks, "report": str(path), "models": told(figures)}))
    else:
        show_suite(told(figures), path.with_name("suite.png"))
    return 0


def show_suite(models: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Print a row per stage, in 80 columns, and the path of the picture."""
    from rich.console import Console

    numbers = ("/s", "plan", "comp", "link", "wght", "grad", "opt", "act", "work", "comm", "peak", "act%")
    rows = table("", ("model", ""), numbers)
    rows.collapse_padding = True
    for each in models:
        speeds = [f"{each[name]:,.0f}" for name in ("throughput", "planned throughput")]
        whole = [each["model"], *speeds, f"{100 * each['share of activations']:.0f}"]
        for stage in each["stages"]:
            values = [f"{100 * stage[name]:.0f}" for name in ("compute", "links")]
            values += [f"{stage[name] / 1e6:.1f}" for name in (*PARTS, "peak")]
            rows.add_row(whole[0], str(stage["stage"]), *whole[1:3], *values, whole[3])
            whole = [""] * 4
    Console(highlight=False, width=80).print(rows)
    print(
        "/s, plan: tokens or images, measured and planned. comp, link: % of a step that\n"
        "it computes, and is seen to send or receive. MB at its peak: weights, gradients,\n"
        f"optimizer, activations, workspace, communication; peak: by the allocator.\n{picture}"
    )


def parts_for(declared: Sequence[Part], names: Sequence[str], options: BenchOptions, folder: Path) -> Iterator[Part]:
    needed = {name for asked in names for name in _MEASURED_FOR.get(asked, (asked,))}
    for part in declared:
        cases = tuple(case for case in part.cases if case.text("case") in needed)
        if part.name in _WITH_PLANS:
            cases = tuple(case.also(folder=str(folder)) for case in cases)
        if part.name == "in-process" and options.profile:
            cases = tuple(case.also(profile=True) for case in cases)
        if cases and part.name in _A_JOB_EACH:
            cases = tuple(case.also(repetition=at) for at in range(options.repetitions) for case in cases)
            yield replace(part, cases=cases, together=(*part.cases[0], "repetition"))
        elif cases:
            yield replace(part, cases=cases, repetitions=1 if part.name in _ONCE else options.repetitions)


class LaunchedRanks:
    """Back end of this bench: the launcher's plain processes, without torchrun's agents, which poll, too."""

    name = "launcher"

    def check(self, nodes: Nodes) -> None:
        """See `Backend.check`: all ranks share the unshaped loopback."""

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        # -P: the current folder may hold modules of any name.
        command = [sys.executable, "-P", "-m", work.module, *work.arguments]
        result = launch(command, num_ranks=nodes.num_ranks, timeout=work.timeout, environment=work.environment)
        return Outcome(status=result.status, report=result.report)

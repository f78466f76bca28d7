"""`stagewright bench`: runs the jobs of `bench.toml` that the cases need, and prints every figure beside its target.

Jobs run one after the other: first those in a process of their own, then those on ranks, all sides of a case in turn in
the same processes. Where peaks of memory count, each repetition is a job.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ... import __version__
from ...cli.host import num_cores, processor
from ...cli.launcher import launch
from ...cli.options import check_known, read
from ...cli.tables import table
from ..backends.records import Nodes, Outcome, Work
from ..jobs.declaration import Declaration, Part, find_declaration
from ..jobs.figure import Figure, Judged, Spread, Target, read_figures
from ..jobs.job import Job, jobs_of
from ..jobs.report import write_report
from ..jobs.results import gather
from ..jobs.runner import JobProgress, alone, intend, run_jobs
from ..jobs.status import State
from ..works.suite import PARTS, told

CASES = {
    "overhead-1f1b": "step time at no compute, 1F1B: at most 1.1 of torch's",
    "overhead-interleaved": "step time at no compute, interleaved: at most half of torch's",
    "sleep-1f1b": "stages that sleep, 1F1B: within 1.02 of the ideal, not behind torch",
    "sleep-interleaved": "stages that sleep, interleaved: within 1.03 of the ideal, not behind torch",
    "prediction": "the simulator beside measured steps: 2% where stages sleep, 3% on the GPT",
    "gpt": "a GPT with AdamW on two ranks: at least as fast as torch, schedule by schedule",
    "gpt-4": "the same on four ranks: counts where there are four cores",
    "async-sleep": "throughput of 2bw, stages that sleep: 1.68 (P=4) and 1.8 (P=8) times 1F1B, ours and torch's",
    "async-gpt": "throughput of 2bw, a GPT with AdamW, M=2: 1.42 times torch's 1F1B, 1.22 times its interleaved",
    "receive-bytes": "receives posted and not consumed: M=64 at most as M=8, or 16 MiB",
    "overlap": "gradients summed over a slow wire: beside the backwards that follow, and behind them",
    "checkpoints": "a GPT with AdamW on two ranks: checkpoints beside training and saves it waits for; 3.5% by auto",
    "split-backward": "I and W over the whole backward: at most 1.05 on a GPT's stage and 1.25 on small linears",
    "start": "CPU seconds of building and of the first step, in one process: a GPT, and transformers' GPT-2",
    "simulator": "the simulator's own speed and memory",
    "partitioner": "its speed: published profiles in 1/20 of PipeDream's time, 1,000 layers on 1,024 devices in 10 s",
    "planner": "its speed: a transformer of 100 layers on 1,024 GPUs in 60 s",
    "planning-scale": "seconds of CPU and memory of plans for 1,000 to 100,000 devices, each once",
    "planned-run": "plans carried out: step time within 10% (a GPT) and 5% (layers that sleep), memory within 10%",
    "auto": 'schedule="auto" beside the best of torch\'s pipelines and DDP (two and four ranks, a core each)',
    "regret": "the chosen plan beside the next four, carried out (layers that sleep): within 1% of the fastest",
    "uneven-cut": "uneven models on two ranks: cut by profile, faster than equal layers or equal parameters",
}
_MEASURED_FOR = {"prediction": ("sleep-1f1b", "sleep-interleaved", "gpt")}  # its figures come with those of others
_A_JOB_EACH = (
    "simulator",
    "start",
    "partitioner",
    "planner",
    "memory-in-use",
    "memory-resident",
)  # repetition of these parts
_ONCE = ("planning-scale",)
_WITH_PLANS = ("planned-run", "memory-in-use", "memory-resident")  # left in a folder by the first of them
DECLARATION = Path(__file__).parents[1] / "bench.toml"
MIN_REPETITIONS = 5


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


def run(argv: Sequence[str]) -> int:
    """Run the cases and print; 1 if a process failed. A missed target is a result, not a failure."""
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
        figures, failed = _measured(names, options, Path(folder))
    if failed:
        print(f"stagewright bench: {failed}", file=sys.stderr)
        return 1
    report(figures, names, options)
    return 0


def _measured(names: Sequence[str], options: BenchOptions, folder: Path) -> tuple[list[Figure], str]:
    """Figures of all jobs, and why one of them failed, behind which none was begun."""
    declaration = Declaration.load(DECLARATION)
    parts = tuple(parts_for(declaration.parts, names, options, folder))
    return _ran(sorted(jobs_of(replace(declaration, parts=parts)), key=lambda job: job.nodes is not None), folder)


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

    models: str = ""
    """Some of gpt,lstm,cnn,unet,moe (default: all)."""
    ranks: int = 2
    """Processes, a stage each."""
    folder: Path = Path("runs/experiments")
    """Figures and a picture go to FOLDER/suite/report."""
    json: bool = False
    """Print one JSON object; progress goes to the standard error."""


def run_suite(argv: Sequence[str]) -> int:
    """Run the experiment `suite` anew, for all models or some, and print one table; 1 if a process failed."""
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
    """Print a row a stage, in 80 columns, and where the picture is."""
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
    """Back end of this bench: the launcher's plain processes, without torchrun's agents, which poll beside ranks."""

    name = "launcher"

    def check(self, nodes: Nodes) -> None:
        """See `Backend.check`: loopback is as it is, and all ranks stand on it."""

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        # -P: the folder that the user stands in may hold modules with any name.
        command = [sys.executable, "-P", "-m", work.module, *work.arguments]
        result = launch(command, num_ranks=nodes.num_ranks, timeout=work.timeout, environment=work.environment)
        return Outcome(status=result.status, report=result.report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the report: the repetitions of one figure.

    Arguments:
        case, workload: what was asked, and what was run for it.
        what: the value is.
        origin: "simulated / measured" of a prediction.
        note: the times behind a ratio.
    """

    case: str
    workload: str
    what: str
    unit: str
    value: Spread
    target: Target | None
    origin: str
    note: str

    @classmethod
    def of(cls, figures: Sequence[Figure], note: str = "") -> Line:
        """From all repetitions."""
        first, samples = figures[0], [figure.value for figure in figures]
        predicted = first.case.get("predicted")
        return cls(
            case=first.case.text("case"),
            workload=first.case.text("run"),
            what=first.name,
            unit=first.unit,
            value=Spread.of_errors(samples) if first.unit == "error" else Spread.of(samples),
            target=first.target,
            origin=f"{predicted} / {first.how.value}" if predicted else first.how.value,
            note=note + first.note,
        )

    @property
    def verdict(self) -> str:
        """ok, missed, or nothing where nothing was asked."""
        return "" if self.target is None else "ok" if self.target.met(self.value) else "missed"


def lines_of(figures: Sequence[Figure], names: Sequence[str]) -> list[Line]:
    """A line a figure, in the order of the cases; of a problem's variants the slowest, which names the others."""
    groups: dict[tuple[object, ...], dict[str, list[Figure]]] = {}
    for figure in figures:
        if figure.target is not None:
            figure.case.text("case")  # refuses one that says none, and would be lost
        if figure.case.get("case") in names:
            variant = str(figure.case.get("variant", ""))
            key = (figure.case.text("case"), figure.case.text("run"), "" if variant else figure.name)
            groups.setdefault(key, {}).setdefault(variant, []).append(figure)
    lines = []
    for variants in groups.values():
        medians = {variant: median(figure.value for figure in same) for variant, same in variants.items()}
        slowest = max(medians, key=medians.__getitem__)
        unit = variants[slowest][0].unit
        others = [f"{variant} {value:.4g} {unit}, " for variant, value in medians.items() if variant != slowest]
        lines.append(Line.of(variants[slowest], "".join(others)))
    return sorted(lines, key=lambda line: list(CASES).index(line.case))


def report(figures: Sequence[Figure], names: Sequence[str], options: BenchOptions) -> None:
    """One JSON object, or a table, where the time goes, and what the columns mean."""
    lines, where = lines_of(figures, names), where_time_goes(figures)
    if options.json:
        answer = {
            "environment": environment(),
            "repetitions": options.repetitions,
            "figures": [{**asdict(line), "verdict": line.verdict} for line in lines],
            "where_time_goes": where,
            "records": [json.loads(figure.to_json()) for figure in figures],
        }
        print(json.dumps(answer))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file has no width; a table folded at 80 columns is hard to read
    rows = table("", ("case", "what was run", "figure"), ("median", "range", "target"))
    for name in ("", "origin", "from"):
        rows.add_column(name)
    before = None
    for line in lines:
        color = {"ok": "green", "missed": "red"}.get(line.verdict, "default")
        low, high = (shown(value, line.unit) for value in (line.value.low, line.value.high))
        rows.add_row(
            line.case if line.case != before else "",
            line.workload,
            line.what,
            shown(line.value.median, line.unit),
            f"\\[{low} .. {high}]",
            _shown_target(line),
            f"[{color}]{line.verdict}[/]",
            line.origin,
            line.note,
        )
        before = line.case
    console.print(rows)
    described = ", ".join(f"{name} {value}" for name, value in environment().items())
    for text in (*where, *_profiles(figures), f"\n{described}", _LEGEND):
        console.print(text, markup=False)
    if options.repetitions < MIN_REPETITIONS:
        console.print(f"Only {options.repetitions} repetitions: for debugging. Expected {MIN_REPETITIONS} or more.")


_LEGEND = (
    "Medians with [smallest .. largest] sample; ratios to torch are of neighbouring repetitions. measured: real work "
    "in real processes, one thread each. emulated: real processes and messages, stages that sleep. simulated: the "
    "event simulator. planned: what the plan said before it was run."
)


def _profiles(figures: Sequence[Figure]) -> Iterator[str]:
    for figure in figures:
        if figure.name == "in process" and figure.repetition == 0 and figure.note:
            yield f"\nin-process step under cProfile, {figure.case.text('run')}:\n{figure.note.strip()}"


def where_time_goes(figures: Sequence[Figure]) -> list[str]:
    """Parts of a microbatch in a step at no compute."""
    found: dict[str, dict[str, list[float]]] = {}
    for figure in figures:
        if figure.case.get("model") == "tiny":
            found.setdefault(figure.case.text("run"), {}).setdefault(figure.name, []).append(figure.value)
    lines = []
    for run, samples in found.items():
        medians = {name: median(values) for name, values in samples.items()}
        lines.append(f"\nwhere the time goes, {run}, us a microbatch (measured):")
        lines += [f"  {name:<22}{seconds * 1e6:>9.1f}   {what}" for name, seconds, what in _breakdown(run, medians)]
    return lines


def _breakdown(run: str, seconds: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
    sizes = {word[0]: int(word[2:]) for word in run.split()[1:]}
    messages = 2 * (sizes["P"] * sizes.get("V", 1) - 1)
    for side in ("ours", "torch"):
        yield f"step, {side}", seconds[f"step, {side}"] / sizes["M"], "over gloo"
    yield "autograd and modules", seconds["autograd"], "a bare loop in one process, the stages of both ranks"
    engine = seconds["in process"] - seconds["autograd"]
    yield "engine (Python)", engine, "step with the in-process transport less that, both ranks"
    tight, paced = seconds["message, tight"], seconds["message, paced"]
    yield "a message, tight", tight, f"one way; {messages} a microbatch, partly at the same time"
    yield "a message, paced", paced, "one way to a receiver that slept 2 ms: gloo's wake-up"


def shown(value: float, unit: str) -> str:
    """A value in its unit.

    >>> shown(0.0123, "error"), shown(1.02, "ratio"), shown(250000.0, "actions/s")
    ('1.23%', '1.020', '250,000')
    """
    if unit == "error":
        return f"{value:.2%}"
    if unit in ("actions/s", "ms"):
        return f"{value:,.0f}" if unit == "actions/s" else f"{value:.1f} ms"
    return f"{value:.3f}" if unit == "ratio" else f"{value:.2f} {unit}"


def _shown_target(line: Line) -> str:
    target = line.target
    if target is None:
        return ""
    which = "all " if target.judged is Judged.WORST else ""
    return f"{which}{'>=' if target.at_least else '<='} {shown(target.limit, line.unit)}"


def environment() -> dict[str, str]:
    """Versions and machine: all that a figure depends on besides the code."""
    return {
        "stagewright": __version__,
        "torch": importlib.metadata.version("torch"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": str(num_cores()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }

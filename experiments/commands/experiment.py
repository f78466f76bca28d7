"""`stagewright experiment list|show|run|report`: scripted experiments, one small TOML file each."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import tyro

from ...cli.options import check_known, plain_help, read
from ...partition import quantities
from ...schedules.wording import count, duration, wrapped
from ..backends.registry import BACKENDS, Access, backend
from ..jobs.case import Case, Value
from ..jobs.declaration import catalog_names, check_code, check_layout, find_declaration
from ..jobs.job import Changes, State, Status, jobs_of, jobs_with
from ..jobs.report import readme, write_report
from ..jobs.results import Results, gather
from ..jobs.runner import Intent, JobProgress, alone, intend, is_held, run_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """List the experiments that come with stagewright."""

    json: bool = False  # Print one JSON object.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """Show the jobs of an experiment and their states."""

    name: tyro.conf.Positional[str]  # Name of an experiment, or a TOML file of your own.
    folder: Path = Path("runs/experiments")  # Jobs are in FOLDER/NAME/jobs.
    json: bool = False  # Print one JSON object.


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Run the jobs of an experiment that are not done yet, then write its report."""

    name: tyro.conf.Positional[str]  # Name of an experiment, or a TOML file of your own.
    backend: str | None = None  # Back end of parts on ranks: local, netns, ssh or slurm (default: as declared).
    nodes: int | None = None  # Nodes of every case on ranks (default: as declared).
    bandwidth: str | None = None  # Rate of each node's card, such as 1gbit (default: as declared).
    latency: str | None = None  # From node to node, such as 1ms (default: as declared).
    repetitions: int | None = None  # Repetitions of every part (default: as declared).
    set: tuple[str, ...] = ()  # KEY=VALUE for all cases, instead of declared values (default: as declared).
    # Only these parts, and whole jobs with such cases: names of parts, or KEY=VALUE (default: all).
    only: tuple[str, ...] = ()
    fresh: bool = False  # Also run finished jobs again.
    any_code: bool = False  # Don't repeat jobs that were run by another version of the code.
    # File of hosts for --backend ssh, one per line, such as user@host:22 slots=4 python=/path/of/python.
    hosts: Path | None = None
    # Options of sbatch for --backend slurm, by submitit's names, such as partition=long account=mine.
    slurm: tuple[str, ...] = ()
    # Network interface for gloo on the nodes of ssh and slurm (default: the one through which they reach node 0).
    interface: str | None = None
    workers: int | None = None  # Number of single-process jobs at once (default: one per core).
    folder: Path = Path("runs/experiments")  # Jobs go to FOLDER/NAME/jobs, the report to FOLDER/NAME/report.
    json: bool = False  # Print one JSON object; progress goes to standard error.

    def changes(self) -> Changes:
        """Changes of declared values. Raises ValueError for an invalid option."""
        if self.backend is not None:
            check_known("--backend: unknown back end", self.backend, BACKENDS, listed="back ends")
        for option in ("nodes", "repetitions", "workers"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"--{option} {value}: expected at least 1")
        for option, of in (("hosts", "ssh"), ("slurm", "slurm")):
            if getattr(self, option) and self.backend not in (None, of):
                raise ValueError(f"--{option} is for --backend {of}, not for --backend {self.backend}")
        if self.bandwidth is not None:
            quantities.bandwidth("--bandwidth", self.bandwidth)
        if self.latency is not None:
            quantities.latency("--latency", self.latency)
        named = {name: getattr(self, name) for name in ("backend", "nodes", "bandwidth", "latency", "repetitions")}
        return Changes(**named, values=tuple(map(_read_value, self.set)))


def _read_value(word: str) -> tuple[str, Value]:
    key, equals, text = word.partition("=")
    if not (key and equals and text):
        raise ValueError(f"--set {word}: expected KEY=VALUE, such as ranks=2")
    try:
        value = json.loads(text)
    except ValueError:  # text needs no quotes
        value = text
    try:
        return next(iter(Case.of({key: value}).items))
    except ValueError as error:
        raise ValueError(f"--set {word}: {error}") from None


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(ShowOptions):
    """Write the report of an experiment: results as JSONL, pictures, and a section of a README between markers."""

    into: Path | None = None  # Write to INTO/NAME, such as experiments/results (default: FOLDER/NAME/report).
    # Read RESULTS/NAME/results.jsonl instead of jobs, and write the report there (or to --into).
    results: Path | None = None


def run(argv: Sequence[str]) -> int:
    """Run `list`, `show`, `run` or `report`, and return its exit status."""
    words: dict[str, Callable[[Sequence[str]], int]] = {"list": _list, "show": _show, "run": _run, "report": _report}
    if not argv or argv[0] in ("-h", "--help"):
        print(wrapped(_help()))
        return 0
    known = dict.fromkeys([*words, *catalog_names()])
    check_known("unknown experiment", argv[0], known, listed="words and experiments")
    return words[argv[0]](argv[1:]) if argv[0] in words else _run(argv)


def _help() -> str:
    lines = ["usage: stagewright experiment list|show|run|report [NAME] [options]", "", "experiments:"]
    names = catalog_names()
    width = max(map(len, names))
    lines += [f"  {name:<{width}}  {find_declaration(name).question}" for name in names]
    lines += ["", "`stagewright experiment run --help` lists the options of run; likewise of the others."]
    return "\n".join([*lines, "`stagewright experiment NAME` is short for `stagewright experiment run NAME`."])


def _list(argv: Sequence[str]) -> int:
    options = read(ListOptions, argv, "experiment list")
    found = [find_declaration(name) for name in catalog_names()]
    if options.json:
        print(json.dumps([{"name": d.name, "question": d.question, "jobs": len(jobs_of(d))} for d in found]))
        return 0
    width = max(len(each.name) for each in found)
    for each in found:
        where = ", ".join(dict.fromkeys(part.backend if part.on_ranks else "cores" for part in each.parts))
        print(wrapped(f"{each.name:<{width}}  {each.question} ({count(len(jobs_of(each)), 'job')} on {where})"))
    return 0


def _show(argv: Sequence[str]) -> int:
    options = read(ShowOptions, argv, "experiment show")
    declaration = find_declaration(options.name)
    folder = options.folder / declaration.name / "jobs"
    intents = [intend(job, folder / job.name) for job in jobs_of(declaration)]
    statuses = [Status.read(intent.folder) for intent in intents]
    if is_held(options.folder / declaration.name):  # interrupted by its state, but running
        running = [status.state is State.RUNNING for status in statuses]
        intents = [replace(i, why="") if at else i for i, at in zip(intents, running, strict=True)]
    if options.json:
        rows = [
            {"job": intent.job.name, "runs": intent.runs, "why": intent.why, **asdict(status)}
            for intent, status in zip(intents, statuses, strict=True)
        ]
        print(json.dumps({"question": declaration.question, "jobs": rows}))
        return 0
    print(wrapped(declaration.question))
    width = max(len(intent.job.name) for intent in intents)
    for intent, status in zip(intents, statuses, strict=True):
        spent = "" if status.seconds is None else f" in {duration(status.seconds)}"
        why = f" (runs again: {intent.why})" if intent.why else ""
        print(f"{intent.job.name:<{width}}  {status.state.value}{spent}{why}")
    return 0


def _run(argv: Sequence[str]) -> int:
    options = read(RunOptions, argv, "experiment run")
    changes = options.changes()
    declaration = find_declaration(options.name)
    check_layout(declaration)
    check_code(declaration)
    jobs = jobs_with(jobs_of(declaration, changes), options.only)
    folder = options.folder / declaration.name
    with alone(folder):
        readme(declaration, "", folder / "report")  # raises its errors before the jobs run
        intents = [
            intend(job, folder / "jobs" / job.name, fresh=options.fresh, any_code=options.any_code) for job in jobs
        ]
        to_run = sum(intent.runs for intent in intents)
        progress = JobProgress(total=to_run, stream=sys.stderr)
        _tell(intents, progress.note)
        access = Access(hosts=options.hosts, slurm=options.slurm, interface=options.interface or "")
        make_backend = partial(backend, say=progress.note, access=access)
        with progress:
            ended = run_jobs(intents, progress=progress, make_backend=make_backend, workers=options.workers)
        states = Counter(status.state for status in ended)
        ok = states[State.DONE] == to_run
        results = gather(declaration, folder / "jobs") if states[State.DONE] or to_run < len(jobs) else None
        report = write_report(declaration, results, folder / "report") if results is not None else None
    if options.json:
        answer = {
            "jobs": len(jobs),
            "ran": len(ended),
            **{state.value: states[state] for state in (State.DONE, State.FAILED, State.TIMED_OUT)},
            "figures": len(results.figures) if results else 0,
            "report": str(report) if report else None,
        }
        print(json.dumps(answer))
    else:
        said = ", ".join(f"{number} {state.value}" for state, number in states.items()) or "nothing to run"
        print(f"{declaration.name}: {count(len(jobs), 'job')}: {said}" + (f"\n{report}" if report else ""))
    return 0 if ok else 1


def _tell(intents: Sequence[Intent], note: Callable[[str], None]) -> None:
    done = sum(not intent.runs for intent in intents)
    if done:
        note(f"{count(done, 'job')} done already")
    for why, number in Counter(intent.why for intent in intents if intent.runs and intent.why).items():
        names = [intent.job.name for intent in intents if intent.runs and intent.why == why]
        shown = ", ".join(names[:3]) + (", ..." if number > 3 else "")
        note(f"{count(number, 'job')} again, {why}: {shown}")


def _report(argv: Sequence[str]) -> int:
    options = read(ReportOptions, argv, "experiment report")
    declaration = find_declaration(options.name)
    check_layout(declaration)
    folder = options.folder / declaration.name
    if options.results is not None:
        into = (options.into or options.results) / declaration.name
        results = Results.read(options.results / declaration.name)
    else:
        into = folder / "report" if options.into is None else options.into / declaration.name
        results = gather(declaration, folder / "jobs")
    path = write_report(declaration, results, into)
    missing = list(results.origin.missing)
    if options.json:
        print(json.dumps({"report": str(path), "figures": len(results.figures), "missing": missing}))
    else:
        print(f"{path}: {count(len(results.figures), 'figure')} of {count(results.origin.num_jobs, 'job')}")
        if missing:
            print(f"missing: {'; '.join(missing)}")
    return 0

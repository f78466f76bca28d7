"""Jobs, the units that are run and repeated. A job is a folder with its configuration, status, log and figures.

runs/experiments/NAME/jobs/emulated-ranks=4/
    job.json        configuration
    status.json     its state
    log.txt         its output
    figures.jsonl   its figures, valid once the status is "done"
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from ... import __version__
from ...cli.options import check_known
from ...cli.train.run_folder import write_whole
from ..backends.facts import code_digest
from ..backends.records import Nodes
from .case import NODE_KEYS, Case, Value, nodes_of, shown
from .declaration import Declaration, Part

_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Cases of one part that run as one."""

    name: str  # of its folder; from part and cases
    part: Part
    cases: tuple[Case, ...]  # in the order of the declaration
    nodes: Nodes | None  # that a back end must provide; None: runs in one process
    changed: str = ""  # changes of the declaration by the command line, "backend=netns nodes=4"

    @property
    def config(self) -> dict[str, object]:
        """All that figures depend on besides the code, as JSON data."""
        made = {
            "work": self.part.work,
            "cases": [case.values for case in self.cases],
            "repetitions": self.part.repetitions,
            "timeout": self.part.timeout,
            "backend": self.part.backend if self.nodes else None,
            "nodes": asdict(self.nodes) if self.nodes else None,
            "changed": self.changed,
            "environment": dict(self.part.environment),
        }
        answer: dict[str, object] = json.loads(json.dumps(made))
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Values of the command line that replace declared ones; None: as declared."""

    backend: str | None = None  # of all parts on ranks
    nodes: int | None = None  # of all their cases
    bandwidth: str | None = None  # likewise
    latency: str | None = None  # likewise
    repetitions: int | None = None  # of all parts
    values: tuple[tuple[str, Value], ...] = ()  # of keys of all cases, declared or additional

    def applied_to(self, part: Part) -> Part:
        if self.repetitions is not None:
            part = replace(part, repetitions=self.repetitions)
        if self.values:
            part = replace(part, cases=tuple(dict.fromkeys(case.also(**dict(self.values)) for case in part.cases)))
        if not part.on_ranks:
            return part
        values = {"nodes": self.nodes, "bandwidth": self.bandwidth, "latency": self.latency}
        given = {key: value for key, value in values.items() if value is not None}
        cases = tuple(dict.fromkeys(case.also(**given) for case in part.cases))
        return replace(part, backend=self.backend or part.backend, cases=cases)

    def describe(self, part: Part) -> str:
        """The changes that affect a part, as text."""
        skipped = [] if part.on_ranks else ["backend", "nodes", "bandwidth", "latency"]
        skipped += [key for key in ("backend", "repetitions") if getattr(self, key) == getattr(part, key)]
        given = {key: value for key, value in asdict(self).items() if key != "values" and key not in skipped}
        said = [f"{key}={value}" for key, value in given.items() if value is not None]
        return " ".join([*said, *(f"{key}={shown(value)}" for key, value in self.values)])


def jobs_of(declaration: Declaration, changes: Changes | None = None) -> list[Job]:
    """All jobs, in the order of the declaration. Raises ValueError for impossible changes."""
    changes = changes or Changes()
    jobs = []
    for part in declaration.parts:
        part, changed = changes.applied_to(part), changes.describe(part)
        for shared, cases in _groups(part).items():
            nodes = nodes_of(cases[0]) if part.on_ranks else None
            name = _folder_name(part.name, shared)
            jobs.append(Job(name=name, part=part, cases=cases, nodes=nodes, changed=changed))
    return jobs


def _groups(part: Part) -> dict[Case, tuple[Case, ...]]:
    groups: dict[Case, list[Case]] = {}
    for case in part.cases:
        keys = list(case) if part.together is None and not part.on_ranks else list(part.together or ())
        if part.on_ranks:
            keys = list(dict.fromkeys([*keys, *NODE_KEYS]))
        groups.setdefault(case.only(keys), []).append(case)
    return {shared: tuple(cases) for shared, cases in groups.items()}


def _folder_name(part: str, shared: Case) -> str:
    words = re.sub(r"[^A-Za-z0-9=._+-]+", "-", f"{part} {shared}".strip())
    if len(words) <= _LONGEST_NAME and words == f"{part} {shared}".strip().replace(" ", "-"):
        return words
    return f"{words[:_LONGEST_NAME]}-{hashlib.sha256(str(shared).encode()).hexdigest()[:8]}"


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The keys in which two configurations differ, as text; empty: none."""
    return ", ".join(key for key in now if before.get(key) != now[key])


def jobs_with(jobs: Sequence[Job], words: Sequence[str]) -> list[Job]:
    """Jobs by `words`, names of parts and KEY=VALUE of their cases; several of one kind or key: any of them; none: all.

    Raises ValueError, with near matches, for a part, key or value that no job has, and for an empty selection.
    """
    parts = list(dict.fromkeys(job.part.name for job in jobs))
    known: dict[str, list[str]] = {}
    for job in jobs:
        for case in job.cases:
            for key, value in case.items:
                if shown(value) not in known.setdefault(key, []):
                    known[key].append(shown(value))
    wanted_parts: list[str] = []
    wanted_values: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            check_known("--only: unknown part", word, parts, listed="parts")
            wanted_parts.append(word)
            continue
        check_known("--only: unknown key", key, list(known), listed="keys")
        check_known(f"--only: no case with {key}", value, known[key], listed=f"values of {key}")
        wanted_values.setdefault(key, []).append(value)
    chosen = [
        job
        for job in jobs
        if (not wanted_parts or job.part.name in wanted_parts)
        and any(
            all(key in case and shown(case.values[key]) in values for key, values in wanted_values.items())
            for case in job.cases
        )
    ]
    if not chosen:
        raise ValueError(f"--only {' '.join(words)}: no job has all of these: expected some of {', '.join(parts)}")
    return chosen


# --- states, written atomically, so that they can be read at any time ---

_ROOT = Path(__file__).parents[2]


class State(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of a job."""

    state: State = State.PENDING  # "running" without a running process: it was interrupted
    code: str = ""  # version of the code that it ran with
    machine: str = ""  # that it ran on, as shown
    started: float | None = None  # [s] since the epoch
    seconds: float | None = None  # its duration; None before its end
    reason: str = ""  # why it is not done, or how it differs from the request; one or several lines
    commands: tuple[str, ...] = ()  # of each node, as they could be typed there

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "status.json", json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Status:
        try:
            found = json.loads((folder / "status.json").read_text(encoding="utf-8"))
            values = {**found, "state": State(found["state"]), "commands": tuple(found["commands"])}
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError):
            return cls()


@cache
def code_version(work: str = "") -> str:
    """Such as "0.1.0, commit 6ab0328, source 1f2e3d4c"; the source includes the file of a work "file.py:function"."""
    source, own = code_digest(), Path(work.rpartition(":")[0])
    if own.suffix == ".py" and own.is_file():  # a missing one fails in the job
        source = hashlib.sha256(source.encode() + own.read_bytes()).hexdigest()
    commit = _commit()
    return f"{__version__}{f', commit {commit}' if commit else ''}, source {source[:8]}"


def _commit() -> str:
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""Files of a run: runs/<name>/ with manifest.json, metrics.jsonl, summary.json, timeline files.

A resumed run writes into its first folder: metrics.jsonl has each step once, and resumes.jsonl a line per resume.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..host import num_cores, package_versions, processor

if TYPE_CHECKING:
    from ...pipe.checkpoint.lock import FolderLock

RUNS = Path("runs")
LATEST = "latest"  # a link in the folder of runs, to the newest one
_METRICS = "metrics.jsonl"
_RESUMES = "resumes.jsonl"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Inputs of a run."""

    name: str
    config: Mapping[str, object]  # every option of the command, defaults included
    corpus_source: str  # the text or the function that provided the data
    corpus_sha256: str | None  # None if unknown
    versions: Mapping[str, str]  # of Python and of the relevant packages, by name
    host: Mapping[str, str]  # name, processor, cores and system
    command: tuple[str, ...]
    started: str  # local time, ISO 8601

    @classmethod
    def of(cls, *, name: str, config: Mapping[str, object], corpus_source: str, corpus_sha256: str | None) -> Manifest:
        return cls(
            name=name,
            config=dict(config),
            corpus_source=corpus_source,
            corpus_sha256=corpus_sha256,
            versions={"python": platform.python_version(), **package_versions("stagewright", "torch", "numpy")},
            host={
                "name": platform.node(),
                "system": platform.platform(),
                "processor": processor(),
                "cores": str(num_cores()),
            },
            command=tuple(sys.argv),
            started=time.strftime("%Y-%m-%dT%H:%M:%S"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One logged step: samples (and bytes of text, tokens) so far, loss, times in seconds; None if unknown. The bubbles
    are of `bubble_step`, the newest step with gathered records."""

    step: int
    samples: int
    tokens: int | None = None
    loss: float
    bits_per_byte: float | None = None
    learning_rate: float | None
    grad_norm: float | None
    step_seconds: float
    samples_per_s: float
    tokens_per_s: float | None = None
    bubble: float | None = None
    simulated_bubble: float | None = None
    bubble_step: int | None = None
    val_bits_per_byte: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Results of a run."""

    schedule: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    parameters: int
    # steps, samples, tokens: trained in total; figures in tokens (bytes of text) are None for other data
    steps: int
    # number of first steps with a flush after each update under a schedule without one. step_seconds, bubble and
    # simulated_bubble are of the steps after them, if there are any.
    flush_first: int = 0
    samples: int
    tokens: int | None
    seconds: float  # of the training loop, without set-up and validation
    samples_per_s: float  # likewise
    tokens_per_s: float | None  # likewise
    train_loss: float  # mean over the last steps
    train_bits_per_byte: float | None  # likewise
    val_loss: float | None  # on held-out data at the end; None without any
    val_bits_per_byte: float | None  # likewise
    step_seconds: float  # median of a whole step
    simulated_step_seconds: float  # of a step simulated with the medians of the measured durations
    bubble: float  # measured makespan bubble: median over the traced steps
    simulated_bubble: float  # simulated, of the same steps
    peak_memory_bytes: tuple[int, ...]  # per rank; on the CPU the largest resident memory above that at the start
    # per process, bytes of tensors at the peak of one measured step; None without one, as of a stream without a plan
    peak_tensor_bytes: tuple[int, ...] | None = None
    # predicted_step_seconds, predicted_step_range, predicted_bubble: median, 90% range and bubble of steps simulated
    # with the measured spread of durations; None after fewer than ten measured steps
    predicted_step_seconds: float | None = None
    predicted_step_range: tuple[float, float] | None = None
    predicted_bubble: float | None = None
    # step of the plan, the median if the plan has spreads [s]; None without a plan
    planned_step_seconds: float | None = None
    planned_memory_bytes: tuple[float, ...] | None = None  # peak_tensor_bytes as planned; None without a plan
    resumed_at: tuple[int, ...] = ()  # first step after each resume
    checkpoints: int = 0  # number of those before the end, since the last resume
    failed_checkpoints: int = 0  # likewise
    checkpoint_every: int | None = None  # steps between two at the end
    checkpoint_overhead: float | None = None  # their share of the training time, on rank 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of one run, locked by one process at a time; made by `create` for a new run, or by `go_on`."""

    path: Path
    lock: FolderLock

    @classmethod
    def check_free(cls, name: str, *, root: Path = RUNS) -> Path:
        """Folder of a new run. Raises ValueError for an invalid name and for a run that exists."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"run name {name!r}: expected letters, digits and . _ + - only, such as --name gpt-2")
        if name == LATEST:
            raise ValueError(f"run name {name!r}: expected another one, {root / name} is a link to the newest run")
        path = root / name
        if path.exists():
            raise ValueError(
                f"the run folder {path} exists already: give this run another name "
                f"(--name {_free_name(root, name)}), or delete the folder (rm -r {path})"
            )
        return path

    @classmethod
    def create(cls, manifest: Manifest, *, root: Path = RUNS) -> RunFolder:
        """Make the folder and write its manifest. Raises ValueError as `check_free`."""
        path = cls.check_free(manifest.name, root=root)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"cannot make the run folder {path}: {error.strerror or error}") from error
        lock = _locked(path)
        write_whole(path / "manifest.json", _dumps(asdict(manifest)))
        _link_latest(root, manifest.name)
        return cls(path=path, lock=lock)

    @classmethod
    def check_going_on(cls, name: str, config: Mapping[str, object], *, root: Path = RUNS) -> None:
        """Raise ValueError as `go_on` does for these options."""
        before = read_manifest(root / name)
        if before is None:
            if not (root / name).exists():
                cls.check_free(name, root=root)
        else:
            refuse_other_options(name, before["config"], config)

    @classmethod
    def go_on(cls, manifest: Manifest, *, root: Path = RUNS) -> RunFolder:
        """The folder of a resumed run, or a new one if there is none.

        Raises ValueError if another process holds it, or if the run was started with other options.
        """
        path = root / manifest.name
        cls.check_going_on(manifest.name, manifest.config, root=root)
        if not path.exists():
            return cls.create(manifest, root=root)
        lock = _locked(path)
        if not (path / "manifest.json").exists():  # killed after making the folder, before the file
            write_whole(path / "manifest.json", _dumps(asdict(manifest)))
        _link_latest(root, manifest.name)
        return cls(path=path, lock=lock)

    def keep_before(self, step: int) -> tuple[list[Metrics], int]:
        """Keep only the metrics of steps before `step`. Returns them in order, and the number of removed lines. Raises
        ValueError for a whole line of another version: its steps would be lost."""
        path, kept = self.path / _METRICS, dict[int, Metrics]()
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                metrics = Metrics(**json.loads(line))
            except ValueError:  # a truncated line
                continue
            except TypeError as error:
                raise ValueError(
                    f"{path}, line {number}: {error}: expected lines of this version: resume with the one that wrote "
                    f"them, or move the file away"
                ) from None
            if metrics.step < step:
                kept[metrics.step] = metrics
        found = [kept[number] for number in sorted(kept)]
        if len(found) != len(lines):
            write_whole(path, "".join(map(_line, found)))
        return found, len(lines) - len(found)

    def log_resume(self, resume: Resume) -> None:
        path = self.path / _RESUMES
        with _naming(path), path.open("a", encoding="utf-8") as file:
            file.write(_line(resume))

    def resumes(self) -> list[dict[str, Any]]:
        path = self.path / _RESUMES
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        self.lock.release()

    def log(self, metrics: Metrics) -> None:
        """Append one line to metrics.jsonl; unbuffered, so that it survives a kill.

        Raises ValueError if the disk is full; the file then still ends with a whole line.
        """
        path = self.path / _METRICS
        with _naming(path), path.open("ab", buffering=0) as file:
            line, size = _line(metrics).encode(), file.tell()
            try:
                written = file.write(line)
                if written != len(line):
                    file.write(line[written:])  # raises the error
            except OSError:
                file.truncate(size)
                raise

    def write_plan(self, text: str) -> None:
        write_whole(self.path / "plan.json", text)

    def write_summary(self, summary: Summary) -> None:
        write_whole(self.path / "summary.json", _dumps(asdict(summary)))


def find_run(path: Path, *, root: Path = RUNS) -> Path:
    """The folder of the run `runs/<name>` or `<name>`. Raises ValueError if there is none."""
    for candidate in (path, root / path):
        if candidate.is_dir():
            return candidate
    known = (
        sorted(folder.name for folder in root.iterdir() if folder.is_dir() and not folder.is_symlink())
        if root.is_dir()
        else []
    )
    there = f"; there are {', '.join(known)}" if known else "; there are no runs yet, type `stagewright train`"
    raise ValueError(f"no run folder {path}: expected {root}/<name>{there}")


def _locked(path: Path) -> FolderLock:
    from ...pipe.checkpoint.lock import FolderLock  # imports torch, late: errors in the options come first

    return FolderLock(path)


def _link_latest(root: Path, name: str) -> None:
    made = root / f".{LATEST}-{name}"
    with suppress(OSError):
        made.unlink(missing_ok=True)
        made.symlink_to(name, target_is_directory=True)
        made.replace(root / LATEST)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a kill leaves either the whole text or the previous file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with _naming(path):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def read_whole(path: Path) -> dict[str, Any]:
    """The JSON object of a file; {} if it is missing or unreadable, as after a kill."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raises ValueError that names the file, for errors of the disk inside."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}: expected room on the disk (what was written before is "
            f"whole)"
        ) from error


def _free_name(root: Path, name: str) -> str:
    number = 2
    while (root / f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"


def _line(record: Metrics | Resume) -> str:
    return json.dumps(asdict(record)) + "\n"


def _dumps(record: Mapping[str, object]) -> str:
    return json.dumps(record, indent=2) + "\n"


# --- resumes: what may change, and their records ---

# Options that may change at a resume: where and how fast the run runs, not its results.
MAY_DIFFER = frozenset(
    {
        *("checkpoint_every", "checkpoint_overhead", "checkpoint_dir"),
        *("name", "resume", "dry_run", "json", "timeout", "verify", "trace_every"),
        *("ranks", "schedule", "plan", "chunks", "slices", "microbatches", "recompute"),
        *("context", "tensor", "tensor_parallel"),
        *("delay_correction", "delay_factor", "flush_first"),  # of its present schedule
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    step: int  # number of the first step after it
    lost_steps: int  # number of steps that run again
    started: str  # local time, ISO 8601
    command: tuple[str, ...]  # as in the manifest
    host: str  # likewise
    num_ranks: int  # of the run from here on
    schedule: str  # likewise
    planned_step_seconds: float | None = None  # by its plan of now, if there is one
    planned_before: float | None = None  # by that of before
    changes: tuple[str, ...] = ()  # sentences on differences from before


def read_manifest(path: Path) -> dict[str, Any] | None:
    """manifest.json of the run folder `path`, None without one. Raises ValueError if unreadable."""
    file = path / "manifest.json"
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found["config"], dict):
            raise ValueError("expected options by name")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is unreadable: {error}: expected another --name, which begins anew") from None
    return found


def refuse_other_options(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if an option changed that may not change at a resume; `before`, `now`: all options by name."""
    for option, value in json.loads(json.dumps(dict(now))).items():
        if option in MAY_DIFFER or option not in before or before[option] == value:
            continue
        typed = f"--{option.replace('_', '-')}"
        raise ValueError(
            f"the run {name} was begun with {_typed(typed, before[option])}, and is to go on with "
            f"{_typed(typed, value)}: expected the same options; type {_typed(typed, before[option], is_advice=True)}, "
            f"or begin another run with another --name"
        )


def _typed(option: str, value: object, *, is_advice: bool = False) -> str:
    if value is None or value == []:
        return f"the command without {option}" if is_advice else f"no {option}"
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"

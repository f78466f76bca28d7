"""Runs the unfinished jobs of an experiment.

jobs in one process   as many at once as there are cores
jobs on ranks         after them, one at a time: each has the machine to itself
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from ...cli.host import num_cores, processor
from ...cli.processes import Process, Supervision, end
from ...cli.progress import Progress
from ...cli.train.run_folder import read_whole, write_whole
from ...schedules.wording import duration
from ..backends.records import Backend, Work
from .figure import read_figures
from .job import Job, State, Status, code_version, difference

_WORKER = "stagewright.experiments.jobs.worker"
_TAIL_LINES = 12  # of a log, in the reason of a failure
_END_GRACE = 5.0  # [s] for a process to end after SIGTERM


class JobProgress(Progress):
    """Progress of a sweep: a line for each finished job, or a bar with lines only for failures."""

    def __init__(self, *, total: int, stream: TextIO) -> None:
        super().__init__(stream=stream, total=total)
        self.total = total
        self.num_ended = 0
        self._running: list[str] = []
        self._lock = threading.Lock()  # jobs begin and end in several threads

    def began(self, name: str) -> None:
        with self._lock:
            self._running.append(name)
            self.show(", ".join(self._running), done=self.num_ended)

    def ended(self, name: str, status: Status) -> None:
        """Show that a job has ended, or was not begun."""
        with self._lock:
            if name in self._running:
                self._running.remove(name)
            self.num_ended += 1
            spent = "" if status.seconds is None else f" in {duration(status.seconds)}"
            line = f"[{self.num_ended}/{self.total}] {name}: {status.state.value}{spent}"
            if status.reason or status.state is not State.DONE or not self.has_bar:
                self.note(f"{line}: {status.reason}" if status.reason else line)
            self.show(", ".join(self._running), done=self.num_ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A job with its folder, and whether it is to run; `why`: reason for running it again, else empty."""

    job: Job
    folder: Path
    runs: bool
    why: str = ""


def intend(job: Job, folder: Path, *, fresh: bool = False, any_code: bool = False) -> Intent:
    """Whether a job is to run, by its folder; `fresh`: in any case; `any_code`: keep figures of other code versions."""
    status, code, why = Status.read(folder), code_version(job.part.work), ""
    if status.state is State.PENDING:
        return Intent(job=job, folder=folder, runs=True)
    if status.state is State.RUNNING:
        why = "was interrupted"
    elif status.state is not State.DONE:
        why = status.state.value
    elif fresh:
        why = "as requested"
    elif changed := difference(read_whole(folder / "job.json"), job.config):
        why = f"its configuration changed: {changed}"
    # The digest of the source is last; another commit alone does not count.
    elif not any_code and status.code.rpartition(" ")[2] != code.rpartition(" ")[2]:
        why = f"the code changed: {status.code} -> {code}"
    return Intent(job=job, folder=folder, runs=bool(why), why=why)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the experiment's folder. Raises ValueError if another process holds it, or if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+")
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}: expected a folder to write to; type --folder PATH") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder}: process {file.read().strip() or '?'} runs this experiment: wait for its end, or give "
                f"another folder (--folder)"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def is_held(folder: Path) -> bool:
    try:
        with (folder / "lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it never ran
        return False
    return False


def run_jobs(
    intents: Sequence[Intent],
    *,
    progress: JobProgress,
    make_backend: Callable[[str], Backend],
    workers: int | None = None,
) -> list[Status]:
    """Run all jobs that are to run, `workers` single-process jobs at once (None: one per core). Returns their statuses
    in the order of their ends.

    Ctrl-C ends the running jobs, which count as interrupted, and raises KeyboardInterrupt.
    Raises ValueError, before anything runs, if a back end cannot provide the nodes of a job.
    """
    to_run = [intent for intent in intents if intent.runs]
    backends = {name: make_backend(name) for name in {i.job.part.backend for i in to_run if i.job.nodes}}
    for intent in to_run:
        if intent.job.nodes:
            backends[intent.job.part.backend].check(intent.job.nodes)
    for intent in to_run:
        prepare(intent)
    ended: list[Status] = []
    in_processes = [intent for intent in to_run if intent.job.nodes is None]
    on_ranks = [intent for intent in to_run if intent.job.nodes is not None]
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=workers or num_cores()) as pool:
        futures = {pool.submit(_in_process, intent, progress, stop): intent for intent in in_processes}
        try:
            for future in as_completed(futures):
                ended.append(_ended(futures[future], future.result(), progress))
        except BaseException:
            stop.set()  # ends running jobs, and keeps the others from beginning
            raise
    for intent in on_ranks:
        status = _on_ranks(intent, progress, backends[intent.job.part.backend])
        ended.append(_ended(intent, status, progress))
    return ended


def prepare(intent: Intent) -> None:
    """Make a job's folder with its configuration only, without files of an earlier run."""
    if intent.folder.exists():
        shutil.rmtree(intent.folder)
    Status().write(intent.folder)
    part = intent.job.part
    config = {"experiment_part": part.name, "figures": part.figures, **intent.job.config}
    write_whole(intent.folder / "job.json", json.dumps(config, indent=1) + "\n")


def _ended(intent: Intent, status: Status, progress: JobProgress) -> Status:
    if status.state is State.DONE:
        status = _judged(intent.folder, status)
    status.write(intent.folder)
    progress.ended(intent.job.name, status)
    return status


def _judged(folder: Path, status: Status) -> Status:
    try:
        figures = read_figures(folder / "figures.jsonl")
    except ValueError as error:
        return replace(status, state=State.FAILED, reason=str(error))
    return status if figures else replace(status, state=State.FAILED, reason="it gave no figures")


def _begun(intent: Intent, progress: JobProgress) -> Status:
    machine = f"{platform.node()}: {processor()}, {num_cores()} cores"
    status = Status(state=State.RUNNING, code=code_version(intent.job.part.work), machine=machine, started=time.time())
    status.write(intent.folder)
    progress.began(intent.job.name)
    return status


def _finished(begun: Status, state: State, reason: str = "", commands: tuple[str, ...] = ()) -> Status:
    assert begun.started is not None
    seconds = round(time.time() - begun.started, 2)
    return replace(begun, state=state, seconds=seconds, reason=reason, commands=commands)


def _on_ranks(intent: Intent, progress: JobProgress, backend: Backend) -> Status:
    assert intent.job.nodes is not None
    begun = _begun(intent, progress)
    work = Work(
        module=_WORKER,
        arguments=(str(intent.folder.resolve()), "--ranks"),
        folder=intent.folder.resolve(),
        environment={"OMP_NUM_THREADS": "1", **dict(intent.job.part.environment)},
        timeout=intent.job.part.timeout,
    )
    try:
        outcome = backend.run(work, intent.job.nodes)
    except ValueError as error:  # an error that only shows when nodes are made
        return _finished(begun, State.FAILED, str(error))
    if outcome.timed_out:
        return _finished(begun, State.TIMED_OUT, outcome.report or _limit(intent), outcome.commands)
    if outcome.status != 0:
        reason = outcome.report or f"exit status {outcome.status}"
        return _finished(begun, State.FAILED, reason, outcome.commands)
    return _finished(begun, State.DONE, outcome.report, outcome.commands)


def _in_process(intent: Intent, progress: JobProgress, stop: threading.Event) -> Status:
    if stop.is_set():
        return Status()
    begun = _begun(intent, progress)
    command = [sys.executable, "-P", "-m", _WORKER, str(intent.folder), "--watch"]
    with (intent.folder / "log.txt").open("wb") as log:
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **dict(intent.job.part.environment)}
        process = Process.begin(command, environment, out=log, err=subprocess.STDOUT)
        try:
            has_ended = False
            for _ in (looks := Supervision(intent.job.part.timeout)):
                if (has_ended := process.poll()) or stop.is_set():
                    break
        finally:
            end([process], patience=_END_GRACE)
    if stop.is_set() and not has_ended:
        return Status()
    if looks.is_late:
        return _finished(begun, State.TIMED_OUT, _limit(intent))
    if process.status:
        lines = (intent.folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_TAIL_LINES:]) or "(nothing)"
        return _finished(begun, State.FAILED, f"{process.how_it_ended}; the log's last lines:\n{tail}")
    return _finished(begun, State.DONE)


def _limit(intent: Intent) -> str:
    return f"not done after {intent.job.part.timeout:g} s"

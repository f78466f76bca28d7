"""Back end `slurm`: one job of one task per node, submitted by submitit.

The command follows the job through files in the work's folder, which all nodes share, and through squeue. Work folders
must therefore be on a file system of the whole cluster. submitit's local executor runs the same tasks as processes of
this host, its debug executor in this very process: the tests use both.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...cli.launcher import sigterm_as_interrupt
from ...cli.processes import Process, Supervision, let_go
from .local import refuse_shape
from .node import STARTER, TIMED_OUT, TOKEN, UNAVAILABLE, Order
from .preflight import Meeting
from .records import Nodes, Outcome, Work
from .supervise import Say, failed_of, failure, hear, late, outcome, stories_of, to_stderr

_LOOK = 1.0  # [s] between requests to Slurm
_POLL = 0.05  # [s] between reads of the files
_TELL = 30.0  # [s] between lines about a waiting job
_ENDED = 10.0  # [s] for files to become visible after the job's end, and for a cancelled job to end
_GRACE = 10.0  # [s] from the first failure, or the end of all nodes, to the end of the job
_RESERVE = 3  # [min] of Slurm's limit beyond the work's, so that the work's applies first
_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
# Slurm's states of a job that is over, with no process running.
_OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"}
    | {"TIMEOUT"}
)


class SlurmBackend:
    """Nodes of a Slurm job.

    Arguments:
        options: of sbatch by submitit's names, such as {"partition": "long", "account": "mine"}.
        interface: for gloo, on each node; empty: the one through which it reaches node 0.
        cluster: "slurm", or submitit's "local" or "debug" executor.
        say: prints lines.
    """

    name = "slurm"

    def __init__(
        self,
        *,
        options: Mapping[str, Any] | None = None,
        interface: str = "",
        cluster: str = "slurm",
        say: Say = to_stderr,
    ) -> None:
        self._options = dict(options or {})
        self._interface = interface
        self._cluster = cluster
        self._say = say

    def check(self, nodes: Nodes) -> None:
        refuse_shape(self.name, nodes)
        if importlib.util.find_spec("submitit") is None:
            raise ValueError("--backend slurm needs submitit: type pip install 'stagewright[slurm]'")
        lacking = [name for name in _COMMANDS if self._cluster == "slurm" and shutil.which(name) is None]
        if lacking:
            raise ValueError(
                f"--backend slurm: no {', '.join(lacking)} on the PATH: run it where jobs are submitted, or type "
                f"--backend local"
            )

    def run(self, work: Work, nodes: Nodes) -> Outcome:
        self.check(nodes)
        work = work.begun()
        for text in (str(work.folder), *map(str, self._options.values())):
            if not text.isprintable():  # a line break would add a line to sbatch's script
                raise ValueError(f"--backend slurm: {text!r}: expected printable text in one line")
        work.folder.mkdir(parents=True, exist_ok=True)
        for path in work.folder.glob("node*.events"):  # of an earlier run
            path.unlink()
        token = secrets.token_hex(16)
        (work.folder / TOKEN).write_text(token)
        executor = self._executor(work, nodes)
        with sigterm_as_interrupt():
            job = executor.submit(run_task, work, nodes, os.getcwd(), self._interface, token)
            try:
                return self._follow(job, work, nodes)
            finally:
                self._end(job)
                (work.folder / TOKEN).unlink(missing_ok=True)

    def _executor(self, work: Work, nodes: Nodes) -> Any:
        import submitit

        folder = work.folder / "slurm"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it will hold the work's variables
        minutes = math.ceil(work.timeout / 60) + _RESERVE
        if self._cluster == "debug":
            return submitit.DebugExecutor(folder)
        if self._cluster == "local":
            here = submitit.LocalExecutor(folder, max_num_timeout=0)
            here.update_parameters(timeout_min=minutes, tasks_per_node=nodes.num_nodes)
            return here
        executor = submitit.SlurmExecutor(folder, max_num_timeout=0)
        given = {
            "job_name": f"stagewright-{work.folder.name}",
            "time": minutes,
            "nodes": nodes.num_nodes,
            "ntasks_per_node": 1,
            "srun_args": ["--kill-on-bad-exit=1"],  # the first node that fails ends the others
            "stderr_to_stdout": True,
        }
        try:
            executor.update_parameters(**given | self._options)
        except ValueError as error:
            raise ValueError(f"--backend slurm: {error}") from None
        return executor

    def _follow(self, job: Any, work: Work, nodes: Nodes) -> Outcome:
        ranks, folder, say = range(nodes.num_nodes), work.folder, self._say
        files = [_NodeFiles(rank=rank, name=f"node {rank}", folder=folder, say=say) for rank in ranks]
        watch = _Watch(job, self._cluster, self._say)
        for _ in Supervision(None, pause=_POLL):
            for node in files:
                node.read()
            if watch.is_over() or watch.running_since or any(node.words or node.status is not None for node in files):
                break
        for _ in (looks := Supervision(work.timeout, pause=_POLL)):
            if watch.is_over():
                break
            for node in files:
                node.read()
            if failed_of(files) or all(node.status is not None for node in files):  # Slurm may not answer
                looks.begin_grace(_GRACE)
        if looks.is_late:
            return late(files, work)
        for _ in Supervision(_ENDED if watch.state == "COMPLETED" else _LOOK, pause=_POLL):
            for node in files:
                node.read()
            if all(node.status is not None for node in files):
                break
        return _judge(files, watch, work.folder)

    def _end(self, job: Any) -> None:
        """Cancel the job unless it is over, and delete its pickle, which holds the work's variables."""
        if self._cluster == "debug":
            return
        job.paths.submitted_pickle.unlink(missing_ok=True)
        watch = _Watch(job, self._cluster, self._say)
        if watch.is_over():
            return
        with suppress(OSError, subprocess.SubprocessError):
            job.cancel(check=False)
        for _ in Supervision(_ENDED, pause=_POLL):
            if watch.is_over():
                break


class _Watch:
    def __init__(self, job: Any, cluster: str, say: Say) -> None:
        self._job = job
        self._cluster = cluster
        self._say = say
        self._submitted = self._told = time.monotonic()
        self._asked = -math.inf
        self.state = "PENDING"
        self.running_since = 0.0

    def is_over(self) -> bool:
        now = time.monotonic()
        if now > self._asked + (_LOOK if self._cluster == "slurm" else 0.0) and self.state not in _OVER:
            self._asked = now
            self.state, reason = self._ask()
            if self.state == "PENDING" and now > self._told + _TELL:
                self._told = now
                self._say(f"job {self._job.job_id} has waited for {now - self._submitted:.0f} s: {reason}")
            elif self.state != "PENDING" and not self.running_since:
                self.running_since = now
        return self.state in _OVER

    def _ask(self) -> tuple[str, str]:
        if self._cluster != "slurm":
            return ("COMPLETED" if self._job.done() else "RUNNING"), ""
        command = ["squeue", "-h", "--states=all", "-j", str(self._job.job_id), "-o", "%T|%r"]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except subprocess.TimeoutExpired:
            return self.state, "squeue does not answer"
        if asked.returncode and "Invalid job id" in asked.stderr:  # it ended so long ago that Slurm forgot it
            return "COMPLETED", ""
        state, _, reason = asked.stdout.strip().partition("|")
        return state or self.state, reason or asked.stderr.strip()


@dataclass(slots=True, kw_only=True, eq=False)
class _NodeFiles:
    rank: int
    folder: Path
    say: Say
    name: str
    words: tuple[str, ...] = ()
    problem: str = ""
    status: int | None = None
    ended_at: float = 0.0
    _at: dict[str, int] = field(default_factory=dict)

    def read(self) -> None:
        for line in self._new("events"):
            event = json.loads(line)
            if event["event"] == "up":
                self.name = f"node {self.rank} (host {event['facts']['host']})"
            elif event["event"] == "ended":
                self.status, self.ended_at = event["status"], event["time"]
            hear(self, event)
        for line in self._new("log"):
            self.say(f"{self.name}: {line}")

    @property
    def log(self) -> Path:
        return self.folder / f"node{self.rank}.log"

    def story(self) -> str:
        return failure(self.name, self.status, self.log, self.log.read_text(errors="replace").splitlines())

    def _new(self, ending: str) -> list[str]:
        with suppress(FileNotFoundError), (self.folder / f"node{self.rank}.{ending}").open("rb") as file:
            file.seek(self._at.get(ending, 0))
            lines = file.read().rpartition(b"\n")
            self._at[ending] = self._at.get(ending, 0) + len(lines[0]) + len(lines[1])
            return lines[0].decode(errors="replace").splitlines()
        return []


def _judge(files: list[_NodeFiles], watch: _Watch, folder: Path) -> Outcome:
    problems = list(dict.fromkeys(node.problem for node in files if node.problem))
    failed = failed_of(files)
    silent = [node for node in files if node.status is None]
    if watch.state == "TIMEOUT":
        return outcome(files, status=TIMED_OUT, timed_out=True, report="Slurm ended the job: its time limit was over")
    if problems:
        return outcome(files, status=UNAVAILABLE, report="\n".join(problems))
    stories = stories_of(failed)
    if silent and (stories or watch.state == "COMPLETED"):
        stories += [f"{node.name}: stopped, or ended without saying how" for node in silent]
    elif silent:
        names = ", ".join(node.name for node in silent)
        stories.append(f"{names}: no end heard of; Slurm says {watch.state}, see {folder / 'slurm'}")
    status = failed[0].status if failed else int(bool(stories))
    return outcome(files, status=status or 0, report="\n".join(stories))


_PORTS = range(20000, 30000)  # below Linux's ports of outgoing connections
_LET_GO = 10.0  # [s] for a starter to end its ranks


def run_task(work: Work, nodes: Nodes, folder: str, interface: str, token: str) -> int:
    """Run this task's node to its end. Raises RuntimeError after a failure, so that Slurm ends the others."""
    import submitit

    place = submitit.JobEnvironment()
    rank = place.global_rank
    hosts = list(place.hostnames)
    hosts += hosts[-1:] * (nodes.num_nodes - len(hosts))  # submitit's local executor: several tasks on this host
    order = Order(
        work=work,
        nodes=nodes,
        meeting=Meeting(
            node_rank=rank,
            names=tuple(f"node {number} (host {host})" for number, host in enumerate(hosts)),
            address=address_of(hosts[0]) if place.num_nodes > 1 else "127.0.0.1",
            port=port_of(place.job_id),
            limit=work.join_timeout,
            token=token,
        ),
        folder=folder,
        interface=interface,
    )
    log, events = (work.folder / f"node{rank}.{ending}" for ending in ("log", "events"))
    with log.open("wb") as said, events.open("wb") as told:
        status = _run_starter(order, said.fileno(), told.fileno())
    ended = time.time()
    with events.open("a") as told:
        print(json.dumps({"event": "ended", "status": status, "time": ended}), file=told)
    if status:
        raise RuntimeError(f"{order.meeting.names[rank]}: exit status {status}")
    return status


def _run_starter(order: Order, said: int, told: int) -> int:
    starter = Process.begin(STARTER, None, out=told, err=said)
    assert starter.process.stdin is not None
    try:
        starter.process.stdin.write(order.to_json().encode() + b"\n")
        starter.process.stdin.flush()
        return starter.process.wait()
    finally:
        let_go([starter], patience=_LET_GO)


def port_of(job_id: str) -> int:
    """Port of a job's node 0, different for the next job."""
    return _PORTS[int("".join(re.findall(r"\d+", job_id)) or 0) % len(_PORTS)]


def address_of(name: str) -> str:
    """Address of a Slurm node: its name if that resolves, else its address according to Slurm."""
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        asked = subprocess.run(
            ["scontrol", "show", "node", "-o", name], capture_output=True, text=True, check=False, timeout=30
        )
        found = re.search(r"\bNodeAddr=(\S+)", asked.stdout)
        return found[1] if found else name

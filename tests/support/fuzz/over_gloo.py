"""Cases over gloo processes that stay for the next case; strings hash differently in each of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..pool import Pool, _Worker
from .cases import Case, Outcome
from .piped import run
from .verdict import HOUSE, TESTS, Verdict, judge, last_line

LIMIT = 240.0  # [s] for a case
_SERVE = "import sys; from multiprocessing.connection import Connection; from support.pool_worker import serve; "
_SERVE += "serve(Connection(int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))"


class _Process:
    """A subprocess with the words of multiprocessing."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.pid = process, process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return


class HashingPool(Pool):
    """As `Pool`, each worker with a PYTHONHASHSEED of its own, which a fork could not have."""

    def _start(self, ranks: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        begun = range(len(self._workers), ranks)
        for index in begun:
            ours, theirs = Pipe()
            descriptor, log = tempfile.mkstemp(prefix=f"stagewright-fuzz-{index}-", suffix=".log")
            os.close(descriptor)
            environment = os.environ | {
                "PYTHONHASHSEED": str(100 + index),
                "PYTHONPATH": f"{TESTS}{os.pathsep}{HOUSE.parent}",
                "OMP_NUM_THREADS": "1",
            }
            words = [sys.executable, "-c", _SERVE, str(theirs.fileno()), log, str(self._store.port)]
            process = subprocess.Popen(words, env=environment, pass_fds=[theirs.fileno()], cwd=TESTS)
            theirs.close()
            self._workers.append(_Worker(process=_Process(process), connection=ours, log=Path(log)))
        for index in begun:
            _wait(self._workers[index].connection, index)


def _wait(connection: Connection, index: int) -> None:
    if not connection.poll(240.0) or connection.recv_bytes() != b"ready":
        raise AssertionError(f"gloo worker {index} did not start")


class FailedError(Exception):
    """A rank ended in an error; the message is its story."""


def on_rank(case: Case, folder: str) -> Outcome:
    """One rank. What is no clear refusal ends the processes, too: who knows what they hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = run(case, folder=folder)
    if outcome.error and not outcome.is_clear:
        raise FailedError(f"at call {outcome.at}: {outcome.error}")
    return outcome


@cache
def _pool() -> HashingPool:
    return HashingPool(max_ranks=4)


def check_gloo(case: Case) -> Verdict:
    """Runs a case over processes."""
    with tempfile.TemporaryDirectory() as folder:
        replies = _pool().replies(on_rank, ranks=case.num_processes, args=(case, folder), timeout=LIMIT, grace=15.0)
    if all(reply.kind == "ok" for reply in replies):
        outcomes: list[Any] = [reply.value for reply in replies]
        if len({outcome.error == "" for outcome in outcomes}) > 1:
            _pool().close()
        return judge(case, outcomes)
    hung = [rank for rank, reply in enumerate(replies) if reply.kind == "hung"]
    failed = [reply.text for reply in replies if reply.kind == "error"]
    if hung and not failed:
        return Verdict(kind="hang", what=f"ranks {hung} after {LIMIT} s", text=replies[hung[0]].text)
    died = [reply.text for reply in replies if reply.kind == "died"]
    stories = sorted(failed, key=lambda text: "PeerLost" in last_line(text)) + died
    judged = judge(case, [])
    if judged.kind in ("no case", "diverged"):
        return judged
    what = last_line(stories[0]) + (f" (ranks {hung} hung)" if hung else "")
    return Verdict(kind="error", what=what, text="\n".join(stories))

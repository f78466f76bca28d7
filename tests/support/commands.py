"""Commands whose ranks are forked from a process that has loaded torch.

All of it is the command's own code, `python -m MODULE WORDS` of each rank included. Only the launcher is left out: it
starts an interpreter a rank that loads torch, seconds of a core each. What it does itself is shown in
experiments/test_launcher.py, and once from end to end in experiments/test_train.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

from support.inside import LaunchResult

from .pool import forking, start_rank
from .pool_worker import torchrun_environment

_TIMEOUT = 400.0  # [s] guards against hangs alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A command, or one rank of it, that has ended."""

    status: int
    stdout: str
    stderr: str


class ForkedRank(NamedTuple):
    """One started rank, where its `Done` comes from, and the store at which all of them meet."""

    process: Any
    answer: Connection
    store: Any


def launch_forked(
    command: Sequence[str],
    *,
    num_ranks: int,
    stall: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> LaunchResult:
    """Stands in for `launch`: as there, rank 0's output is shown and the first failure's status returned.

    A stall is not watched for: the whole has a time limit.
    """
    del stall
    assert command[0] == sys.executable
    ranks = start_forked(command[command.index("-m") + 1 :], num_ranks=num_ranks, environment=environment)
    try:
        done = [answer(rank) for rank in ranks]
    finally:
        end_forked(ranks)
    sys.stdout.write(done[0].stdout)
    sys.stderr.write(done[0].stderr)
    return LaunchResult(status=max(rank.status for rank in done), first_failed=None, report="")


def start_forked(
    words: Sequence[str], *, num_ranks: int | None, environment: Mapping[str, str] | None = None
) -> list[ForkedRank]:
    """`python -m WORDS` once a rank, in the current folder; `python WORDS` where the first is a file.

    Arguments:
        num_ranks: that a launcher starts; None: one process that none has started.
    """
    from torch.distributed import TCPStore

    context = forking()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as launch does: it outlives every rank
    ranks = []
    for rank in range(num_ranks or 1):
        ours, theirs = context.Pipe(duplex=False)
        variables = dict(environment or {})
        if num_ranks is not None:
            variables |= torchrun_environment(rank=rank, num_ranks=num_ranks, port=store.port)
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        # no daemon: such a one may have no children, which load data
        process = context.Process(target=_be_rank, args=(theirs, list(words), os.getcwd(), variables))
        start_rank(process, rank)
        theirs.close()
        ranks.append(ForkedRank(process, ours, store))
    return ranks


def end_forked(ranks: Sequence[ForkedRank]) -> None:
    """Kill what still runs."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.answer.close()


def answer(rank: ForkedRank) -> Done:
    """The outcome of a rank, once it has ended."""
    assert rank.answer.poll(_TIMEOUT), f"a rank is not done after {_TIMEOUT} s"
    done: Done = rank.answer.recv()
    return done


def _be_rank(connection: Connection, words: list[str], folder: str, variables: dict[str, str]) -> None:
    """`python -m WORDS`, or `python WORDS`, in `folder`; sends what came of it."""
    os.environ |= variables
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", words),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            if words[0].endswith(".py"):
                runpy.run_path(words[0], run_name="__main__")
            else:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
    connection.send(Done(status=status, stdout=out.getvalue(), stderr=err.getvalue()))

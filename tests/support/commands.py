"""Commands whose ranks are forked from a process that has loaded torch.

All of it is the command's own code, `python -m MODULE WORDS` of each rank included. Only the launcher is left out: it
starts an interpreter a rank that loads torch, seconds of a core each. What it does itself is shown in
cli/test_launcher.py, and once from end to end in cli/test_train.py.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from tiers.recorder import current_test, recording

from support.inside import LaunchResult, launcher, main

from .hangs import IDLE, Watch, end_with_stacks, write_stacks_when_asked
from .pool import forking, start_rank
from .pool_worker import torchrun_environment

_TIMEOUT = 400.0  # [s] guards against ranks that compute for ever
_GRACE = 10.0  # [s] for the other ranks to say what became of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    status: int
    stdout: str
    stderr: str


class ForkedRank(NamedTuple):
    """One started rank, where its `Done` comes from, the store at which all of them meet, and where its stacks go."""

    process: Any
    answer: Connection
    store: Any
    log: Path


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.told = capsys, ""

    def text(self, *words: str) -> str:
        """Standard output of a command that succeeds; `told` is its standard error."""
        assert main(" ".join(words).split()) == 0
        out, self.told = self._capsys.readouterr()
        return out

    def json(self, *words: str) -> Any:
        return json.loads(self.text(*words, "--json"))

    def refused(self, *words: str) -> str:
        """Standard error of a command that is answered as a mistake, with nothing on standard output."""
        assert main(" ".join(words).split()) == 2
        out, self.told = self._capsys.readouterr()
        assert (out, "Traceback" in self.told) == ("", False)
        assert "stagewright: error: " in self.told
        return self.told


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`command("train", "--steps", "5")`: the command line in `tmp_path`, with forked ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "launch", launch_forked)

    def run(*words: str) -> Done:
        status = main(words)
        captured = capsys.readouterr()
        return Done(status=status, stdout=captured.out, stderr=captured.err)

    return run


def launch_forked(
    command: Sequence[str], *, num_ranks: int, stall: float | None = None, environment: Mapping[str, str] | None = None
) -> LaunchResult:
    """Stands in for `launch`: as there, rank 0's output is shown and the first failure's status returned.

    A stall is not watched for: the whole has a time limit.
    """
    del stall
    assert command[0] == sys.executable
    done = run_forked(command[command.index("-m") + 1 :], num_ranks=num_ranks, environment=environment)
    sys.stdout.write(done[0].stdout)
    sys.stderr.write(done[0].stderr)
    return LaunchResult(status=max(rank.status for rank in done), first_failed=None, report="")


def run_forked(
    words: Sequence[str], *, num_ranks: int | None, environment: Mapping[str, str] | None = None
) -> list[Done]:
    """What came of each rank of `start_forked`; once one has failed, the others have `_GRACE` [s] left."""
    ranks = start_forked(words, num_ranks=num_ranks, environment=environment)
    done: dict[int, Done] = {}
    watch = Watch([rank.process for rank in ranks], limit=_TIMEOUT, idle=IDLE)
    try:
        while waiting := {rank.answer: index for index, rank in enumerate(ranks) if index not in done}:
            for connection in (ready := watch.wait(list(waiting))):
                index = waiting[connection]
                done[index] = answer(ranks[index])
                if done[index].status:
                    watch.hasten(_GRACE)
            if not ready:
                end_with_stacks([ranks[index].process for index in waiting.values()])
                for index in waiting.values():
                    stacks = f"{watch.why}:\n{ranks[index].log.read_text()}"
                    done[index] = Done(status=1, stdout="", stderr=stacks)
    finally:
        end_forked(ranks)
    return [done[index] for index in range(len(ranks))]


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
        descriptor, log = tempfile.mkstemp(prefix=f"stagewright-rank-{rank}-", suffix=".log")
        os.close(descriptor)
        variables["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
        process = context.Process(target=_be_rank, args=(theirs, list(words), os.getcwd(), variables, log))
        start_rank(process, rank)
        theirs.close()
        ranks.append(ForkedRank(process, ours, store, Path(log)))
    return ranks


def end_forked(ranks: Sequence[ForkedRank]) -> None:
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.answer.close()
        rank.log.unlink(missing_ok=True)


def answer(rank: ForkedRank) -> Done:
    assert rank.answer.poll(_TIMEOUT), f"a rank is not done after {_TIMEOUT} s"
    try:
        done: Done = rank.answer.recv()
    except EOFError:
        rank.process.join()
        return Done(status=1, stdout="", stderr=f"exit code {rank.process.exitcode}, without a word")
    return done


def _be_rank(connection: Connection, words: list[str], folder: str, variables: dict[str, str], log: str) -> None:
    """`python -m WORDS`, or `python WORDS`, in `folder`; sends what came of it."""
    os.environ |= variables
    write_stacks_when_asked(open(log, "w"))  # noqa: SIM115  (lives as long as the process)
    held = _hold_groups()
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", words),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            with recording(current_test()):
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
    del held


def _hold_groups() -> list[Any]:
    """Every process group that this process destroys from now on.

    What DistributedDataParallel leaves behind frees its group with the GIL held, and so waits for gloo's threads, one
    of which may want the GIL to free a tensor (torch 2.13: one run of twenty never ended). So it is never the last.
    """
    import torch.distributed as dist

    held: list[Any] = []
    destroy = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        if dist.is_initialized():
            held.extend(dist.distributed_c10d._world.pg_map)
        destroy(group)

    dist.destroy_process_group = destroy_process_group
    return held

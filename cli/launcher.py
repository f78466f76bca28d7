"""Starts N local processes of one command and supervises them until they finish, or until one fails.

    launcher ---- TCPStore (rendezvous) ----+
       | stdin (never written: it closes when the launcher dies)
       +--> rank 0   stdout: the terminal's; stderr: printed, last lines kept
       +--> rank 1   both kept only
       +--> ...      each in its own session, so that Ctrl-C reaches the launcher alone

A rank reports that it finished, or when it failed, by a file in a folder of the launcher. This file decides, not the
exit status: a process may abort during teardown, after its results are out, and one that exits with status 0 before
its work is done has failed.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from .host import loopback, num_cores
from .processes import Supervision, all_ended, die_with_parent, end, exit_with_stdin
from .rank_process import SILENT, WHERE, RankProcess

if TYPE_CHECKING:
    from ..comm.sealed import SealedStore

_FOLDER_VARIABLE = "STAGEWRIGHT_LAUNCH_FOLDER"
_HOST = "127.0.0.1"
_SHOWN = 30  # last lines of the rank that failed first
_ANSWER_S = 15.0  # for ranks to write their stacks
_GLANCE_S = 0.25  # counted at most between two looks: in a longer gap the machine ran no process
_STILL = 0.02  # share of a core, of any rank: less is a stall; gloo's threads take 0.01 while they wait


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """Outcome of a launch."""

    status: int  # exit status of the launch: 0, or that of the first failed rank (128 + its signal if killed)
    first_failed: int | None = None  # the rank that failed first, or None
    report: str = ""  # for the user; empty after success


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    grace: float = 10.0,
    timeout: float | None = None,
    stall: float | None = None,
    environment: Mapping[str, str] | None = None,
    restarts: int = 0,
) -> LaunchResult:
    """Run `command` as N ranks on this host, and wait for all of them.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as under torchrun, and wraps its work in
    `report_to_launcher()`. When a rank fails, the others have `grace` to report their errors, then they are ended.

    Arguments:
        command: program and arguments, run without a shell.
        num_ranks: N >= 1.
        grace: [s] from the first failure to the end of the others, and from the last result to the last exit.
        timeout: [s] for the launch; None: no limit.
        stall: [s] without computation on any rank, after which all are ended and the report shows each rank's stack.
            None: no limit.
        environment: variables in addition to this process's own.
        restarts: most processes to restart that were killed while the others continue without them (a
            PipelineModule with Mesh(on_failure="reroute")): they join at the beginning of a step, `pipe.num_steps`.

    Ctrl-C (or SIGTERM) ends all ranks and raises KeyboardInterrupt. Raises ValueError for num_ranks < 1, restarts < 0.
    """
    for name, value, least in (("num_ranks", num_ranks, 1), ("restarts", restarts, 0)):
        if value < least:
            raise ValueError(f"{name}={value}: expected at least {least}")
    with (
        tempfile.TemporaryDirectory(prefix="stagewright-") as folder,
        _rendezvous_store(num_ranks, secret := secrets.token_hex(32)) as store,
        sigterm_as_interrupt(),
    ):

        def start(rank: int, **variables: str) -> RankProcess:
            variables |= _variables(rank=rank, num_ranks=num_ranks, port=store.port, folder=folder)
            given = {**os.environ, **variables, **(environment or {}), "STAGEWRIGHT_SECRET": secret}
            return RankProcess.start(command, rank, given, folder)

        ranks: list[RankProcess] = []
        try:
            for rank in range(num_ranks):
                ranks.append(start(rank))
            judge = _Judge(ranks, store, start, restarts)
            return _see_through(ranks, judge, grace=grace, timeout=timeout, stall=stall)
        finally:
            end(ranks)
            if sys.stdout.isatty():  # show the cursor, which a killed progress bar leaves hidden
                print("\x1b[?25h", end="", flush=True)


def launch_command(words: Sequence[str], *, num_ranks: int, stall: float | None = None) -> int:
    """Run `stagewright WORDS` as N ranks, print the report of a failure, and return the exit status."""
    print(f"{words[0]}: starting {num_ranks} processes", file=sys.stderr, flush=True)
    # -P: the current folder may hold modules of any name.
    result = launch([sys.executable, "-P", "-m", "stagewright", *words], num_ranks=num_ranks, stall=stall)
    if result.report:
        print(result.report, file=sys.stderr)
    return result.status


@contextmanager
def report_to_launcher() -> Iterator[None]:
    """Wrap a rank's work: reports to the launcher that it is done, or when it failed.

    Inside, the rank writes its stack when the launcher asks. Also ends this process when its launcher is gone. Does
    nothing in a process that `launch` did not start.
    """
    folder = os.environ.get(_FOLDER_VARIABLE)
    if folder is None:
        yield
        return
    rank = os.environ["RANK"]
    die_with_parent()
    exit_with_stdin()
    with Path(folder, f"{rank}.stack").open("w") as stack:
        signal.signal(WHERE, signal.SIG_IGN)  # and again after unregister
        faulthandler.register(WHERE, file=stack, all_threads=True)
        try:
            yield
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                Path(folder, f"{rank}.done").touch()
            else:
                Path(folder, f"{rank}.failed").write_text(repr(time.time()))
            raise
        finally:
            faulthandler.unregister(WHERE)
    Path(folder, f"{rank}.done").touch()


class _Watchdog:
    """Detects a stall: no rank computes for `patience` [s] (None: for ever), and none ends."""

    def __init__(self, ranks: list[RankProcess], patience: float | None) -> None:
        self._ranks, self._patience = ranks, patience
        self._looked, self._still, self._seen = time.monotonic(), 0.0, tuple[float, ...]()

    def is_stalled(self) -> bool:
        if self._patience is None:
            return False
        now, found = time.monotonic(), [rank.computing() for rank in self._ranks]
        taken = tuple(seconds for seconds, _ in found)
        if not any(wants for _, wants in found):  # else the machine is busy with others
            self._still += min(now - self._looked, _GLANCE_S)
        self._looked = now
        seen = self._seen or (-1.0,) * len(taken)
        if not any(taken) or any(a - b > _STILL * self._patience for a, b in zip(taken, seen, strict=True)):
            self._seen, self._still = taken, 0.0
        return self._still > self._patience

    def report(self) -> str:
        running = [rank for rank in self._ranks if not rank.poll()]
        asked = [rank for rank in running if rank.ask_where()]
        before: list[str] = []
        for _ in Supervision(_ANSWER_S, pause=_GLANCE_S):  # until all stacks are written, and no longer change
            said = [rank.where() for rank in asked]
            if said == before and SILENT not in said:
                break
            before = said
        lines = [f"all ranks stand still: none has computed for {self._patience:g} s; stopped"]
        return "\n".join([*lines, *(f"rank {rank.number} was at {rank.where()}" for rank in running)])


class _Judge:
    """Declares ranks dead to those that continue without them (stagewright.comm.membership), and restarts some."""

    def __init__(
        self, ranks: list[RankProcess], store: SealedStore, start: Callable[..., RankProcess], restarts: int
    ) -> None:
        self._ranks, self._running = ranks, list(ranks)
        self._judges = False
        self._store, self._start, self._left = store, start, restarts

    def look(self) -> None:
        """Kill ranks that the others believe dead, so that they cannot return, and declare them dead. A killed rank
        ends no other."""
        from ..comm.membership import GOES_ON, LIFE, admitted, dead, silent

        if not self._running or not self._store.check([GOES_ON]):
            return
        self._judges = True
        for rank in self._running[:]:
            me = rank.number, len(rank.lives)
            is_outside = rank.is_spared = bool(rank.lives) and not self._store.check([admitted(*me)])
            others_are_through = all(_over(one) for one in self._ranks if one is not rank)
            if self._store.check([silent(*me)]) or (is_outside and others_are_through):
                rank.kill(signal.SIGKILL)
                rank.process.wait()
            if not rank.poll():
                continue
            was_killed = (rank.process.returncode or 0) < 0 and not rank.done and not rank.failed_by_itself
            rank.is_spared = is_outside or was_killed
            self._store.set(dead(*me), "")
            self._running.remove(rank)
            if was_killed and self._left and not others_are_through:
                self._left -= 1
                rank.close()
                anew = self._start(rank.number, **{LIFE: str(me[1] + 1)})
                anew.lives = [*rank.lives, rank.how_it_ended]
                self._ranks[rank.number] = anew
                self._running.append(anew)

    def someone_failed(self) -> bool:
        """Whether a rank failed without which the others can't continue; not one that died since the last look."""
        return any(
            rank.failed and (rank.failed_by_itself or not self._judges or rank not in self._running)
            for rank in self._ranks
        )


def _see_through(
    ranks: list[RankProcess], judge: _Judge, *, grace: float, timeout: float | None, stall: float | None
) -> LaunchResult:
    watchdog = _Watchdog(ranks, stall)
    for _ in (looks := Supervision(timeout)):
        ended = all_ended(ranks)
        judge.look()  # also at one that was killed as the last one ended
        if ended:
            break
        if not looks.in_grace and watchdog.is_stalled():
            return LaunchResult(status=1, report=watchdog.report())
        if judge.someone_failed() or all(_over(rank) for rank in ranks):
            looks.begin_grace(grace)
    if looks.is_late:
        late = ", ".join(str(rank.number) for rank in ranks if not rank.poll())
        return LaunchResult(status=1, report=f"rank {late}: not done after {timeout:g} s; stopped")
    return _judge(ranks)


def _over(rank: RankProcess) -> bool:
    return rank.done or rank.poll()


def _judge(ranks: list[RankProcess]) -> LaunchResult:
    if all(rank.is_spared for rank in ranks):  # there are no others
        for rank in ranks:
            rank.is_spared = False
    failed = sorted((rank for rank in ranks if rank.failed), key=lambda rank: rank.failed_at)
    if not failed:
        odd = [rank for rank in ranks if rank.process.returncode != 0]
        so = {True: "and the others went on without it", False: "after its results were out"}
        lines = [f"rank {rank.number}: {how} and was started again" for rank in ranks for how in rank.lives]
        errors = [f"; its last line: {_last_line(rank)}" if rank.failed_by_itself else "" for rank in odd]
        lines += [f"rank {r.number}: {r.how_it_ended} {so[r.is_spared]}{e}" for r, e in zip(odd, errors, strict=True)]
        return LaunchResult(status=0, report="\n".join(lines))
    report = _failure_report(ranks, failed)
    return LaunchResult(status=failed[0].status or 1, first_failed=failed[0].number, report=report)


def _failure_report(ranks: list[RankProcess], failed: list[RankProcess]) -> str:
    """The first failed rank and its last lines; those of rank 0 are already on the terminal."""
    last_line = {rank.number: _last_line(rank) for rank in failed}
    if len(failed) == len(ranks) > 1 and len(set(last_line.values())) == 1:
        return f"all {len(ranks)} ranks failed alike ({failed[0].how_it_ended})"
    first, others = failed[0], failed[1:]
    story = [f"rank {first.number} failed first ({first.how_it_ended})"]
    if first.number == 0:
        story[0] += f"; its last line: {last_line[0]}"
    else:
        story += ["its last lines:", *(f"  {line}" for line in list(first.tail)[-_SHOWN:])]
    for rank in others:
        said = last_line[rank.number]
        story.append(f"rank {rank.number} failed after it ({rank.how_it_ended}); its last line: {said}")
    for rank in ranks:
        if rank not in failed and rank.process.returncode is None:
            story.append(f"rank {rank.number} was still running and was stopped")
    return "\n".join(story)


def _last_line(rank: RankProcess) -> str:
    line = next(reversed(rank.last_lines()), "nothing")
    return line.removeprefix(f"[rank{rank.number}]: ")  # torch puts it there, in front of tracebacks


def _variables(*, rank: int, num_ranks: int, port: int, folder: str) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's env:// rendezvous then connects to our store
        "STAGEWRIGHT_JUDGES_DEATHS": folder,  # see stagewright.comm.membership
        _FOLDER_VARIABLE: folder,
    }
    # The user's own settings stay: threads (by default each rank's share of the cores), and gloo's interface.
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_ranks))
    if "GLOO_SOCKET_IFNAME" not in os.environ and loopback():
        variables["GLOO_SOCKET_IFNAME"] = loopback()
    return variables


@contextmanager
def _rendezvous_store(num_ranks: int, secret: str) -> Iterator[SealedStore]:
    """The rendezvous store of the ranks. Unlike rank 0's own it outlives every rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..comm.sealed import SealedStore

    # The store would listen on all interfaces, and accept writes from anyone who reaches its port.
    listening = socket.create_server((_HOST, 0), backlog=128 + num_ranks)
    port = listening.getsockname()[1]
    store = TCPStore(
        _HOST, port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    try:
        yield SealedStore(store, secret)
    finally:
        del store


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt inside, so that ending the launcher ends its ranks."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

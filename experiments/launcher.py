"""Starts N local processes of one command and sees them through: to results, or to the first failure by name.

    launcher ---- TCPStore (rendezvous) ----+
       | stdin (never written: its end says that the launcher died)
       +--> rank 0   stdout: the terminal's own; stderr: passed on, last lines kept
       +--> rank 1   both kept only
       +--> ...      each in a session of its own, so that Ctrl-C reaches the launcher alone

A rank says that it finished, or when it failed, by a file in a folder that the launcher gave it. That
decides, not its exit status: a process may still abort while it is torn down, after its results are out.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from .host import num_cores

_FOLDER_VARIABLE = "STAGEWRIGHT_LAUNCH_FOLDER"
_HOST = "127.0.0.1"
_TAIL_LINES = 30
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """Outcome of a launch.

    Arguments:
        status: exit status for the whole: 0, or that of the first failed rank (128 + its signal if killed).
        first_failed: the rank that failed first, None if none did.
        report: for the user; empty when all is well.
    """

    status: int
    first_failed: int | None
    report: str


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    grace: float = 10.0,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> LaunchResult:
    """Run `command` once a rank on this host, and wait for all of them.

    Each process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as under torchrun, and wraps
    its work in `report_to_launcher()`. Once a rank fails, the others have `grace` to say what they saw, then
    they are ended.

    Arguments:
        command: program and arguments, run without a shell.
        num_ranks: N >= 1.
        grace: [s] from the first failure to the end of the others, and from the last result to the last exit.
        timeout: [s] for the whole; None: no limit.
        environment: variables on top of this process's own.

    Ctrl-C (or SIGTERM) ends all ranks and raises KeyboardInterrupt. Raises ValueError for num_ranks < 1.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: expected at least 1")
    with (
        tempfile.TemporaryDirectory(prefix="stagewright-") as folder,
        _rendezvous_store(num_ranks) as port,
        _sigterm_as_interrupt(),
    ):
        ranks: list[_Rank] = []
        try:
            for rank in range(num_ranks):
                variables = _variables(rank=rank, num_ranks=num_ranks, port=port, folder=folder)
                ranks.append(_Rank.start(command, rank, {**os.environ, **variables, **(environment or {})}, folder))
            return _see_through(ranks, grace=grace, timeout=timeout)
        finally:
            _end(ranks)
            _restore_terminal()


def launch_command(words: Sequence[str], *, num_ranks: int) -> int:
    """Run `stagewright WORDS` once a rank, say how it ended if not well, and return the exit status."""
    # -P: the folder that the user stands in may hold modules with any name.
    result = launch([sys.executable, "-P", "-m", "stagewright", *words], num_ranks=num_ranks)
    if result.report:
        print(result.report, file=sys.stderr)
    return result.status


@contextmanager
def report_to_launcher() -> Iterator[None]:
    """Wrap a rank's work: tells the launcher that it is done, or the moment at which it failed.

    Also ends this process when its launcher is gone. Does nothing in a process that `launch` did not start.
    """
    folder = os.environ.get(_FOLDER_VARIABLE)
    if folder is None:
        yield
        return
    rank = os.environ["RANK"]
    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            Path(folder, f"{rank}.failed").write_text(repr(time.time()))
        raise
    Path(folder, f"{rank}.done").touch()


def _exit_with_launcher() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


@dataclass(slots=True, kw_only=True, eq=False)
class _Rank:
    """One started process and its state."""

    number: int
    process: subprocess.Popen[bytes]
    folder: Path
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    pump: threading.Thread | None = None
    ended_at: float = 0.0

    @classmethod
    def start(cls, command: Sequence[str], number: int, environment: dict[str, str], folder: str) -> _Rank:
        process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=None if number == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE if number == 0 else subprocess.STDOUT,
            start_new_session=True,
        )
        rank = cls(number=number, process=process, folder=Path(folder))
        stream = process.stderr if number == 0 else process.stdout
        assert stream is not None
        echo = _echo_stderr if number == 0 else None
        rank.pump = threading.Thread(target=_pump, args=(stream, rank.tail, echo), daemon=True)
        rank.pump.start()
        return rank

    @property
    def done(self) -> bool:
        """Whether its results are out."""
        return (self.folder / f"{self.number}.done").exists()

    @property
    def failed(self) -> bool:
        """Whether it ended without them, or says that it will: it may yet hang while it is torn down."""
        said_so = (self.folder / f"{self.number}.failed").exists()
        return said_so or (self.process.returncode not in (None, 0) and not self.done)

    @property
    def failed_at(self) -> float:
        """Time of failure by its own account, else when its end was noticed [s, wall clock]."""
        with suppress(OSError, ValueError):
            return float((self.folder / f"{self.number}.failed").read_text())
        return self.ended_at

    @property
    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code is None:
            return "stopped before it had ended"
        return f"exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}"

    def poll(self) -> bool:
        """Whether the process has ended."""
        if self.process.poll() is None:
            return False
        self.ended_at = self.ended_at or time.time()
        return True

    def last_lines(self) -> list[str]:
        """Its last lines, after waiting a moment for its stream to drain."""
        assert self.pump is not None
        self.pump.join(timeout=1.0)
        return list(self.tail)

    def kill(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _see_through(ranks: list[_Rank], *, grace: float, timeout: float | None) -> LaunchResult:
    """Poll until all have ended, or until the grace after a failure or after the last result is over."""
    started = time.monotonic()
    overdue_at = None if timeout is None else started + timeout
    grace_until: float | None = None
    while not _all_ended(ranks):
        now = time.monotonic()
        if overdue_at is not None and now > overdue_at and grace_until is None:
            late = ", ".join(str(rank.number) for rank in ranks if not rank.poll())
            return LaunchResult(
                status=1, first_failed=None, report=f"rank {late}: not done after {timeout:g} s; stopped"
            )
        if grace_until is None and (any(rank.failed for rank in ranks) or all(_over(rank) for rank in ranks)):
            grace_until = now + grace
        if grace_until is not None and now > grace_until:
            break
        time.sleep(_POLL_S)
    return _judge(ranks)


def _all_ended(ranks: list[_Rank]) -> bool:
    ended = [rank.poll() for rank in ranks]  # each one, so that the first to end is noted first
    return all(ended)


def _over(rank: _Rank) -> bool:
    return rank.done or rank.poll()


def _judge(ranks: list[_Rank]) -> LaunchResult:
    failed = sorted((rank for rank in ranks if rank.failed), key=lambda rank: rank.failed_at)
    if not failed:
        odd = [rank for rank in ranks if rank.process.returncode != 0]
        report = "\n".join(f"rank {rank.number}: {rank.how_it_ended} after its results were out" for rank in odd)
        return LaunchResult(status=0, first_failed=None, report=report)
    status = failed[0].process.returncode or 1
    return LaunchResult(
        status=status if status > 0 else 128 - status,
        first_failed=failed[0].number,
        report=_failure_report(ranks, failed),
    )


def _failure_report(ranks: list[_Rank], failed: list[_Rank]) -> str:
    """The first rank that failed and its last lines; rank 0's lines went to the terminal already."""
    last_line = {rank.number: _last_line(rank) for rank in failed}
    if len(failed) == len(ranks) > 1 and len(set(last_line.values())) == 1:
        return f"all {len(ranks)} ranks failed alike ({failed[0].how_it_ended})"
    first, others = failed[0], failed[1:]
    story = [f"rank {first.number} failed first ({first.how_it_ended})"]
    if first.number == 0:
        story[0] += f"; its last line: {last_line[0]}"
    else:
        story += ["its last lines:", *(f"  {line}" for line in first.tail)]
    for rank in others:
        said = last_line[rank.number]
        story.append(f"rank {rank.number} failed after it ({rank.how_it_ended}); its last line: {said}")
    for rank in ranks:
        if rank not in failed and rank.process.returncode is None:
            story.append(f"rank {rank.number} was still running and was stopped")
    return "\n".join(story)


def _last_line(rank: _Rank) -> str:
    line = next(reversed(rank.last_lines()), "nothing")
    return line.removeprefix(f"[rank{rank.number}]: ")  # torch puts it there, in front of tracebacks


def _end(ranks: list[_Rank]) -> None:
    """End what still runs: asked first, then not."""
    for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        running = [rank for rank in ranks if not rank.poll()]
        for rank in running:
            rank.kill(number)
        until = time.monotonic() + patience
        while not _all_ended(running) and time.monotonic() < until:
            time.sleep(_POLL_S)
    for rank in ranks:
        rank.last_lines()  # joins the thread that reads the stream
        for stream in (rank.process.stdin, rank.process.stdout, rank.process.stderr):
            if stream is not None and (rank.pump is None or not rank.pump.is_alive()):
                stream.close()


def _restore_terminal() -> None:
    """Show the cursor, which a progress bar that was ended from outside has left hidden."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


def _variables(*, rank: int, num_ranks: int, port: int, folder: str) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's env:// rendezvous then connects to our store
        _FOLDER_VARIABLE: folder,
    }
    # What the user has set stays: threads (each rank its share of the cores), and gloo's interface.
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_ranks))
    if "GLOO_SOCKET_IFNAME" not in os.environ and "lo" in (name for _, name in socket.if_nameindex()):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables


@contextmanager
def _rendezvous_store(num_ranks: int) -> Iterator[int]:
    """Host the store at which the ranks meet; yields its port. Unlike rank 0's own it outlives every rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # By itself the store listens on all interfaces, and whoever reaches its port may write into it.
    listening = socket.create_server((_HOST, 0), backlog=128 + num_ranks)
    port = listening.getsockname()[1]
    store = TCPStore(
        _HOST, port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    try:
        yield store.port
    finally:
        del store


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A polite kill of the launcher ends the ranks, too."""

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


def _pump(stream: IO[bytes], tail: deque[str], echo: Callable[[bytes], None] | None) -> None:
    for line in stream:
        if echo is not None:
            echo(line)
        tail.append(line.decode(errors="replace").rstrip())


def _echo_stderr(line: bytes) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

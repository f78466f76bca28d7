"""One process that the launcher started: what it said, how it ended, where it stands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

WHERE = signal.SIGUSR1  # asks a rank where it stands
SILENT = "it does not say where"
_TAIL_LINES = 30
_FRAMES = 4  # of a stack, in a report


@dataclass(slots=True, kw_only=True, eq=False)
class RankProcess:
    """One started process and its state."""

    number: int
    process: subprocess.Popen[bytes]
    folder: Path
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    pump: threading.Thread | None = None
    ended_at: float = 0.0
    is_spared: bool = False  # it was killed, or is not let in again yet, and the others go on without it
    lives: list[str] = field(default_factory=list)  # how those before it ended, which it was started again for

    @classmethod
    def start(cls, command: Sequence[str], number: int, environment: dict[str, str], folder: str) -> RankProcess:
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
        return (self.folder / f"{self.number}.done").exists()

    @property
    def failed(self) -> bool:
        """Whether it ended without them, or says that it will: it may yet hang while it is torn down."""
        ended_badly = self.process.returncode not in (None, 0) and not self.done
        return (self.failed_by_itself or ended_badly or self._left) and not self.is_spared

    @property
    def _left(self) -> bool:
        """Whether it ended as if all were well, within the work that it had begun."""
        return self.process.returncode == 0 and not self.done and self._has_begun

    @property
    def _has_begun(self) -> bool:
        return (self.folder / f"{self.number}.stack").exists()

    @property
    def failed_by_itself(self) -> bool:
        return (self.folder / f"{self.number}.failed").exists()

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
        if self._left:
            return "exit status 0 before its work was done"
        return f"exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}"

    def poll(self) -> bool:
        """Whether the process has ended."""
        if self.process.poll() is None:
            return False
        if not self.ended_at:
            self.ended_at = time.time()
            if self.process.returncode < 0:
                self.kill(signal.SIGKILL)  # children that it had no time to end
        return True

    def computing(self) -> tuple[float, bool]:
        """Seconds of a core that it has taken so far, and whether it wants one; 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0, False
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] in "RD"  # utime and stime

    def ask_where(self) -> bool:
        """Ask it to write down where it stands, if it has said that it will."""
        if not self._has_begun:
            return False
        self.process.send_signal(WHERE)
        return True

    def where(self) -> str:
        """The main thread's stack when it was asked, the innermost call first."""
        with suppress(OSError):
            *_, main = (self.folder / f"{self.number}.stack").read_text().split("most recent call first")
            calls = re.findall(r'File "(.*)", line (\d+) in (.*)', main)[:_FRAMES]
            if calls:
                return ", called from ".join(
                    f"{'/'.join(Path(f).parts[-2:])}:{line} in {name}" for f, line, name in calls
                )
        return SILENT

    def last_lines(self) -> list[str]:
        """Its last lines, after waiting a moment for its stream to drain."""
        assert self.pump is not None
        self.pump.join(timeout=1.0)
        return list(self.tail)

    def close(self) -> None:
        """Give its streams back, behind its end."""
        self.last_lines()  # joins the thread that reads the stream
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and (self.pump is None or not self.pump.is_alive()):
                stream.close()

    def kill(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _pump(stream: IO[bytes], tail: deque[str], echo: Callable[[bytes], None] | None) -> None:
    for line in stream:
        if echo is not None:
            echo(line)
        tail.append(line.decode(errors="replace").rstrip())


def _echo_stderr(line: bytes) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, or none
        if hasattr(sys.stderr, "buffer"):
            sys.stderr.buffer.write(line)
        else:  # a notebook's
            sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

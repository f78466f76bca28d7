"""One process of the launcher: its last lines, its end, its stack when asked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .processes import Process

WHERE = signal.SIGUSR1  # asks a rank for its stack
SILENT = "it does not say where"
_FRAMES = 4  # of a stack, in a report


@dataclass(slots=True, kw_only=True, eq=False)
class RankProcess(Process):
    """The process of rank `number`, N. It reports in files of `folder`: N.stack (it has begun), N.done, N.failed."""

    number: int
    folder: Path
    is_spared: bool = False  # it was killed, or is not admitted again yet, and the others continue without it
    lives: list[str] = field(default_factory=list)  # how its predecessors on this rank ended

    @classmethod
    def start(cls, command: Sequence[str], number: int, environment: dict[str, str], folder: str) -> RankProcess:
        pipe = subprocess.PIPE
        out, err = (None, pipe) if number == 0 else (pipe, subprocess.STDOUT)
        rank = cls.begin(command, environment, out=out, err=err, number=number, folder=Path(folder))
        rank.read(rank.process.stdout or rank.process.stderr, rank._hear)
        return rank

    def _hear(self, stream: IO[bytes]) -> None:
        for line in stream:
            if self.number == 0:
                _echo_stderr(line)
            self.keep(line)

    @property
    def done(self) -> bool:
        return (self.folder / f"{self.number}.done").exists()

    @property
    def failed(self) -> bool:
        """Whether it ended without results, or reported a failure: it may still hang during teardown."""
        ended_badly = self.process.returncode not in (None, 0) and not self.done
        return (self.failed_by_itself or ended_badly or self._left) and not self.is_spared

    @property
    def _left(self) -> bool:
        """Whether it exited with status 0 before the end of its work."""
        return self.process.returncode == 0 and not self.done and self._has_begun

    @property
    def _has_begun(self) -> bool:
        return (self.folder / f"{self.number}.stack").exists()

    @property
    def failed_by_itself(self) -> bool:
        return (self.folder / f"{self.number}.failed").exists()

    @property
    def failed_at(self) -> float:
        """Time of failure that it reported, else when its end was noticed [s, wall clock]."""
        with suppress(OSError, ValueError):
            return float((self.folder / f"{self.number}.failed").read_text())
        return self.ended_at

    @property
    def how_it_ended(self) -> str:
        end = super(RankProcess, self).how_it_ended  # the dataclass is another class than the one here
        return f"{end} before its work was done" if self._left else end

    def computing(self) -> tuple[float, bool]:
        """CPU time used so far [s], and whether it wants a core; 0 and False on systems without /proc."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0, False
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] in "RD"  # utime and stime

    def ask_where(self) -> bool:
        """Ask it for its stack, once it is inside `report_to_launcher`. Returns whether it was asked."""
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


def _echo_stderr(line: bytes) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, or none
        if hasattr(sys.stderr, "buffer"):
            sys.stderr.buffer.write(line)
        else:  # a notebook's
            sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()

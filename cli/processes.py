"""Processes that this one starts, each in its own session: their output, their exit status, and their end.

Process.begin --> poll, poll, ... --> end([...])     SIGTERM to each session, then SIGKILL, then its streams
in the process itself: die_with_parent, exit_with_stdin
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self

POLL = 0.02  # [s] between looks at what runs
_TAIL = 200  # lines that are remembered
_DRAIN = 1.0  # [s] to read a process's output after its end
_LIBC = ctypes.CDLL(None)
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One started process, and its last lines if a thread reads them."""

    process: subprocess.Popen[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL))
    readers: list[threading.Thread] = field(default_factory=list)
    ended_at: float = 0.0  # when its end was noticed [s, wall clock]

    @classmethod
    def begin(cls, command: Sequence[str], env: Mapping[str, str] | None, *, out: Any, err: Any, **own: Any) -> Self:
        """Start it. Its stdin stays open until this process ends or closes it.

        Arguments:
            env: its variables; None: this process's own.
            out, err: as for subprocess.Popen.
            own: the fields of a subclass.
        """
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=out, stderr=err, start_new_session=True)
        return cls(process=process, **own)

    def read(self, stream: IO[bytes] | None, reader: Callable[[IO[bytes]], object]) -> None:
        """Read one of its streams in a thread."""
        self.readers.append(threading.Thread(target=reader, args=(stream,), daemon=True))
        self.readers[-1].start()

    def keep(self, line: bytes) -> None:
        self.tail.append(line.decode(errors="replace").rstrip())

    def poll(self) -> bool:
        if self.process.poll() is None:
            return False
        if not self.ended_at:
            self.ended_at = time.time()
            if self.process.returncode < 0:
                self.kill(signal.SIGKILL)  # children that it had no time to end
        return True

    @property
    def status(self) -> int:
        """Exit status after its end; 128 + the signal if one killed it."""
        code: int = self.process.returncode
        return code if code >= 0 else 128 - code

    def last_lines(self) -> list[str]:
        """Its last lines, after waiting a moment for its streams to drain."""
        for reader in self.readers:
            reader.join(timeout=_DRAIN)
        return list(self.tail)

    def kill(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Close its streams, after its end; each stream ends with the last process that may write to it."""
        self.last_lines()
        is_read = any(reader.is_alive() for reader in self.readers)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not is_read:
                with suppress(OSError):
                    stream.close()


def all_ended(processes: Sequence[Process]) -> bool:
    ended = [process.poll() for process in processes]  # each one, so that the first to end is noted first
    return all(ended)


def await_end(processes: Sequence[Process], seconds: float) -> bool:
    """Wait for all to end, at most so long. Returns whether they have."""
    until = time.monotonic() + seconds
    while not (ended := all_ended(processes)) and time.monotonic() < until:
        time.sleep(POLL)
    return ended


def end(processes: Sequence[Process], *, patience: float = 3.0) -> None:
    """End running processes by SIGTERM, then by SIGKILL, with `patience` [s] for each."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if not process.poll():
                process.kill(number)
        await_end(processes, patience)
    for process in processes:
        process.close()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have Linux send this process the signal when its parent ends, even while it is stopped."""
    with suppress(OSError, AttributeError):
        _LIBC.prctl(_PARENT_DEATH, number)


def exit_with_stdin() -> None:
    """End this process when its standard input closes: its parent is gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

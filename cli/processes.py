"""Processes that this one starts, each in its own session: their output, their exit status, and their end.

Process.begin --> poll at each look of a Supervision --> end      SIGTERM to each session, then SIGKILL
                                                         let_go   the end of its stdin, then the same
in the process itself: die_with_parent, exit_with_stdin
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self

_POLL = 0.02  # [s] between looks at what runs
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
        """Start it. Its stdin stays open until this process ends or closes it. `own`: the fields of a subclass."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=out, stderr=err, start_new_session=True)
        return cls(process=process, **own)

    def read(self, stream: IO[bytes] | None, reader: Callable[[IO[bytes]], object]) -> None:
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
    def status(self) -> int | None:
        """Exit status once its end was noticed, else None; 128 + the signal if one killed it."""
        code: int | None = self.process.returncode
        return code if code is None or code >= 0 else 128 - code

    @property
    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code is None:
            return "stopped before it had ended"
        if code >= 0:
            return f"exit status {code}"
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

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


class Supervision:
    """Looks at what runs, every `pause` [s], until `limit` [s] have passed (None: no limit).

        for _ in (looks := Supervision(limit)):
            if all_ended(processes):
                break
            if any(process.status for process in processes):
                looks.begin_grace(10.0)      for the others
        looks.is_late                        neither was the case within the limit

    There is one more look after the limit or the grace.
    """

    def __init__(self, limit: float | None, *, pause: float = _POLL) -> None:
        self._until = math.inf if limit is None else time.monotonic() + limit
        self._pause = pause
        self.in_grace = self.is_late = False

    def __iter__(self) -> Iterator[None]:
        while True:
            now = time.monotonic()
            yield
            if now >= self._until:
                self.is_late = not self.in_grace
                return
            time.sleep(self._pause)

    def begin_grace(self, seconds: float) -> None:
        """Look for so long from now on, without the limit; later calls change nothing."""
        if not self.in_grace:
            self.in_grace, self._until = True, time.monotonic() + seconds


def all_ended(processes: Sequence[Process]) -> bool:
    ended = [process.poll() for process in processes]  # each one, so that the first to end is noted first
    return all(ended)


def _await_end(processes: Sequence[Process], seconds: float) -> None:
    for _ in Supervision(seconds):
        if all_ended(processes):
            return


def end(processes: Sequence[Process], *, patience: float = 3.0) -> None:
    """End running processes by SIGTERM, then by SIGKILL, with `patience` [s] for each."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if not process.poll():
                process.kill(number)
        _await_end(processes, patience)
    for process in processes:
        process.close()


def let_go(processes: Sequence[Process], *, patience: float) -> None:
    """End processes that end when their stdin closes; by `end` those that haven't after `patience` [s]."""
    for process in processes:
        assert process.process.stdin is not None
        with suppress(OSError):
            process.process.stdin.close()
    _await_end(processes, patience)
    end(processes)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have Linux send this process the signal when its parent ends, even while it is stopped."""
    with suppress(OSError, AttributeError):
        _LIBC.prctl(_PARENT_DEATH, number)


def exit_with_stdin(leave: Callable[[], object] = lambda: os._exit(1), *, silence: float = 0.0) -> None:
    """Call `leave` when standard input closes, or is silent for `silence` [s] (0: no limit): the parent is gone."""

    def wait() -> None:
        while select.select([0], [], [], silence or None)[0] and os.read(0, 4096):
            pass
        leave()

    threading.Thread(target=wait, daemon=True).start()

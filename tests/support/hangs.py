"""Waits for ranks until they hang: all of them sleep, and compute no more than gloo's idle threads do.

A busy machine makes nobody hang: a process that waits for a core does not sleep, and while none is let run, this one
neither, hardly any time counts. Ranks that hang write down where each of their threads is.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TextIO

IDLE = 30.0  # [s] for which the ranks of a case may do nothing
_LOOKS = 30  # in that time; between two of them twice the usual time counts at most
_SHARE = 0.05  # of a core, in one process: gloo's threads wake up often, and take 0.01 where there is a pipeline
_ANSWER = 10.0  # [s] for a process to write its stacks and end


class Watch:
    """Waits for the answers of processes (of multiprocessing), for `limit` [s] at most."""

    def __init__(self, processes: Sequence[Any], *, limit: float, idle: float = IDLE) -> None:
        self._pids = [process.pid for process in processes]
        self._limit, self._idle = limit, idle
        self._looked = time.monotonic()
        self._until = self._looked + limit
        self._slept, self._spent = 0.0, dict[int, float]()
        self.why = ""  # it gave up

    def hasten(self, seconds: float) -> None:
        """So much time is left from now on, at most."""
        self._until = min(self._until, time.monotonic() + seconds)

    def wait(self, connections: Sequence[Any]) -> list[Any]:
        """Those that can be read from; none once the processes hang or time is up."""
        while not (ready := wait(connections, timeout=self._next_look())):
            if self._look() > self._idle:
                self.why = f"no rank has computed for {self._idle:g} s"
            elif time.monotonic() >= self._until:
                self.why = f"not done after {self._limit:g} s, or shortly after another rank had failed"
            if self.why:
                break
        return ready

    def _next_look(self) -> float:
        return max(0.0, min(self._idle / _LOOKS, self._until - time.monotonic()))

    def _look(self) -> float:
        """[s] for which all have slept, but for short moments."""
        now, processes = time.monotonic(), below(self._pids)
        spent = {pid: seconds for pid, (_, seconds) in processes.items()}
        enough = _SHARE * self._idle
        if spent.keys() != self._spent.keys() or any(spent[pid] - self._spent[pid] > enough for pid in spent):
            self._slept, self._spent = 0.0, spent
        elif not any(state in "RD" for state, _ in processes.values()):
            self._slept += min(now - self._looked, 2 * self._idle / _LOOKS)
        self._looked = now
        return self._slept if processes else 0.0  # there is no /proc


def write_stacks_when_asked(to: TextIO) -> None:
    """This process ends when `end_with_stacks` asks it where it is."""
    faulthandler.register(signal.SIGUSR1, file=to, all_threads=True, chain=True)  # SIGUSR1's own effect: the end


def end_with_stacks(processes: Sequence[Any]) -> None:
    """Each process writes where its threads are, and ends; one that is stopped does neither."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    until = time.monotonic() + _ANSWER
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def below(pids: Sequence[int]) -> dict[int, tuple[str, float]]:
    """State and CPU seconds of these processes and of all below them, ended children of each included."""
    stats = dict(_stats())
    found = {pid for pid in pids if pid in stats}
    while more := {pid for pid, (_, parent, *_) in stats.items() if int(parent) in found} - found:
        found |= more
    tick = os.sysconf("SC_CLK_TCK")
    return {pid: (stats[pid][0], sum(map(int, stats[pid][11:15])) / tick) for pid in found}


def _stats() -> Iterator[tuple[int, list[str]]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()

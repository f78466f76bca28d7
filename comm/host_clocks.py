"""Clocks of the hosts of a run, compared with that of process 0's host by the quickest of a few pings.

    host a: 0 1 2 3      4 pings 0, 8 pings 0, ... all at the same time; 0 answers each ping with its time
    host b: 4 5 6 7      the other processes of a host share its clock, and get the reading of its first process
    host c: 8 9 10 11

Processes of one machine need no ping: monotonic time is the kernel's, also across network namespaces and containers.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ..schedules.traces.clocks import ClockReading, Ping, offset_at, read_clock
from .collectives import Collectives
from .process_group import break_group

_PINGS = 10
_LEAST_PINGS = 3
_ENOUGH = 0.3  # [s] after which few pings are made: hosts are far apart, or many
_KEPT = 256  # readings
_CPU = torch.device("cpu")


def machine() -> str:
    """Identifies the monotonic clock of this process: the kernel's boot, and its time namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with suppress(OSError):
            boot += "/" + os.readlink("/proc/self/ns/time")
        return boot
    return socket.gethostname()


class HostClocks:
    """Offset of this process's clock from that of process 0's host."""

    def __init__(self, collectives: Collectives, *, now: Callable[[], float], machine: str) -> None:
        self._collectives = collectives
        self._now = now  # this process's clock [s]
        self._machine = machine  # see the function; processes with equal ones share a clock
        self.machines: tuple[str, ...] = ()  # [size] of all processes, after the first comparison
        # Of this process's clock, the newest last; none where it is that of process 0's host.
        self.readings: deque[ClockReading] = deque(maxlen=_KEPT)
        self._group: dist.ProcessGroup | None = None
        self._leaders: list[int] = []  # the first process of each machine

    def compare(self) -> None:
        """Read the clocks of all hosts. Collective over the processes; takes some round trips to the furthest host."""
        if not self.machines:
            self._find_machines()
        if len(self._leaders) < 2:
            return
        mine, what = None, "comparing the clocks of hosts"
        if self._collectives.rank in self._leaders:
            mine = self._collectives.groups.as_one(self._ping, what=what, processes=self._leaders)
        found = self._collectives.gather(mine, what=what)
        reading = found[self.machines.index(self.machines[self._collectives.rank])]
        if reading is not None:
            self.readings.append(reading)

    def offset_at(self, at: float) -> tuple[float, float]:
        """Seconds to add to a time of this clock for that of process 0's host, and the most they may be wrong by."""
        return offset_at(tuple(self.readings), at)

    def abort(self) -> None:
        if self._group is not None:
            break_group(self._group, _CPU)

    def _find_machines(self) -> None:
        self.machines = tuple(self._collectives.gather(self._machine, what="asking for the hosts"))
        self._leaders = sorted({self.machines.index(each) for each in self.machines})
        if len(self._leaders) > 1:
            (group,) = self._collectives.groups.make(self._leaders, backend="gloo")
            if self._collectives.rank in self._leaders:
                self._group = group

    def _ping(self) -> ClockReading | None:
        """A reading; of process 0, which answers the others, None."""
        assert self._group is not None
        word = torch.zeros(1, dtype=torch.float64, device=_CPU)  # whether it is the last; then the time
        if self._collectives.rank == 0:
            asking = len(self._leaders) - 1
            while asking:
                asker = dist.recv(word, group=self._group)
                asking -= int(word.item())
                word[0] = self._now()
                dist.send(word, asker, group=self._group)
            return None
        pings: list[Ping] = []
        is_last = False
        while not is_last:
            took = pings[-1][2] - pings[0][0] if pings else 0.0
            is_last = len(pings) + 1 >= (_LEAST_PINGS if took > _ENOUGH else _PINGS)
            word[0] = float(is_last)
            sent = self._now()
            dist.send(word, 0, group=self._group)
            dist.recv(word, 0, group=self._group)
            pings.append((sent, word.item(), self._now()))
        return read_clock(pings)

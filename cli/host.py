"""This machine's cores, processor and memory, and the process's share of them."""

from __future__ import annotations

import os
import platform
import random
import resource
import socket
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PORTS = range(10_240, 20_000)  # below those that systems give to connections of their own choice
_TRIES = 20  # draws per port of the range


def free_ports(count: int, *, host: str = "", among: range = PORTS) -> list[int]:
    """Free TCP ports of this host, from a range that the system never assigns on its own, since it could give one of
    its choice to another connection before it is used; `among`: distinct for processes that ask at the same moment.

    Raises OSError for fewer free ports.
    """
    draw, found = random.SystemRandom(), list[int]()
    for _ in range(_TRIES * len(among)):
        if len(found) == count:
            return found
        port = draw.choice(among)
        if port not in found:
            with suppress(OSError), socket.create_server((host, port)):
                found.append(port)
    raise OSError(f"{len(found)} free ports from {among.start} to {among.stop - 1}: expected {count}")


def loopback() -> str:
    """Name of the loopback interface on Linux, else empty."""
    return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else ""


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_versions(*names: str) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far [bytes]."""
    # unlike ru_maxrss, VmHWM does not begin with what the starting process had
    unit = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss depends on the system
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MemoryMeter:
    """Peak resident memory of this process above that at the meter's creation [bytes]; 0 without /proc/self/status."""

    def __init__(self) -> None:
        self.forget_peak()  # that of importing torch and reading the corpus
        self.at_start = _status_bytes("VmRSS")

    def forget_peak(self) -> None:
        """Count from now on; without permission, the peak includes earlier memory."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return max(0, _status_bytes("VmHWM") - self.at_start)


def _status_bytes(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)

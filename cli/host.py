"""This machine, and what the process takes of it: cores, processor, resident memory."""

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
_TRIES = 20  # a port of them that is taken is drawn again


def free_ports(count: int, *, host: str = "", among: range = PORTS) -> list[int]:
    """TCP ports that nobody of this host listens at, nor gets without asking for them by number.

    One that the system chooses may be given to any connection before it is used.

    Arguments:
        host: the address; empty: all of them.
        among: which, so that processes that ask at the same moment get others.

    Raises OSError where there are not so many.
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
    """The interface through which processes of this host reach each other; empty where it is not named as on Linux."""
    return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else ""


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_bytes() -> int:
    """Memory of this machine [bytes]."""
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
    """Peak resident memory of this process above what stands when the meter is made [bytes].

    Reads /proc/self/status; 0 on systems without it.
    """

    def __init__(self) -> None:
        self.forget_peak()  # that of importing torch and reading the corpus
        self.at_start = _status_bytes("VmRSS")

    def forget_peak(self) -> None:
        """Count from now on; where that may not be, the peak counts what came before as well."""
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

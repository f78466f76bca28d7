"""Connections and locks that children do not inherit: they end with the last process that has them, and a DataLoader
worker that outlives a rank would hide its death. A forked child closes them here, one that runs another program has
them closed by the system.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_OPEN = "/proc/self/fd"  # on Linux; elsewhere children inherit everything
_kept: dict[int, str] = {}  # targets by descriptor, whose number may be reused later


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Context whose TCP connections, made on any thread or accepted later, children do not inherit."""
    before = _connections()
    try:
        yield
    finally:
        for descriptor, place in _connections().items():
            if before.get(descriptor) != place:
                keep_from_children(descriptor)


def keep_from_children(descriptor: int) -> None:
    with suppress(OSError):
        _kept[descriptor] = os.readlink(f"{_OPEN}/{descriptor}")
        os.set_inheritable(descriptor, False)


def _target(descriptor: int) -> str:
    with suppress(OSError):
        return os.readlink(f"{_OPEN}/{descriptor}")
    return ""


def _connections() -> dict[int, tuple[str, int]]:
    """TCP sockets by descriptor: the target and the local port."""
    found = {}
    for descriptor in map(int, os.listdir(_OPEN) if os.path.isdir(_OPEN) else ()):
        if (target := _target(descriptor)).startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    found[descriptor] = target, one.getsockname()[1]
    return found


def _let_go() -> None:
    """Release connections in a child. Its objects may close these numbers later: they are kept open on /dev/null."""
    nothing, there = os.open(os.devnull, os.O_RDWR), _connections()
    still = {descriptor for descriptor, target in _kept.items() if _target(descriptor) == target}
    accepting = {there[descriptor][1] for descriptor in still & there.keys()}
    for descriptor in still | {one for one, (_, port) in there.items() if port in accepting}:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _kept.clear()


os.register_at_fork(after_in_child=_let_go)

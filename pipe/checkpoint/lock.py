"""Lock of a folder for writing: one process holds it until it releases it or ends in any way."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

_NAME = ".writer"
_PATIENCE = 5.0  # [s] for a process that was killed to be gone
_POLL = 0.1  # [s]


class FolderLock:
    """A POSIX lock, which the operating system releases when the process ends, killed or not.

    Forked children do not hold it, and it works on most network file systems. The first holder in a process holds it
    for all. Raises ValueError with number and host of another process that holds it.
    """

    def __init__(self, folder: Path, *, patience: float = _PATIENCE) -> None:
        self._key: str | None = None
        if fcntl is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        key = os.path.realpath(folder)
        if key not in _held:
            _held[key] = _locked(folder, patience)
            self._key = key

    @property
    def is_first(self) -> bool:
        return fcntl is None or self._key is not None

    def release(self) -> None:
        if self._key is not None:
            os.close(_held.pop(self._key))  # which unlocks
            self._key = None


def refuse_other_writer(folder: Path) -> None:
    if (folder / _NAME).is_file():
        FolderLock(folder).release()


_held: dict[str, int] = {}  # descriptor by folder: closing any other descriptor of its file would unlock it


def _locked(folder: Path, patience: float) -> int:
    descriptor = _opened(folder / _NAME)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system without locks
                break
            if time.monotonic() > until:
                holder = _holder(descriptor)
                os.close(descriptor)
                raise ValueError(
                    f"{folder} is being written by another run{holder}: expected a folder for each run, or wait "
                    f"until that one has ended"
                ) from None
        time.sleep(_POLL)
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return descriptor


def _opened(path: Path) -> int:
    """Opens the file itself for writing, never what a symbolic or hard link points to."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise ValueError(f"{path} is a link, or not a regular file: expected it to be removed")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _holder(descriptor: int) -> str:
    try:
        known = json.loads(os.pread(descriptor, 4096, 0))
        return f" (process {known['process']} on {known['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""

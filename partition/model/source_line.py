"""Where in the user's own code an error came from, and how errors name modules."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np
import torch

_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
_PACKAGE = str(Path(__file__).absolute().parents[2])
_OURS = tuple(os.path.join(_PACKAGE, part) + os.sep for part in ("partition", "pipe", "comm", "schedules"))
_WHOLE = "STAGEWRIGHT_TRACEBACK"
_NOT_THE_USERS = (*_OURS, *(str(Path(str(library.__file__)).absolute().parent) + os.sep for library in (torch, np)))


def users_line(error: BaseException) -> str:
    """' at file:line, in function: `code`' of the innermost frame of the user's own, or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f" at {frame.filename}:{frame.lineno}, in {frame.name}: `{frame.line}`"
    return ""


def fold(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        _fold(error)
        error = error.__cause__


def _fold(error: BaseException) -> None:
    """Take this package's frames out of a traceback that leads through them into the user's own code; a note says so.

    Where the innermost code is not the user's, all frames stay: they may be what is at fault.
    """
    left, frames = 0, [*_entries(error.__traceback__)]
    users = [at for at, entry in enumerate(frames) if is_users(entry.tb_frame.f_code.co_filename)]
    found: TracebackType | None = None
    for at, entry in reversed([*enumerate(frames)]):
        if users and at < users[-1] and is_ours(entry.tb_frame.f_code.co_filename):
            left += 1
        else:
            line = -1 if entry.tb_lineno is None else entry.tb_lineno  # None: generated code, as by dynamo
            found = TracebackType(found, entry.tb_frame, entry.tb_lasti, line)
    if left and os.environ.get(_WHOLE) != "full":
        error.__traceback__ = found
        note = f"({left} frames of stagewright are left out above; {_WHOLE}=full shows them)"
        if note not in getattr(error, "__notes__", ()):  # one error may be raised again and again
            error.add_note(note)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def line_now() -> str:
    """' at file:line, in function' of the user's own code that runs, or nothing."""
    return line_of(sys._getframe(1))


def line_of(frame: FrameType | None) -> str:
    """The same, from a frame outwards."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return f" at {name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def is_ours(filename: str) -> bool:
    """Whether the code of this file runs models; examples are as a user's."""
    return os.path.abspath(filename).startswith(_OURS)


@cache  # asked of each frame around each call that is recorded
def is_users(filename: str) -> bool:
    path = os.path.abspath(filename)
    return not (filename.startswith("<") or path.startswith(_NOT_THE_USERS) or _is_standard_library(path))


@cache
def is_users_module(module: str | None) -> bool:
    """Whether what is defined in this Python module is the user's own."""
    top = (module or "").partition(".")[0]
    if top == __name__.partition(".")[0] or top in sys.stdlib_module_names:
        return False
    path = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return not any(library in path for library in _LIBRARIES)


def first_line(error: BaseException) -> str:
    """The error's type and the beginning of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}".rstrip(". ")


def module_at(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def _is_standard_library(path: str) -> bool:
    library = sysconfig.get_path("stdlib") + os.sep
    return path.startswith(library) and not path.startswith(os.path.join(library, "site-packages"))

"""Files that a command's options name: ValueError for what cannot be read or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def read_file(path: Path, read: Callable[[Path], T]) -> T:
    """The file as `read` returns it."""
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}: expected a file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text at byte {error.start}: expected a text file") from None


def write_out(path: Path, text: str) -> None:
    """Write what --out asks for."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out {path}: cannot write: {error.strerror or error}: expected a file in a folder that exists and may "
            f"be written to"
        ) from None


def check_out(option: str, path: Path) -> None:
    """Raise ValueError, before any work, for a file in no folder."""
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: cannot write: expected a file in a folder that exists")

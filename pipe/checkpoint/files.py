"""Checkpoints on a disk: written alongside the last one, switched by an atomic rename, found again.

    folder/                        of pipe.save(folder) and pipe.load(folder)
      latest                       name of the newest whole checkpoint
      step-8-3f9c21ab/             a checkpoint; the one before it is kept, too, and any of another run
        checkpoint.json            see `manifest`
        process-0.safetensors ...  what each process wrote
      step-9-70d2b1aa.partial/     one that is being written, or was never completed

Each file and folder is flushed to the disk before `latest` names it, so that a kill at any moment leaves a whole
checkpoint.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .manifest import FileRecord, Manifest
from .tensor_file import Entry, write_tensors

MANIFEST = "checkpoint.json"
MANIFEST_LIMIT = 2**30  # [bytes]

_LATEST = "latest"
_LATEST_LIMIT = 1024  # [bytes]
_PARTIAL = ".partial"
_NAME = re.compile(r"step-\d+-[0-9a-f]{8}")


def new_name(step: int) -> str:
    return f"step-{step}-{secrets.token_hex(4)}"


def checked_name(name: str) -> str:
    """The name; ValueError if it cannot be that of a checkpoint, as a path cannot."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.80} is not the name of a checkpoint")
    return name


def begin(folder: Path, name: str) -> None:
    """Makes the folder in which the checkpoint `name` is written. Raises ValueError if `folder` is a file."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a folder, an existing or a new one, to save checkpoints in")
    _partial(folder, name).mkdir(parents=True)


def is_begun(folder: Path, name: str) -> bool:
    return _partial(folder, name).is_dir()


def write_file(folder: Path, name: str, file_name: str, entries: Sequence[Entry]) -> tuple[FileRecord, dict[str, str]]:
    with flushed(_partial(folder, name) / file_name) as file:
        written = write_tensors(file, entries, {"checkpoint": name})
    _flush_folder(_partial(folder, name))
    return written


class OwnCheckpoints:
    """Names of the checkpoints of one run: those that it began to save, and those of the folders that it loaded from.

    A save removes only these: two runs that save into one folder by mistake must not remove each other's.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}  # in order

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def begin(self, name: str) -> None:
        self._names[name] = None

    def adopt(self, place: Path) -> None:
        names = {each.name.removesuffix(_PARTIAL) for each in place.parent.iterdir()}
        latest = latest_name(place.parent)
        for name in sorted(filter(_NAME.fullmatch, names), key=lambda name: (name == latest, step_of(name))):
            self._names.pop(name, None)
            self._names[name] = None

    def older(self, folder: Path, name: str) -> list[str]:
        """Names in `folder` that `name` replaces: all but the last whole one."""
        others = [each for each in self._names if each != name and _places(folder, each)]
        whole = [each for each in others if (folder / each / MANIFEST).exists()]
        return [each for each in others if each not in whole[-1:]]


def complete(folder: Path, manifest: Manifest, own: OwnCheckpoints) -> str:
    """Writes the manifest, makes this checkpoint the latest, and removes the run's older ones except the previous one.

    Returns a warning if another run has saved there, or "". Raises ValueError if a file is missing here or has another
    size; the latest checkpoint is then still the previous one.
    """
    partial, place = _partial(folder, manifest.name), folder / manifest.name
    before = latest_name(folder)
    for name, record in manifest.files.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != record.num_bytes:
            raise ValueError(f"{partial / name} is missing or has another size: expected a folder that all ranks share")
    pointer = f"{_LATEST}{_PARTIAL}"  # in a folder that no other run writes into
    _write_text(partial / pointer, manifest.name)
    text = manifest.to_text()
    if len(text) > MANIFEST_LIMIT:
        raise ValueError(f"{partial / MANIFEST} would have {len(text)} bytes: expected at most {MANIFEST_LIMIT}")
    _write_text(partial / MANIFEST, text)
    _flush_folder(partial)
    partial.replace(place)
    _flush_folder(folder)  # before `latest` names it
    (place / pointer).replace(folder / _LATEST)
    with suppress(OSError):  # it is the latest; the one before is whole, too
        _flush_folder(folder)
    for name in own.older(folder, manifest.name):
        discard(folder, name)
    if before is None or before in own:
        return ""
    return (
        f"{folder / before} was saved by another run, or by this one before a restart without pipe.load: it is kept, "
        f"but the latest checkpoint in {folder} is now {manifest.name}. Expected a folder for each run"
    )


def discard(folder: Path, name: str) -> None:
    for place in _places(folder, name):
        with suppress(OSError):
            (place / MANIFEST).unlink()  # without it the rest is not taken for a checkpoint
        shutil.rmtree(place, ignore_errors=True)


def read_text(path: Path, *, limit: int) -> str:
    """Text of a regular file of at most `limit` bytes. Raises ValueError for any other file: a FIFO would never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        raise ValueError(f"it is not a regular file of at most {limit} bytes")
    with path.open("rb") as file:
        return file.read(limit).decode("utf-8")


def find(folder: Path) -> Path:
    """Folder of the latest checkpoint in `folder`, or `folder` itself if it is one. Raises ValueError for neither."""
    if (folder / MANIFEST).exists() or _NAME.fullmatch(folder.name):
        return folder
    name = latest_name(folder)
    if name is None:
        inside = others(folder / _LATEST)
        hint = f"; there is one in it: pipe.load({str(inside[-1])!r})" if inside else ""
        raise ValueError(f"{folder} is not a checkpoint: expected a folder from pipe.save{hint}")
    return folder / name


def others(place: Path) -> list[Path]:
    """Other checkpoints in the folder of one, that of the last step last."""
    found = [each.parent for each in place.parent.glob(f"step-*/{MANIFEST}") if each.parent != place]
    return sorted((each for each in found if _NAME.fullmatch(each.name)), key=lambda each: step_of(each.name))


def latest_name(folder: Path) -> str | None:
    try:
        name = read_text(folder / _LATEST, limit=_LATEST_LIMIT).strip()
    except (OSError, ValueError):
        return None
    return name if _NAME.fullmatch(name) else None


def step_of(name: str) -> int:
    return int(name.split("-")[1])


def _places(folder: Path, name: str) -> list[Path]:
    """Folders of a checkpoint, whole or partial, but no links, since what they point to may belong to others."""
    return [at for at in (folder / name, _partial(folder, name)) if at.is_dir() and not at.is_symlink()]


def _partial(folder: Path, name: str) -> Path:
    return folder / f"{name}{_PARTIAL}"


def _write_text(path: Path, text: str) -> None:
    with flushed(path) as file:
        file.write(text.encode())


@contextmanager
def flushed(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is on the disk when the block ends, never an existing one or a link. An OSError names it."""
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

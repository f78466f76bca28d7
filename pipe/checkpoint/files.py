"""Checkpoints on a disk: written beside the last one, switched by an atomic rename, found again.

    folder/                        of pipe.save(folder) and pipe.load(folder)
      latest                       name of the newest whole checkpoint
      step-8-3f9c21ab/             a checkpoint; the one before it is kept, too, and any of another run
        checkpoint.json            see `manifest`
        process-0.safetensors ...  what each process wrote
      step-9-70d2b1aa.partial/     one that is being written, or never was completed

Each file and folder is flushed to the disk before `latest` names it, so a kill at any moment leaves a whole checkpoint.
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
    """ValueError for what cannot be the name of a checkpoint, as a path cannot."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.80} is no name of a checkpoint")
    return name


def begin(folder: Path, name: str) -> None:
    """Make the folder in which the checkpoint `name` is written. Raises ValueError where `folder` is a file."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a folder, an existing or a new one, to save checkpoints in")
    _partial(folder, name).mkdir(parents=True)


def is_begun(folder: Path, name: str) -> bool:
    """Whether this process sees the folder that `begin` has made, on whichever process."""
    return _partial(folder, name).is_dir()


def write_file(folder: Path, name: str, file_name: str, entries: Sequence[Entry]) -> tuple[FileRecord, dict[str, str]]:
    with flushed(_partial(folder, name) / file_name) as file:
        written = write_tensors(file, entries, {"checkpoint": name})
    _flush_folder(_partial(folder, name))
    return written


class OwnCheckpoints:
    """Names of the checkpoints of one run: those that it began to save, and those of the folders that it loaded from. A
    save removes no others: two runs that save into one folder by mistake must not remove each other's."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}  # in order

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def begin(self, name: str) -> None:
        self._names[name] = None

    def adopt(self, place: Path) -> None:
        """Go on from the checkpoint `place`: all that are beside it are this run's from now on."""
        names = {each.name.removesuffix(_PARTIAL) for each in place.parent.iterdir()}
        latest = latest_name(place.parent)
        for name in sorted(filter(_NAME.fullmatch, names), key=lambda name: (name == latest, step_of(name))):
            self._names.pop(name, None)
            self._names[name] = None

    def older(self, folder: Path, name: str) -> list[str]:
        """Those in `folder` that `name` replaces: all but the last whole one."""
        others = [each for each in self._names if each != name and _places(folder, each)]
        whole = [each for each in others if (folder / each / MANIFEST).exists()]
        return [each for each in others if each not in whole[-1:]]


def complete(folder: Path, manifest: Manifest, own: OwnCheckpoints) -> str:
    """Write the manifest, make this checkpoint the latest, and remove the run's own ones but the one before it.

    All files must be written, and are seen from here: ValueError where one is not, or is of another size. After an
    error the latest checkpoint is the one before. Returns a word of caution where another run has saved there.
    """
    partial, place = _partial(folder, manifest.name), folder / manifest.name
    before = latest_name(folder)
    for name, record in manifest.files.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != record.num_bytes:
            raise ValueError(f"{partial / name} is not there as it was written: expected a folder that all ranks share")
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
        f"{folder / before} was saved by another run, or by this one before it was started again without pipe.load: it "
        f"stays, but the latest checkpoint in {folder} is now {manifest.name}. Expected a folder for each run"
    )


def discard(folder: Path, name: str) -> None:
    """Remove a checkpoint, whole or not, as far as that can be done."""
    for place in _places(folder, name):
        with suppress(OSError):
            (place / MANIFEST).unlink()  # without it nobody takes what is left for a checkpoint
        shutil.rmtree(place, ignore_errors=True)


def read_text(path: Path, *, limit: int) -> str:
    """Text of a plain file of at most `limit` bytes. Raises ValueError for another one: a FIFO would never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        raise ValueError(f"it is no plain file of at most {limit} bytes")
    with path.open("rb") as file:
        return file.read(limit).decode("utf-8")


def find(folder: Path) -> Path:
    """Place of the latest checkpoint in `folder`, or of the one that `folder` is. Raises ValueError for none."""
    if (folder / MANIFEST).exists() or _NAME.fullmatch(folder.name):
        return folder
    name = latest_name(folder)
    if name is None:
        beside = others(folder / _LATEST)
        hint = f"; there is one in it: pipe.load({str(beside[-1])!r})" if beside else ""
        raise ValueError(f"{folder} is no checkpoint: expected a folder from pipe.save{hint}")
    return folder / name


def others(place: Path) -> list[Path]:
    """Other checkpoints beside one, that of the last step last."""
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
    """Folders of a checkpoint, whole or not, but none behind a link: what that leads to is somebody else's."""
    return [at for at in (folder / name, _partial(folder, name)) if at.is_dir() and not at.is_symlink()]


def _partial(folder: Path, name: str) -> Path:
    return folder / f"{name}{_PARTIAL}"


def _write_text(path: Path, text: str) -> None:
    with flushed(path) as file:
        file.write(text.encode())


@contextmanager
def flushed(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is on the disk when the block ends; never one that is there, nor behind a link. An OSError names
    it."""
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _flush_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

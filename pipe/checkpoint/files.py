"""Checkpoints on a disk: written beside the last one, switched by an atomic rename, checked before they are used.

    folder/                   of pipe.save(folder) and pipe.load(folder)
      latest                  name of the newest whole checkpoint
      step-8-3f9c21ab/        a checkpoint; the one before it is kept, too, and any of another run
      step-9-70d2b1aa.partial one that is being written, or never was completed
        checkpoint.json       version, its name, step, and size and SHA-256 of each stage's file
        stage-0.pt ...        a file a stage, which says whose it is

Each file and folder is flushed to the disk before `latest` names it, so a kill at any moment leaves a whole checkpoint.
Files are read with `weights_only=True`: loading executes no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

_VERSION = 3
_LATEST = "latest"
_PARTIAL = ".partial"
_MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-\d+-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFile:
    """Size [bytes] and SHA-256, in hex, of a stage's file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint: its name, the step after which it was saved, and [S] its files."""

    name: str
    step: int
    files: tuple[StageFile, ...]


def new_name(step: int) -> str:
    """Name of a new checkpoint, which no other one has."""
    return f"step-{step}-{secrets.token_hex(4)}"


def begin(folder: Path, name: str) -> None:
    """Make the folder in which the checkpoint `name` is written. Raises ValueError where `folder` is a file."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a folder, an existing or a new one, to save checkpoints in")
    _partial(folder, name).mkdir(parents=True)


def is_begun(folder: Path, name: str) -> bool:
    """Whether this process sees the folder that `begin` has made, on whichever process."""
    return _partial(folder, name).is_dir()


def write_stage(folder: Path, name: str, stage: int, content: Mapping[str, Any]) -> StageFile:
    """Write a stage's file of the checkpoint `name`."""
    place = _partial(folder, name)
    with _flushed(_stage_path(place, stage)) as file:
        hashed = _HashedFile(file)
        torch.save({"of": [name, stage], **content}, hashed)  # type: ignore[arg-type]  # it needs write and flush alone
    _flush_folder(place)
    return StageFile(num_bytes=hashed.num_bytes, sha256=hashed.digest.hexdigest())


class OwnCheckpoints:
    """Names of the checkpoints of one run: those that it began to save, and those of the folders that it loaded from.

    A save removes no others: two runs that save into one folder by mistake must not remove each other's.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}  # in order

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def begin(self, name: str) -> None:
        """A save begins."""
        self._names[name] = None

    def adopt(self, place: Path) -> None:
        """Go on from the checkpoint `place`: all that are beside it are this run's from now on."""
        names = {each.name.removesuffix(_PARTIAL) for each in place.parent.iterdir()}
        latest = _latest(place.parent)
        for name in sorted(filter(_NAME.fullmatch, names), key=lambda name: (name == latest, _step_of(name))):
            self._names.pop(name, None)
            self._names[name] = None

    def older(self, folder: Path, name: str) -> list[str]:
        """Those in `folder` that `name` replaces: all but the last whole one."""
        others = [each for each in self._names if each != name and _exists(folder, each)]
        whole = [each for each in others if (folder / each / _MANIFEST).exists()]
        return [each for each in others if each not in whole[-1:]]


def complete(folder: Path, manifest: Manifest, own: OwnCheckpoints) -> None:
    """Write the manifest, make this checkpoint the latest, and remove the run's own ones but the one before it.

    All stages' files must be written. A warning tells where another run has saved into the folder. After an OSError the
    latest checkpoint is the one before, and nothing is left of this one.
    """
    partial, place = _partial(folder, manifest.name), folder / manifest.name
    before = _latest(folder)
    try:
        _write_text(partial / _MANIFEST, json.dumps({"version": _VERSION, **asdict(manifest)}, indent=1))
        _flush_folder(partial)
        partial.replace(place)
        _flush_folder(folder)  # before `latest` names it
        pointer = folder / f"{_LATEST}{_PARTIAL}"
        _write_text(pointer, manifest.name)
        pointer.replace(folder / _LATEST)
    except OSError:
        discard(folder, manifest.name)
        raise
    _flush_folder(folder)
    if before is not None and before not in own:
        warnings.warn(
            f"{folder / before} was saved by another run, or by this one before it was started again without "
            f"pipe.load: it stays, but the latest checkpoint in {folder} is now {manifest.name}. Expected a folder for "
            f"each run",
            stacklevel=8,
        )
    for name in own.older(folder, manifest.name):
        discard(folder, name)


def discard(folder: Path, name: str) -> None:
    """Remove a checkpoint, whole or not, as far as that can be done."""
    with suppress(OSError):
        (folder / name / _MANIFEST).unlink()  # without it nobody takes what is left for a checkpoint
    for place in (folder / name, _partial(folder, name)):
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)


def read(folder: Path) -> tuple[Path, Manifest, list[dict[str, Any]]]:
    """The latest checkpoint in `folder`, or the one that `folder` is: place, manifest, and [S] contents, on the CPU.

    Raises ValueError for what is no whole checkpoint; it names the file, and a checkpoint that can be used instead.
    """
    place = folder
    if not (folder / _MANIFEST).exists():
        name = _latest(folder)
        if name is None:
            raise ValueError(f"{folder} is no checkpoint: expected a folder from pipe.save")
        place = folder / name
    try:
        manifest = _read_manifest(place)
        return place, manifest, [_read_stage(place, manifest, stage) for stage in range(len(manifest.files))]
    except ValueError as error:
        found = [each.parent for each in place.parent.glob(f"step-*/{_MANIFEST}") if each.parent != place]
        others = sorted((each for each in found if _NAME.fullmatch(each.name)), key=lambda each: _step_of(each.name))
        hint = f"; there is another one: pipe.load({str(others[-1])!r})" if others else ""
        raise ValueError(f"{error}{hint}") from None


def _read_manifest(place: Path) -> Manifest:
    path = place / _MANIFEST
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("version") != _VERSION:
            raise ValueError(f"expected version {_VERSION}")
        files = tuple(StageFile(**file) for file in fields.pop("files"))
        manifest = Manifest(**fields, files=files)
        if not files or type(manifest.step) is not int or manifest.step < 0:
            raise ValueError("expected a step and at least one stage")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is unreadable: {error}") from None
    return manifest


def _read_stage(place: Path, manifest: Manifest, stage: int) -> dict[str, Any]:
    path, expected = _stage_path(place, stage), manifest.files[stage]
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if sha256 != expected.sha256:
        raise ValueError(f"{path} {_what_is_wrong(path, manifest.name, stage, size, expected.num_bytes)}")
    return _load(path)


def _what_is_wrong(path: Path, name: str, stage: int, size: int, expected: int) -> str:
    """Why a file is not the one that was saved."""
    try:
        owner, number = _load(path)["of"]
    except (ValueError, TypeError, KeyError):
        owner, number = name, stage
    if (owner, number) != (name, stage):
        return f"is stage {number} of the checkpoint {owner}: expected stage {stage} of {name}"
    if size != expected:
        return f"has {size} bytes of {expected}: it was cut off"
    return "is damaged: its SHA-256 is not that of the file that was saved"


def _load(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from None
    return content


class _HashedFile:
    """A file for writing that counts and hashes what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _exists(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or _partial(folder, name).is_dir()


def _partial(folder: Path, name: str) -> Path:
    return folder / f"{name}{_PARTIAL}"


def _stage_path(place: Path, stage: int) -> Path:
    return place / f"stage-{stage}.pt"


def _latest(folder: Path) -> str | None:
    """Name of the newest whole checkpoint in `folder`, if there is one."""
    try:
        name = (folder / _LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if _NAME.fullmatch(name) else None


def _step_of(name: str) -> int:
    """The step in the name of a checkpoint."""
    return int(name.split("-")[1])


def _write_text(path: Path, text: str) -> None:
    with _flushed(path) as file:
        file.write(text.encode())


@contextmanager
def _flushed(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Bringing a snapshot to the disk: all processes write, and rank 0 makes the checkpoint the latest when all is there.

    rank 0 makes folder/step-8-3f9c21ab.partial
    ---- agreed: the name ----
    every process writes its files there
    ---- agreed: all are written ----          else rank 0 removes what was written: nothing has changed
    rank 0 adds the manifest, renames the folder, switches `latest`, and removes older ones
    ---- agreed: it is the latest ----

Nothing of the run is needed but the snapshot and a way to gather, so that it may run beside training.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from ..lock import refuse_other_writer
from .files import OwnCheckpoints, begin, complete, discard, is_begun, new_name, write_file
from .manifest import FileRecord, Manifest, Piece, TensorRecord
from .snapshot import HeldPiece, Snapshot
from .tensor_file import Entry
from .values import Json, dtype_name

T = TypeVar("T")

_MISTAKES = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}


class Processes(Protocol):
    """The processes that write a checkpoint: `comm.Collectives`, of the run or of a thread of its own."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    def gather(self, mine: T, *, what: str) -> list[T]:
        """[size] what every process gives, on every process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Outcome of a save, alike on all ranks.

    Arguments:
        path: the new checkpoint; None: there is none, and those before are as they were.
        problem: why not, for people; empty if there is one.
        is_mistake: whether the next save would fail alike, as in a folder that cannot be written.
        caution: what the user should know of the folder, or nothing.
    """

    path: Path | None
    problem: str = ""
    is_mistake: bool = False
    caution: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Pieces that a process has written, and its values."""

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, Json]
    by_process: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A process's part."""

    name: str = ""
    folder: str = ""
    written: _Written | None = None
    caution: str = ""
    problem: str = ""
    is_mistake: bool = False


def persist(
    folder: str | os.PathLike[str], snapshot: Snapshot, *, processes: Processes, own: OwnCheckpoints
) -> SaveResult:
    """Write a checkpoint beside those before it. Collective over the processes.

    An OSError on any of them (a full disk) is a result, not an error: what was written is removed again.
    """
    path = Path(folder)
    name = new_name(snapshot.step)
    mine = _Answer(name=name, folder=str(path))
    if processes.rank == 0 and (problem := _tried(lambda: _begin(path, name), path)) is not None:
        mine = replace(problem, folder=str(path))
    first = processes.gather(mine, what=f"beginning the checkpoint {path}")[0]
    if first.problem:
        return _failed(Path(first.folder), name, [first], processes)
    name = first.name
    own.begin(name)

    written: list[_Written] = []
    problem = _tried(lambda: written.append(_write(path, name, processes.rank, snapshot)), path)
    answers = processes.gather(
        problem or _Answer(written=written[0]), what=f"writing the checkpoint {path} (process {processes.rank})"
    )
    if any(answer.problem for answer in answers):
        return _failed(Path(first.folder), name, answers, processes)

    caution: list[str] = []
    mine = _Answer()
    if processes.rank == 0:
        parts = [answer.written for answer in answers if answer.written is not None]
        mine = _tried(lambda: caution.append(complete(path, _manifest(name, snapshot, parts), own)), path) or mine
        mine = replace(mine, caution="".join(caution))
    last = processes.gather(mine, what=f"completing the checkpoint {path}")[0]
    if last.problem:
        return _failed(Path(first.folder), name, [last], processes)
    return SaveResult(path=path / name, caution=last.caution)


def _begin(path: Path, name: str) -> None:
    begin(path, name)
    refuse_other_writer(path)


def _write(path: Path, name: str, process: int, snapshot: Snapshot) -> _Written:
    """Write this process's file, if it has any tensor to write."""
    if not is_begun(path, name):
        raise ValueError(
            f"{path.absolute()} on {socket.gethostname()} is not the folder that rank 0 writes into: expected one "
            f"folder that all ranks share (a network file system)"
        )
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    if snapshot.pieces:
        file_name = f"process-{process}.safetensors"
        entries = [_entry(piece) for piece in snapshot.pieces]
        file = write_file(path, name, file_name, entries)
        files[file_name] = FileRecord(num_bytes=file.num_bytes, header=file.header)
        for held, entry in zip(snapshot.pieces, entries, strict=True):
            piece = Piece(
                file=file_name, entry=entry.name, start=held.start, sizes=entry.shape, sha256=file.tensors[entry.name]
            )
            before = tensors[held.key].pieces if held.key in tensors else ()
            tensors[held.key] = TensorRecord(shape=held.shape, dtype=entry.dtype, pieces=(*before, piece))
    return _Written(files=files, tensors=tensors, values=snapshot.values, by_process=snapshot.by_process)


def _entry(piece: HeldPiece) -> Entry:
    sizes = tuple(piece.tensor.shape)
    at = "" if sizes == piece.shape else f"@{','.join(map(str, piece.start))}"
    return Entry(
        name=f"{piece.key}{at}", dtype=dtype_name(piece.tensor, what=piece.key), shape=sizes, make=lambda: piece.tensor
    )


def _manifest(name: str, snapshot: Snapshot, parts: Sequence[_Written]) -> Manifest:
    """Pieces that all processes have written, together. Raises ValueError for pieces that do not make whole tensors."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    values: dict[str, Json] = {}
    for part in parts:
        files |= part.files
        values |= part.values
        for key, record in part.tensors.items():
            known = tensors.setdefault(key, replace(record, pieces=()))
            if (known.shape, known.dtype) != (record.shape, record.dtype):
                raise ValueError(f"processes differ in shape or type of {key!r}: {known.shape} and {record.shape}")
            tensors[key] = replace(known, pieces=(*known.pieces, *record.pieces))
    for key in dict.fromkeys(key for part in parts for key in part.by_process):
        each = [part.by_process.get(key) for part in parts]
        values[key] = each[:1] if all(one == each[0] for one in each) else each
    return Manifest(
        name=name,
        step=snapshot.step,
        kind=snapshot.kind,
        names=snapshot.names,
        tied=snapshot.tied,
        files=files,
        tensors=tensors,
        values=values,
    )


def _tried(action: Callable[[], object], path: Path) -> _Answer | None:
    """None where it was done; else why not."""
    try:
        action()
    except ValueError as error:
        return _Answer(problem=str(error), is_mistake=True)
    except OSError as error:
        where = error.filename or path
        return _Answer(problem=f"{where}: {error.strerror or error}", is_mistake=error.errno in _MISTAKES)
    return None


def _failed(path: Path, name: str, answers: Sequence[_Answer], processes: Processes) -> SaveResult:
    if processes.rank == 0:
        discard(path, name)
    said = [f"rank {rank}: {answer.problem}" for rank, answer in enumerate(answers) if answer.problem]
    shown = "; ".join(said[:3]) + (f"; and {len(said) - 3} more" if len(said) > 3 else "")
    return SaveResult(
        path=None,
        problem=f"no checkpoint was saved in {path}: {shown}. Those before are as they were",
        is_mistake=any(answer.is_mistake for answer in answers),
    )

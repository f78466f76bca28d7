"""Writing a snapshot: all processes write, and rank 0 makes the checkpoint the latest when everything is written.

    rank 0 makes folder/step-8-3f9c21ab.partial
    ---- agreed: the name ----
    every process writes its files there
    ---- agreed: all are written ----          else rank 0 removes what was written, and nothing has changed
    rank 0 adds the manifest, renames the folder, switches `latest`, and removes older ones
    ---- agreed: it is the latest ----

It needs only the snapshot and a way to gather, so that it can run during training.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...comm import Collectives
from ...comm.store_exchange import Alone, StoreExchange
from .files import OwnCheckpoints, begin, checked_name, complete, discard, is_begun, new_name, write_file
from .lock import refuse_other_writer
from .manifest import FileRecord, Manifest, TensorPiece, TensorRecord, records_as_json, records_from_json
from .snapshot import HeldPiece, Snapshot
from .tensor_file import Entry
from .values import Json, dtype_name

_MISTAKES = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}


Processes = Collectives | StoreExchange | Alone  # that write a checkpoint, from the run or from a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Outcome of a save, the same on all ranks.

    Arguments:
        path: the new checkpoint; None: there is none, and earlier ones are unchanged.
        problem: the reason as text; empty if there is a checkpoint.
        is_mistake: whether the next save would fail alike, as into a folder that cannot be written.
        caution: a warning about the folder; empty if there is none.
    """

    path: Path | None
    problem: str = ""
    is_mistake: bool = False
    caution: str = ""


class _Answer(NamedTuple):
    """A process's part, as JSON; what another process sends is checked on arrival."""

    name: str = ""
    folder: str = ""
    written: Json = None  # files, tensors, values of all processes, values of this one
    caution: str = ""
    problem: str = ""
    is_mistake: bool = False


def _gathered(processes: Processes, mine: _Answer, *, what: str) -> list[_Answer]:
    kinds = (str, str, object, str, str, bool)
    given = processes.gather(list(mine), what=what)
    if not all(type(one) is list and len(one) == len(kinds) and all(map(isinstance, one, kinds)) for one in given):
        raise ValueError(f"{what}: a process sent something else than its part of a checkpoint")
    return [_Answer(*each) for each in given]


def persist(
    folder: str | os.PathLike[str], snapshot: Snapshot, *, processes: Processes, own: OwnCheckpoints
) -> SaveResult:
    """Writes a checkpoint alongside earlier ones. Collective over the processes.

    An OSError on any of them (a full disk) is reported in the result, and what was written is removed again.
    """
    path = Path(folder)
    name = new_name(snapshot.step)
    mine = _Answer(name=name, folder=str(path))
    if processes.rank == 0 and (problem := _tried(lambda: _begin(path, name), path)) is not None:
        mine = problem._replace(folder=str(path))
    first = _gathered(processes, mine, what="beginning a checkpoint")[0]
    if first.problem:
        return _failed(path, Path(first.folder), name, [first], processes)
    name = name if processes.rank == 0 else checked_name(first.name)
    own.begin(name)

    written: list[Json] = []
    problem = _tried(lambda: written.append(_write(path, name, processes.rank, snapshot)), path)
    answers = _gathered(processes, problem or _Answer(written=written[0]), what="writing a checkpoint")
    if any(answer.problem for answer in answers):
        return _failed(path, Path(first.folder), name, answers, processes)

    caution: list[str] = []
    mine = _Answer()
    if processes.rank == 0:
        parts = [answer.written for answer in answers]
        mine = _tried(lambda: caution.append(complete(path, _manifest(name, snapshot, parts), own)), path) or mine
        mine = mine._replace(caution="".join(caution))
    last = _gathered(processes, mine, what="completing a checkpoint")[0]
    if last.problem:
        return _failed(path, Path(first.folder), name, [last], processes)
    return SaveResult(path=path / name, caution=last.caution)


def _begin(path: Path, name: str) -> None:
    begin(path, name)
    refuse_other_writer(path)


def _write(path: Path, name: str, process: int, snapshot: Snapshot) -> Json:
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
        files[file_name], hashes = write_file(path, name, file_name, entries)
        for held, entry in zip(snapshot.pieces, entries, strict=True):
            piece = TensorPiece(
                file=file_name, entry=entry.name, start=held.start, sizes=entry.shape, sha256=hashes[entry.name]
            )
            before = tensors[held.key].pieces if held.key in tensors else ()
            tensors[held.key] = TensorRecord(shape=held.shape, dtype=entry.dtype, pieces=(*before, piece))
    return [*records_as_json(files, tensors), dict(snapshot.values), dict(snapshot.by_process)]


def _entry(piece: HeldPiece) -> Entry:
    sizes = tuple(piece.tensor.shape)
    at = "" if sizes == piece.shape else f"@{','.join(map(str, piece.start))}"
    return Entry(
        name=f"{piece.key}{at}", dtype=dtype_name(piece.tensor, what=piece.key), shape=sizes, make=lambda: piece.tensor
    )


def _manifest(name: str, snapshot: Snapshot, parts: Sequence[Json]) -> Manifest:
    """Manifest of all processes' pieces. Raises ValueError if these do not make whole tensors."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    values: dict[str, Json] = {}
    for *records, its_values, _ in parts:
        its_files, its_tensors = records_from_json(*records)
        files |= its_files
        values |= its_values
        for key, record in its_tensors.items():
            known = tensors.setdefault(key, replace(record, pieces=()))
            if (known.shape, known.dtype) != (record.shape, record.dtype):
                raise ValueError(f"processes differ in shape or type of {key!r}: {known.shape} and {record.shape}")
            tensors[key] = replace(known, pieces=(*known.pieces, *record.pieces))
    by_process = [part[3] for part in parts]
    for key in dict.fromkeys(key for one in by_process for key in one):
        each = [one.get(key) for one in by_process]
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
    try:
        action()
    except ValueError as error:
        return _Answer(problem=str(error), is_mistake=True)
    except OSError as error:
        where = error.filename or path
        return _Answer(problem=f"{where}: {error.strerror or error}", is_mistake=error.errno in _MISTAKES)
    return None


def _failed(own: Path, path: Path, name: str, answers: Sequence[_Answer], processes: Processes) -> SaveResult:
    if processes.rank == 0:
        discard(own, name)
    said = [f"rank {rank}: {answer.problem}" for rank, answer in enumerate(answers) if answer.problem]
    shown = "; ".join(said[:3]) + (f"; and {len(said) - 3} more" if len(said) > 3 else "")
    return SaveResult(
        path=None,
        problem=f"no checkpoint was saved in {path}: {shown}. Earlier ones are unchanged",
        is_mistake=any(answer.is_mistake for answer in answers),
    )

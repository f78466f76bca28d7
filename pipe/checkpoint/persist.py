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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from .files import Manifest, OwnCheckpoints, StageFile, begin, complete, discard, is_begun, new_name, write_stage
from .snapshot import Snapshot

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
    """What became of a save, alike on all ranks.

    Arguments:
        path: the new checkpoint; None: there is none, and those before are as they were.
        problem: why not, for people; empty if there is one.
        is_mistake: whether the next save would fail alike, as in a folder that cannot be written.
    """

    path: Path | None
    problem: str = ""
    is_mistake: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A process's part."""

    name: str = ""
    files: tuple[tuple[int, StageFile], ...] = ()
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
    begun = _tried(lambda: begin(path, name), path) if processes.rank == 0 else None
    first = processes.gather(begun or _Answer(name=name), what=f"beginning the checkpoint {path}")[0]
    if first.problem:
        return _failed(path, [first])
    name = first.name or name
    own.begin(name)

    written: dict[int, StageFile] = {}

    def write() -> None:
        if not is_begun(path, name):
            raise ValueError(
                f"{path.absolute()} on {socket.gethostname()} is not the folder that rank 0 writes into: expected one "
                f"folder that all ranks share (a network file system)"
            )
        for stage, content in snapshot.stages.items():
            written[stage] = write_stage(path, name, stage, content)

    problem = _tried(write, path)
    mine = problem or _Answer(files=tuple(written.items()))
    answers = processes.gather(mine, what=f"writing the checkpoint {path}")
    if any(answer.problem for answer in answers):
        if processes.rank == 0:
            discard(path, name)
        return _failed(path, answers)

    everywhere = dict(pair for answer in answers for pair in answer.files)
    files = tuple(everywhere[stage] for stage in range(snapshot.num_stages))
    manifest = Manifest(name=name, step=snapshot.step, files=files)
    ended = _tried(lambda: complete(path, manifest, own), path) if processes.rank == 0 else None
    last = processes.gather(ended or _Answer(), what=f"completing the checkpoint {path}")[0]
    return _failed(path, [last]) if last.problem else SaveResult(path=path / name)


def _tried(action: Callable[[], None], path: Path) -> _Answer | None:
    """None where it was done; else why not."""
    try:
        action()
    except ValueError as error:
        return _Answer(problem=str(error), is_mistake=True)
    except OSError as error:
        where = error.filename or path
        return _Answer(problem=f"{where}: {error.strerror or error}", is_mistake=error.errno in _MISTAKES)
    return None


def _failed(path: Path, answers: Sequence[_Answer]) -> SaveResult:
    said = [f"rank {rank}: {answer.problem}" for rank, answer in enumerate(answers) if answer.problem]
    shown = "; ".join(said[:3]) + (f"; and {len(said) - 3} more" if len(said) > 3 else "")
    return SaveResult(
        path=None,
        problem=f"no checkpoint was saved in {path}: {shown}. Those before are as they were",
        is_mistake=any(answer.is_mistake for answer in answers),
    )

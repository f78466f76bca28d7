"""Reading a checkpoint: each process maps the files of which it needs a piece, and checks the pieces that it takes.

manifest -> files (size, header) -> pieces (SHA-256), before anything is changed -> boxes of a process, copied out

Besides its stages, a process takes its position in the data and the states of its random number generators. Both are
restored when `load` returns, since the user's code uses them then, while the first batch may still have to build the
stages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...comm import Collectives, Guard
from ..shards.shard import Shard, TensorBox
from .files import MANIFEST, MANIFEST_LIMIT, find, others, read_text
from .manifest import Manifest, TensorPiece, TensorRecord
from .snapshot import HasState, generators, random_key
from .tensor_file import MappedFile, header_hash
from .values import DTYPES, decode, tensor_bytes


class Checkpoint:
    """A checkpoint whose manifest has been checked; `folder` holds it as the latest one, or is one.

    Raises ValueError for a folder without a whole checkpoint, with the name of file and tensor; so do its methods.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = find(folder)
        path = self.place / MANIFEST
        try:
            self.manifest = Manifest.from_text(read_text(path, limit=MANIFEST_LIMIT))
            if self.manifest.name != self.place.name and self.place.name.startswith("step-"):
                raise ValueError(f"it is that of {self.manifest.name}")
        except (OSError, ValueError, UnicodeDecodeError) as error:
            said = error.strerror or error if isinstance(error, OSError) else error
            raise self.error(f"{path} cannot be used: {said}") from None
        self._files: dict[str, MappedFile] = {}
        self._checked: set[TensorPiece] = set()

    def error(self, text: str) -> ValueError:
        """An error with the name of another checkpoint to load instead, if there is one."""
        beside = others(self.place)
        hint = f"; there is another one: pipe.load({str(beside[-1])!r})" if beside else ""
        return ValueError(f"{text}{hint}")

    @contextmanager
    def as_refusals(self) -> Iterator[None]:
        """Context that turns any error over the checkpoint's content into a ValueError that names the file at fault.

        Values of the manifest may have any form, even with a correct hash.
        """
        try:
            yield
        except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and str(self.place) in str(error):
                raise
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise self.error(f"{self.place / MANIFEST} cannot be used: {said}") from error

    def value(self, key: str) -> Any:
        return self._decoded(key, self.manifest.values.get(key))

    def of_process(self, key: str, *, process: int, num_processes: int) -> tuple[bool, Any]:
        """(is there one, value) of a process: one for all, or by its number among as many processes."""
        saved = self.manifest.values.get(key)
        if not isinstance(saved, list) or len(saved) not in (1, num_processes):
            return False, None
        return True, self._decoded(key, saved[0] if len(saved) == 1 else saved[process])

    def record(self, key: str) -> TensorRecord:
        return self.manifest.tensors[key]

    def check(self, key: str, shard: Shard) -> None:
        """Checks everything that `read` of this shard will take; nothing else may be read."""
        for piece in self._pieces(key, shard):
            if piece in self._checked:
                continue
            if hashlib.sha256(tensor_bytes(self._tensor(key, piece))).hexdigest() != piece.sha256:
                raise self.error(
                    f"{self.place / piece.file} is damaged: the SHA-256 of {key!r} is not that of what was saved"
                )
            self._checked.add(piece)

    def read(self, key: str, shard: Shard) -> torch.Tensor:
        """The local tensor of a shard, on the CPU; a view of the file if it is there in one piece."""
        pieces = self._pieces(key, shard)
        if len(pieces) == 1 and shard.is_whole:
            return self._tensor(key, pieces[0])
        local = torch.empty(shard.local, dtype=DTYPES[self.record(key).dtype])
        for piece in pieces:
            source = self._tensor(key, piece)
            for box in shard.boxes:
                cut = _in_piece(box, piece)
                if cut is not None:
                    local[cut.of_full()] = source[cut.of_local()]
        return local

    def full(self, key: str) -> torch.Tensor:
        shard = Shard.whole(self.record(key).shape)
        self.check(key, shard)
        return self.read(key, shard)

    def _pieces(self, key: str, shard: Shard) -> list[TensorPiece]:
        record = self.record(key)
        assert record.shape == shard.full, key
        if shard.is_whole:
            return list(record.pieces)
        return [piece for piece in record.pieces if any(_in_piece(box, piece) for box in shard.boxes)]

    def _tensor(self, key: str, piece: TensorPiece) -> torch.Tensor:
        if piece.file not in self._files:
            self._files[piece.file] = self._open(piece.file)
        try:
            found = self._files[piece.file].tensor(piece.entry, self.record(key).dtype)
            if tuple(found.shape) != piece.sizes:
                raise ValueError(f"{piece.entry!r} has shape {tuple(found.shape)}: expected {piece.sizes}")
        except ValueError as error:
            raise self.error(f"{self.place / piece.file} is not what the manifest says: {error}") from None
        return found

    def _open(self, name: str) -> MappedFile:
        path, record = self.place / name, self.manifest.files[name]
        try:
            if path.is_symlink():
                raise ValueError("is a link: expected the file itself")
            size = path.stat().st_size
            if size != record.num_bytes:
                what = "it was cut off" if size < record.num_bytes else "it is another file"
                raise ValueError(f"has {size} bytes of {record.num_bytes}: {what}")
            if header_hash(path) != record.header:
                raise ValueError("is damaged, or of another checkpoint: the SHA-256 of its header is another one")
        except OSError as error:
            raise self.error(f"{path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise self.error(f"{path} {error}") from None
        try:
            return MappedFile(path)
        except ValueError as error:
            raise self.error(f"{path} cannot be read: {error}") from None

    def _decoded(self, key: str, value: object) -> Any:
        try:
            return decode(value)
        except ValueError as error:
            raise self.error(f"{self.place / MANIFEST} has a bad value of {key!r}: {error}") from None


def _in_piece(box: TensorBox, piece: TensorPiece) -> TensorBox | None:
    """The part of a box that a piece holds: its start in the local tensor, and in the piece."""
    there = TensorBox(start=piece.start, local=(0,) * len(piece.start), sizes=piece.sizes)
    return TensorBox(start=box.local, local=box.start, sizes=box.sizes).part(there)


T = TypeVar("T")


def read_together(
    folder: Path, read: Callable[[Checkpoint], T], collectives: Collectives, guard: Guard
) -> tuple[Checkpoint, T]:
    """The checkpoint in `folder` and the result of `read`. Raises ValueError on all ranks unless all read the same."""
    name, place, problem = "", folder, ""
    try:
        checkpoint = Checkpoint(folder)
        name, place = checkpoint.manifest.name, checkpoint.place
        with checkpoint.as_refusals():
            found = read(checkpoint)
    except ValueError as error:
        if collectives.alone:
            raise
        problem = f"rank {collectives.rank} cannot load the checkpoint, so no rank does: {error}"
    with guard.together():
        collectives.alike((name, place), _differing, what="loading a checkpoint", problem=problem)
    return checkpoint, found


def _differing(first: int, one: tuple[str, Path], rank: int, its: tuple[str, Path]) -> str | None:
    if one[0] == its[0]:
        return None
    return (
        f"rank {first} read {one[1]} and rank {rank} read {its[1]}: expected one folder that all ranks see and no run "
        f"saves into meanwhile, or pipe.load of one checkpoint in it"
    )


def lost_text(checkpoint: Checkpoint, lost: Sequence[str]) -> str:
    return f"of the checkpoint {checkpoint.folder}: {'; '.join(lost)}" if lost else ""


class ProcessState:
    """The part of one process, read before anything is changed; `lost` has texts about what cannot be restored.

    Raises ValueError for state that does not fit.
    """

    def __init__(self, checkpoint: Checkpoint, loader: HasState | None, *, process: int, num_processes: int) -> None:
        self.lost: list[str] = []
        self._checkpoint = checkpoint
        self._loader = loader
        self._process = {"process": process, "num_processes": num_processes}
        self._generators = self._check_generators()
        self._place = self._check_loader()

    def take(self) -> None:
        """Restores it."""
        with self._checkpoint.as_refusals():
            if self._loader is not None and self._place is not None:
                self._loader.load_state_dict(self._place)  # only this may still raise
        for set_state, state in self._generators:
            set_state(state)

    def _check_generators(self) -> list[tuple[Callable[[Any], object], Any]]:
        found = []
        for name, (_, set_state, check) in generators().items():
            key = random_key(name)
            there, state = self._checkpoint.of_process(key, **self._process)
            if there and state is not None:
                try:
                    check(state)
                except (KeyError, TypeError, ValueError, RuntimeError) as error:
                    raise ValueError(f"state of the generator {name!r} is not valid: {error}") from None
                found.append((set_state, state))
            elif name == "torch" and key in self._checkpoint.manifest.values:  # users may never seed the others
                self.lost.append(
                    f"torch's generator had another state in each of its {len(self._checkpoint.manifest.values[key])} "
                    f"processes, and there are {self._process['num_processes']} now: your own code continues with the "
                    f"state that the generator has here"
                )
        return found

    def _check_loader(self) -> Mapping[str, Any] | None:
        there, place = self._checkpoint.of_process("loader", **self._process)
        is_saved = "loader" in self._checkpoint.manifest.values
        if self._loader is None:
            if is_saved:
                self.lost.append(
                    f"it has the data loader's position ({place!r:.120}), which was not loaded: data begins from the "
                    f"start. Expected pipe.load(folder, loader=loader)"
                )
            return None
        if not is_saved and self._checkpoint.manifest.kind == "training":
            raise ValueError(
                f"checkpoint {self._checkpoint.place} has no position of a data loader: expected one from "
                f"pipe.save(..., loader=)"
            )
        if is_saved and not there:
            raise ValueError(
                f"checkpoint {self._checkpoint.place} has another position of the data loader for each of "
                f"{len(self._checkpoint.manifest.values['loader'])} processes, and there are "
                f"{self._process['num_processes']} now: expected as many, or a loader whose state is the same for all, "
                f"as that of pipe.loader"
            )
        found: Mapping[str, Any] | None = place
        return found


def some_of(names: Sequence[str], nothing: str = "nothing") -> str:
    return f"{[*names[:5]]}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" if names else nothing

"""Reading a checkpoint: each process maps the files that it needs a piece of, and checks what it takes.

manifest -> files (size, header) -> pieces (SHA-256), before anything is changed -> boxes of a process, copied out
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..shards.shard import Shard, TensorBox
from .files import MANIFEST, MANIFEST_LIMIT, find, others, read_text
from .manifest import Manifest, TensorPiece, TensorRecord
from .tensor_file import MappedFile, header_hash
from .values import DTYPES, decode, tensor_bytes


class Checkpoint:
    """A checkpoint that is there: its manifest has been checked. `folder`: in which the latest one is meant, or that of
    one. Raises ValueError for what is no whole checkpoint, by name of the file and tensor; so do its methods."""

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
        """An error that names another checkpoint to use instead, if there is one."""
        beside = others(self.place)
        hint = f"; there is another one: pipe.load({str(beside[-1])!r})" if beside else ""
        return ValueError(f"{text}{hint}")

    @contextmanager
    def as_refusals(self) -> Iterator[None]:
        """Within it whatever the checkpoint's content leads to is a ValueError that names the file at fault, or the
        manifest: its values may be of any form, with any hash."""
        try:
            yield
        except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and str(self.place) in str(error):
                raise
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise self.error(f"{self.place / MANIFEST} cannot be used: {said}") from error

    def value(self, key: str) -> Any:
        """A value that was saved; None where it was not."""
        return self._decoded(key, self.manifest.values.get(key))

    def of_process(self, key: str, *, process: int, num_processes: int) -> tuple[bool, Any]:
        """(whether there is one, what was saved) of a process: the same for all, or by its number among as many."""
        saved = self.manifest.values.get(key)
        if not isinstance(saved, list) or len(saved) not in (1, num_processes):
            return False, None
        return True, self._decoded(key, saved[0] if len(saved) == 1 else saved[process])

    def record(self, key: str) -> TensorRecord:
        return self.manifest.tensors[key]

    def check(self, key: str, shard: Shard) -> None:
        """Check all that `read` will take of a tensor: nothing else may be read."""
        for piece in self._pieces(key, shard):
            if piece not in self._checked:
                self._check(key, piece)
                self._checked.add(piece)

    def read(self, key: str, shard: Shard) -> torch.Tensor:
        """The local tensor of a shard, on the CPU: a view of the file where it lies there in one piece."""
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
        """A whole tensor, checked."""
        shard = Shard.whole(self.record(key).shape)
        self.check(key, shard)
        return self.read(key, shard)

    def _pieces(self, key: str, shard: Shard) -> list[TensorPiece]:
        """The pieces that a shard needs, of a tensor of its shape."""
        record = self.record(key)
        assert record.shape == shard.full, key
        if shard.is_whole:
            return list(record.pieces)
        return [piece for piece in record.pieces if any(_in_piece(box, piece) for box in shard.boxes)]

    def _check(self, key: str, piece: TensorPiece) -> None:
        found = hashlib.sha256(tensor_bytes(self._tensor(key, piece))).hexdigest()
        if found != piece.sha256:
            raise self.error(
                f"{self.place / piece.file} is damaged: the SHA-256 of {key!r} is not that of what was saved"
            )

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
    """The part of a box that a piece holds: where it begins in the local tensor, and in the piece."""
    there = TensorBox(start=piece.start, local=(0,) * len(piece.start), sizes=piece.sizes)
    return TensorBox(start=box.local, local=box.start, sizes=box.sizes).part(there)

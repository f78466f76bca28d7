"""Files of tensors in the safetensors format: a header in JSON, then the elements of one tensor after another.

They are written here, since a checkpoint is hashed and counted while it is written, without a second copy in memory and
with the errors of the file system as they are; they are read by the safetensors library, mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from .manifest import FileRecord
from .values import DTYPES, FORMAT_NAMES, tensor_bytes

_ALIGNED = 8  # [bytes] of the header


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a file; `make` gives it when it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


def write_tensors(
    file: IO[bytes], entries: Sequence[Entry], metadata: Mapping[str, str]
) -> tuple[FileRecord, dict[str, str]]:
    """Write tensors, whose names must differ; returns the SHA-256 of each by name, in hex, too.

    The widest types come first, so that each is aligned.
    """
    ordered = sorted(entries, key=lambda entry: (-DTYPES[entry.dtype].itemsize, entry.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in ordered:
        begin, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": FORMAT_NAMES[entry.dtype],
            "shape": [*entry.shape, *([DTYPES[entry.dtype].itemsize] if entry.dtype == "complex128" else [])],
            "data_offsets": [begin, end],
        }
    assert len(header) == len(ordered) + 1
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    front = len(text).to_bytes(8, "little") + text
    file.write(front)
    hashes = {}
    for entry in ordered:
        data = tensor_bytes(entry.make())
        assert data.nbytes == entry.num_bytes, entry.name
        file.write(data)
        hashes[entry.name] = hashlib.sha256(data).hexdigest()
    return FileRecord(num_bytes=len(front) + end, header=hashlib.sha256(front).hexdigest()), hashes


def header_hash(path: Path) -> str:
    """SHA-256 of a file's header, in hex. Raises ValueError where there is none, and OSError."""
    with path.open("rb") as file:
        front = file.read(8)
        length = int.from_bytes(front, "little")
        if len(front) < 8 or length > path.stat().st_size - 8:
            raise ValueError("is damaged: it has no header")
        return hashlib.sha256(front + file.read(length)).hexdigest()


class MappedFile:
    """A file of tensors mapped into memory; what it gives are views that nobody may write to. Raises ValueError,
    without the file's name, for what is no such file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _as_value_errors():
            self._file = safe_open(path, framework="pt", device="cpu")
            self._names = frozenset(self._file.keys())  # type: ignore[no-untyped-call]

    def names(self) -> list[str]:
        return sorted(self._names)

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a tensor. Raises ValueError for a type that torch does not have."""
        with _as_value_errors():
            part = self._file.get_slice(name)  # type: ignore[no-untyped-call]
        kinds = {said: DTYPES[kind] for kind, said in reversed(FORMAT_NAMES.items())}
        if part.get_dtype() not in kinds:
            raise ValueError(f"tensor {name!r} is of type {part.get_dtype()}: expected one of {', '.join(kinds)}")
        return tuple(part.get_shape()), kinds[part.get_dtype()]

    def tensor(self, name: str, dtype: str | None = None) -> torch.Tensor:
        """A tensor; of this type, which must be the file's, or of the file's. Raises ValueError for none like that."""
        if name not in self._names:
            raise ValueError(f"it has no tensor {name!r}")
        with _as_value_errors():
            found: torch.Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        if dtype is None:
            return found
        if dtype == "complex128" and found.dtype == torch.uint8:
            return found.reshape(-1).view(torch.complex128).reshape(found.shape[:-1])
        if found.dtype != DTYPES[dtype]:
            raise ValueError(f"tensor {name!r} is of {found.dtype}: expected torch.{dtype}")
        return found


@contextmanager
def _as_value_errors() -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(str(error).splitlines()[0][:200] if str(error) else type(error).__name__) from None

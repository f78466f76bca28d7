"""Files of tensors: safetensors, written and read, and files of torch.save from elsewhere, read.

A safetensors file is a header in JSON, then the elements of one tensor after another. It is written here, not by the
library, so that a checkpoint is hashed and counted while it is written, without a second copy in memory, and errors of
the file system arrive unchanged. The library reads it, mapped into memory. What a file of torch.save unpacks to is
checked before it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import unpack
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from torch.utils import _pytree as pytree

from .manifest import FileRecord
from .values import DTYPES, FORMAT_NAMES, tensor_bytes

_ALIGNED = 8  # [bytes] of the header


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a file; `make` returns it when it is written."""

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
    """Writes tensors of distinct names; returns the file's record, and the SHA-256 of each tensor by name, in hex.

    The widest types come first, so that all are aligned.
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
    """SHA-256 of a file's header, in hex. Raises ValueError if it has none, and OSError."""
    with path.open("rb") as file:
        front = file.read(8)
        length = int.from_bytes(front, "little")
        if len(front) < 8 or length > path.stat().st_size - 8:
            raise ValueError("is damaged: it has no header")
        return hashlib.sha256(front + file.read(length)).hexdigest()


class MappedFile:
    """A safetensors file mapped into memory; its tensors are views that must not be written to.

    Raises ValueError, without the file's name, for another kind of file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _as_value_errors():
            self._file = safe_open(path, framework="pt", device="cpu")
            self._names = frozenset(self._file.keys())  # type: ignore[no-untyped-call]

    def names(self) -> list[str]:
        return sorted(self._names)

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        with _as_value_errors():
            part = self._file.get_slice(name)  # type: ignore[no-untyped-call]
        kinds = {said: DTYPES[kind] for kind, said in reversed(FORMAT_NAMES.items())}
        if part.get_dtype() not in kinds:
            raise ValueError(f"tensor {name!r} is of type {part.get_dtype()}: expected one of {', '.join(kinds)}")
        return tuple(part.get_shape()), kinds[part.get_dtype()]

    def tensor(self, name: str, dtype: str | None = None) -> torch.Tensor:
        """A tensor; with `dtype` given, of that type. Raises ValueError for a missing tensor and another type."""
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


_BEGIN, _END = b"PK\3\4", 98  # what an archive of torch.save begins with; [bytes] of the records at its end


def plain_file(path: Path) -> Path:
    """The path. Raises ValueError unless it is a regular file: a FIFO would never answer, and a device never end."""
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return path


def load_saved(file: IO[bytes]) -> Any:
    """Content of a file of torch.save, by torch.load with weights_only.

    Raises ValueError if it would unpack to more bytes than the file has.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(4) == _BEGIN:
        check_archive(file, size)
    else:  # of torch before 1.6
        with mmap(file.fileno(), 0, access=ACCESS_READ) as text:
            _check_pickle(text)
    file.seek(0)
    content = torch.load(file, map_location="cpu", weights_only=True)
    tensors = [x for x in pytree.tree_leaves(content) if isinstance(x, torch.Tensor) and x.layout is torch.strided]
    storages = {each.data_ptr(): each.nbytes() for x in tensors if not x.is_meta for each in [x.untyped_storage()]}
    if max(sum(storages.values()), *(x.nbytes for x in tensors), 0) > size:
        raise ValueError("its tensors are larger than it is")
    return content


def check_archive(file: IO[bytes], size: int) -> None:
    """Raises ValueError for an archive of `size` bytes that unpacks to more.

    Any two readers of zip find the same entries in it: the list must end where the records at the end begin, after
    which nothing follows.
    """
    file.seek(0)
    begin, entries = file.read(4), []
    file.seek(max(0, size - _END))
    tail = file.read(_END).rjust(_END)
    length, start, at = unpack("<40xQQ8xQ26x", tail)
    marks = begin, tail[:4], tail[56:60], tail[76:80], tail[96:]
    if marks == (_BEGIN, b"PK\6\6", b"PK\6\7", b"PK\5\6", b"\0\0") and start + length == at == size - _END:
        file.seek(start)
        with suppress(BadZipFile), ZipFile(io.BytesIO(file.read(length) + tail)) as listed:
            entries = listed.infolist()
    if not entries or sum(each.file_size if each.compress_type == ZIP_STORED else size for each in entries) >= size:
        raise ValueError("it is compressed, or damaged: expected a file of torch.save, which unpacks to its own size")
    for each in entries:
        if each.filename.lower().endswith(".pkl"):
            file.seek(start + each.header_offset + 26)  # by the list alone, offsets count from there
            file.seek(start + each.header_offset + 30 + sum(unpack("<HH", file.read(4))))
            _check_pickle(file.read(each.file_size))
    file.seek(0)


def _check_pickle(text: bytes | mmap) -> None:
    if text.find(b"bytearray") >= 0:  # as long as the pickle says
        raise ValueError("it has a bytearray, which checkpoints never have")

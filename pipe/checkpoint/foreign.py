"""Files that somebody else has written: what they are and unpack to is known before they are read."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import unpack
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch.utils import _pytree as pytree

_BEGIN, _END = b"PK\3\4", 98  # what an archive of torch.save begins with; [bytes] of the records at its end


def plain_file(path: Path) -> Path:
    """The path. Raises ValueError for what is none: a FIFO would never answer, and a device never end."""
    if not path.is_file():
        raise ValueError(f"{path} is no plain file")
    return path


def load_saved(file: IO[bytes]) -> Any:
    """The content of a file of torch.save, by torch.load with weights_only. Raises ValueError where more would come of
    the file than it has bytes."""
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
    """Raises ValueError for an archive of so many bytes that unpacks to more. Any two readers of zip find the same list
    of entries in it: that ends where the records at the end begin, which nothing follows."""
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
        raise ValueError("it has a bytearray, which no checkpoint has")

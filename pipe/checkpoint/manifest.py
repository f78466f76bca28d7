"""The manifest of a checkpoint: what it holds, where each piece of each tensor is, and the hash of each.

checkpoint.json
  version, sha256        of all that follows
  name, step, kind       "training", or "weights" that came from elsewhere
  names, tied            the model's tensors in order; name -> the name under which its tensor is kept
  files                  name -> bytes, SHA-256 of the header
  tensors                key -> shape, type, pieces [file, entry, start, sizes, SHA-256]
  values                 key -> a value that is not a tensor of the model's size

model/0.weight                  a parameter or buffer
optimizer/exp_avg/0.weight      state of an optimizer
version/3/0.weight              an older version, under an asynchronous schedule
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from math import prod
from typing import Any
from urllib.parse import quote, unquote

from .values import DTYPES, Json

VERSION = 4
KINDS = ("training", "weights")

_FILE = re.compile(r"[A-Za-z0-9_-]+\.safetensors")
_HASH = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("name", "step", "kind", "names", "tied", "files", "tensors", "values")


def model_key(name: str) -> str:
    return f"model/{name}"


def optimizer_key(entry: str, name: str) -> str:
    return f"optimizer/{quote(entry, safe='')}/{name}"


def version_key(number: int, name: str) -> str:
    return f"version/{number}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A box of a tensor: its file and entry there, its start in the full tensor, sizes, SHA-256."""

    file: str
    entry: str
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor: full shape, type, and pieces that cover each element once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[TensorPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    num_bytes: int
    header: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a whole checkpoint; see above. Raises ValueError, which names the fault, for an impossible one."""

    name: str
    step: int
    kind: str
    names: tuple[str, ...]
    tied: Mapping[str, str]
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, Json]

    def __post_init__(self) -> None:
        texts = (self.name, self.kind, *self.names, *self.tied.values())
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.values, Mapping):
            raise ValueError(f"name={self.name!r:.80} and names: expected texts, and values by text")
        if type(self.step) is not int or not 0 <= self.step < 2**53:
            raise ValueError(f"step={self.step!r}: expected a whole number, at least 0")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        if len(set(self.names)) != len(self.names):
            raise ValueError("the model has a name twice")
        for name, record in self.files.items():
            if not _FILE.fullmatch(name):
                raise ValueError(f"file {name!r}: expected the plain name of a .safetensors file in the same folder")
            if type(record.num_bytes) is not int or record.num_bytes < 8 or not _HASH.fullmatch(record.header):
                raise ValueError(f"file {name!r} has no size or hash")
        for key, tensor in self.tensors.items():
            self._check(key, tensor)
        for name in self.names:
            if model_key(self.tied.get(name, name)) not in self.tensors:
                raise ValueError(f"the model's {name!r} is not in it")
        if not self.tied.keys() <= set(self.names):
            raise ValueError(f"tied names {sorted(self.tied.keys() - set(self.names))[:3]} are not in the model")

    def _check(self, key: str, record: TensorRecord) -> None:
        if record.dtype not in DTYPES:
            raise ValueError(f"tensor {key!r} is of {record.dtype!r}: expected one of {', '.join(DTYPES)}")
        if not _are_sizes(record.shape):
            raise ValueError(f"tensor {key!r} has shape {record.shape}")
        for piece in record.pieces:
            fits = len(piece.start) == len(piece.sizes) == len(record.shape) and _are_sizes(piece.start)
            fits = fits and _are_sizes(piece.sizes)
            if not fits or any(a + n > size for a, n, size in zip(piece.start, piece.sizes, record.shape, strict=True)):
                raise ValueError(
                    f"tensor {key!r} of shape {record.shape} has a piece at {piece.start} of {piece.sizes}"
                )
            if piece.file not in self.files or not isinstance(piece.entry, str):
                raise ValueError(f"tensor {key!r} has a piece in {piece.file!r}, which is not among the files")
            if not _HASH.fullmatch(piece.sha256):
                raise ValueError(f"tensor {key!r} has a piece without a hash")
        if not record.pieces:
            raise ValueError(f"tensor {key!r} has no pieces")
        covered = sum(prod(piece.sizes) for piece in record.pieces)
        if covered != prod(record.shape) or _overlap(record.pieces):
            raise ValueError(
                f"tensor {key!r} of shape {record.shape} has pieces of {covered} elements in all"
                f"{', some of which overlap' if _overlap(record.pieces) else f': expected {prod(record.shape)}'}"
            )

    @property
    def versions(self) -> dict[int, dict[str, str]]:
        found: dict[int, dict[str, str]] = {}
        for key in self.tensors:
            section, _, rest = key.partition("/")
            if section == "version":
                number, _, name = rest.partition("/")
                if not number.isdecimal():
                    raise ValueError(f"tensor {key!r} has no number of a version")
                found.setdefault(int(number), {})[name] = key
        return found

    def to_text(self) -> str:
        files, tensors = records_as_json(self.files, self.tensors)
        content = {field: getattr(self, field) for field in _FIELDS} | {"files": files, "tensors": tensors}
        compact = partial(json.dumps, separators=(",", ":"), allow_nan=False)
        lines = ",\n".join(f" {json.dumps(key)}: {compact(value)}" for key, value in content.items())
        return f'{{\n "version": {VERSION},\n "sha256": "{_hash(content)}",\n{lines}\n}}\n'

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """The manifest of a text. Raises ValueError for other text, a damaged manifest, and one of another format."""
        try:
            content = json.loads(text)
            version = content.pop("version")
            if type(version) is int and version > VERSION:
                raise ValueError(
                    f"it is of format {version}, and this stagewright reads format {VERSION}: expected a newer "
                    f"stagewright"
                )
            if version != VERSION:
                raise ValueError(f"it is of format {version!r}: expected format {VERSION}")
            if content.pop("sha256") != _hash(content):
                raise ValueError("it is damaged: its SHA-256 is not that of what was saved")
            if sorted(content) != sorted(_FIELDS):
                raise ValueError(f"it has the fields {sorted(content)}: expected {sorted(_FIELDS)}")
            files, tensors = records_from_json(content["files"], content["tensors"])
            return cls(**content | {"files": files, "tensors": tensors, "names": tuple(content["names"])})
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is not the manifest of a checkpoint: {type(error).__name__}: {error}") from None


def optimizer_entries(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Keys of optimizer state among these, by parameter and entry."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        section, _, rest = key.partition("/")
        if section == "optimizer":
            entry, _, name = rest.partition("/")
            found.setdefault(name, {})[unquote(entry)] = key
    return found


def records_as_json(files: Mapping[str, FileRecord], tensors: Mapping[str, TensorRecord]) -> tuple[Json, Json]:
    return {name: [record.num_bytes, record.header] for name, record in files.items()}, {
        key: [list(one.shape), one.dtype, [[p.file, p.entry, [*p.start], [*p.sizes], p.sha256] for p in one.pieces]]
        for key, one in tensors.items()
    }


def records_from_json(files: Json, tensors: Json) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """Records of files and tensors; impossible ones are found when the Manifest is made."""
    return {name: FileRecord(num_bytes=size, header=hash_) for name, (size, hash_) in files.items()}, {
        key: TensorRecord(
            shape=tuple(shape),
            dtype=dtype,
            pieces=tuple(
                TensorPiece(file=file, entry=entry, start=tuple(start), sizes=tuple(sizes), sha256=sha256)
                for file, entry, start, sizes, sha256 in pieces
            ),
        )
        for key, (shape, dtype, pieces) in tensors.items()
    }


def _are_sizes(numbers: Iterable[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _overlap(pieces: Sequence[TensorPiece]) -> bool:
    if len(pieces) < 2:
        return False
    for dim in range(len(pieces[0].start)):  # pieces in a row along one dimension, as most are
        rows = sorted((piece.start[dim], piece.start[dim] + piece.sizes[dim]) for piece in pieces)
        if all(one[1] <= other[0] for one, other in pairwise(rows)):
            return False
    return any(_meet(one, other) for one, other in combinations(pieces, 2))


def _meet(one: TensorPiece, other: TensorPiece) -> bool:
    sides = zip(one.start, one.sizes, other.start, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in sides)


def _hash(content: Mapping[str, Json]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

"""Weights from files, of which each process reads those of its own stages.

    model.safetensors                      one file, as save_model and `stagewright export` write it
    model.safetensors.index.json           an index of several, of transformers
    a folder                               with one of these; of torch.distributed.checkpoint; or of pipe.save
    {"name": tensor}                       a state dict

Names, shapes and types are known before anything is read: they are those of the whole model, or nothing is changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ...partition.deferred.filling import put, rnns_of
from ...partition.deferred.recipes import device_where_built, reading
from ..settings.arguments import Weights
from ..stage.own_state import keys_of, tensors_of
from .foreign import plain_file
from .manifest import model_key
from .reader import Checkpoint
from .tensor_file import MappedFile
from .values import DTYPES

_INDEX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Stored:
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def take_weights(root: nn.Module, weights: Weights, undo: ExitStack) -> None:
    """Let every parameter and persistent buffer be read when it is filled, in the place of what it is now, which `undo`
    puts back.

    Raises ValueError that lists names that are missing, unexpected or of another shape; then nothing is changed.
    """
    where = "the state dict" if isinstance(weights.source, Mapping) else str(weights.source)
    stored = _stored(weights.source)
    tensors, keys = tensors_of(root), keys_of(root)
    names: dict[int, list[str]] = {}
    for name, x in tensors.items():
        names.setdefault(id(x), []).append(keys.get(name, name))
    start = _start([*names.values()], stored)
    found = {key: next((start + name for name in each if start + name in stored), "") for key, each in names.items()}
    missing = [each[0] for key, each in names.items() if not found[key]]
    known = {start + name for each in names.values() for name in each} | {
        start + name for name, _ in root.named_buffers()
    }
    unexpected = sorted(stored.keys() - known)
    if missing or unexpected:
        raise ValueError(
            f"weights of {where}: missing {_some(missing)}, unexpected {_some(unexpected)}: expected the "
            f"{len(tensors)} names of the model's state_dict()"
        )
    by_id = {id(x): x for x in tensors.values()}
    for key, x in by_id.items():
        one = stored[found[key]]
        if one.shape != tuple(x.shape):
            raise ValueError(f"weights of {where}: {found[key]!r} has shape {one.shape}: expected {tuple(x.shape)}")
        if (one.dtype.is_floating_point, one.dtype.is_complex) != (x.dtype.is_floating_point, x.dtype.is_complex):
            raise ValueError(f"weights of {where}: {found[key]!r} is of {one.dtype}: expected one like {x.dtype}")
    rnns = rnns_of(root)
    for key, x in by_id.items():
        one = stored[found[key]]
        is_inexact = x.dtype.is_floating_point or x.dtype.is_complex
        dtype = (weights.dtype if x.dtype.is_floating_point else None) or (one.dtype if is_inexact else x.dtype)
        read = partial(_read_as, one.read, dtype) if dtype != one.dtype else one.read
        undo.callback(put(rnns, x, reading(read, dtype, one.shape, device_where_built(x))))


def _stored(source: str | os.PathLike[str] | Mapping[str, torch.Tensor]) -> dict[str, _Stored]:
    if isinstance(source, Mapping):
        return _of_state(source)
    path = Path(source)
    try:
        if not path.exists():
            raise ValueError(f"weights={str(source)!r} is not there: expected a file of safetensors, or a folder")
        if path.is_dir():
            path = _of_folder(path)
        if path.is_dir():
            return _of_checkpoint(path) if not (path / ".metadata").exists() else _of_dcp(path)
        if path.name.endswith(_INDEX):
            return _of_index(path)
        if path.suffix == ".safetensors":
            return _of_file(path)
    except OSError as error:
        raise ValueError(f"weights={str(source)!r} cannot be read: {error.strerror or error}") from None
    raise ValueError(
        f"weights={str(source)!r}: expected a file that ends in .safetensors or {_INDEX}, or a folder with one, of "
        f"torch.distributed.checkpoint or of pipe.save"
    )


def _of_state(state: Mapping[str, torch.Tensor]) -> dict[str, _Stored]:
    found = {}
    for name, x in state.items():
        if not isinstance(x, torch.Tensor) or x.is_meta or x.layout != torch.strided:
            raise ValueError(f"weights={{{name!r}: {type(x).__name__}}}: expected a state dict of tensors with values")
        read = partial(_unchanged, name, x.detach(), 0 if x.is_inference() else x._version)
        found[name] = _Stored(tuple(x.shape), x.dtype, read)
    return found


def _unchanged(name: str, x: torch.Tensor, version: int) -> torch.Tensor:
    if not x.is_inference() and x._version != version:
        raise ValueError(f"weights= has another {name!r} than before: expected it unchanged until the first batch")
    return x


def _of_folder(folder: Path) -> Path:
    """The file in it, or the folder itself."""
    if (folder / ".metadata").exists():
        return folder
    for pattern in (f"*{_INDEX}", "model.safetensors", "*.safetensors"):
        if len(found := sorted(folder.glob(pattern))) == 1:
            return found[0]
    return folder


def _of_file(path: Path) -> dict[str, _Stored]:
    try:
        file = MappedFile(plain_file(path))
        return {name: _Stored(*file.described(name), partial(file.tensor, name)) for name in file.names()}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _of_index(path: Path) -> dict[str, _Stored]:
    try:
        files: dict[str, str] = json.loads(plain_file(path).read_text(encoding="utf-8"))["weight_map"]
        strange = [file for file in files.values() if Path(file).name != file]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if strange:
        raise ValueError(f"{path} names {strange[0]!r}: expected files of the same folder")
    opened = {file: _of_file(path.parent / file) for file in sorted({*files.values()})}
    for name, file in files.items():
        if name not in opened[file]:
            raise ValueError(f"{path} says that {name!r} is in {file}, which has no such tensor")
    return {name: opened[file][name] for name, file in files.items()}


def _of_checkpoint(folder: Path) -> dict[str, _Stored]:
    checkpoint = Checkpoint(folder)
    with checkpoint.as_refusals():
        keys = {name: model_key(checkpoint.manifest.tied.get(name, name)) for name in checkpoint.manifest.names}
        records = {name: checkpoint.record(key) for name, key in keys.items()}
        return {
            name: _Stored(tuple(each.shape), DTYPES[each.dtype], partial(checkpoint.full, keys[name]))
            for name, each in records.items()
        }


def _of_dcp(folder: Path) -> dict[str, _Stored]:
    from .dcp import DcpTensors

    found = DcpTensors(folder)
    return {
        name: _Stored(shape, dtype, partial(found.tensor, name)) for name, (shape, dtype) in found.described.items()
    }


def _start(tied: Sequence[Sequence[str]], stored: Mapping[str, _Stored]) -> str:
    """The prefix of the model's names in the files, such as "model."; of tied names one is enough."""
    if not tied or any(name in stored for names in tied for name in names):
        return ""
    starts = (key.removesuffix(name) for name in tied[0] for key in stored if key.endswith(f".{name}"))
    return next((start for start in starts if all(any(start + name in stored for name in names) for names in tied)), "")


def _some(names: Sequence[str]) -> str:
    return f"{[*names[:5]]}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" if names else "none"


def _read_as(read: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return read().to(dtype)

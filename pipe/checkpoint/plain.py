"""Checkpoints and the state of a plain model: out of one into the other, without a pipeline.

read_checkpoint      checkpoint -> state dict           of model.load_state_dict
export_checkpoint    checkpoint -> model.safetensors, or model.pt with optimizers
import_checkpoint    state dict or file -> checkpoint   of pipe.load
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch

from ...comm.store_exchange import Alone
from ..shards.shard import Shard
from .files import OwnCheckpoints, flushed
from .manifest import model_key
from .persist import persist
from .reader import Checkpoint
from .saved_optimizers import SavedOptimizers
from .snapshot import HeldPiece, Snapshot
from .tensor_file import Entry, MappedFile, write_tensors
from .values import dtype_name

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth", ".bin")

PathLike = str | os.PathLike[str]


def read_checkpoint(folder: PathLike) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers under their original names, on the CPU; tied names share one tensor.

    Arguments:
        folder: of pipe.save, whose latest checkpoint is meant, or one of its checkpoints.

    Raises ValueError for what is no whole checkpoint, by name of the file and tensor.
    """
    return _state(Checkpoint(Path(folder)))


def export_checkpoint(folder: PathLike, file: PathLike, *, optimizer: bool = False) -> None:
    """Write a checkpoint as one file that a plain model loads.

    A file of safetensors has the state dict, and a tensor of several names under each of them. One of torch.save (.pt)
    has the state dict, too; with `optimizer` it has {"model": state dict, "step": steps so far, "optimizers": state
    dicts of torch.optim.Optimizer with "param_names", "schedulers": those of their schedules}, as one process has them
    that is given all parameters at once.

    Arguments:
        folder: as in `read_checkpoint`.

    Raises ValueError for another kind of file, for what is no whole checkpoint, and where the file cannot be written.
    """
    path = Path(file)
    if path.suffix not in (SAFETENSORS, *TORCH):
        raise ValueError(f"{path}: expected a file that ends in {SAFETENSORS} or {TORCH[0]}")
    if optimizer and path.suffix == SAFETENSORS:
        raise ValueError(
            f"{path} with optimizers: expected a file that ends in {TORCH[0]}; safetensors hold tensors alone"
        )
    checkpoint = Checkpoint(Path(folder))
    manifest = checkpoint.manifest
    if path.suffix == SAFETENSORS:
        sources = {name: model_key(manifest.tied.get(name, name)) for name in manifest.names}
        for key in dict.fromkeys(sources.values()):
            if checkpoint.record(key).dtype == "complex128":
                raise ValueError(f"{path}: safetensors have no complex128, as {key!r} is: expected {TORCH[0]}")
            checkpoint.check(key, Shard.whole(checkpoint.record(key).shape))
        entries = [_entry(checkpoint, name, key) for name, key in sources.items()]
        _write(path, lambda out: write_tensors(out, entries, {"format": "pt"}))
        return
    content: dict[str, Any] = dict(_state(checkpoint))
    if optimizer:
        with checkpoint.as_refusals():
            joined = SavedOptimizers(checkpoint).joined(manifest.names)
            content = {
                "model": content,
                "step": manifest.step,
                "optimizers": [state for state, _ in joined],
                "schedulers": [scheduler for _, scheduler in joined],
            }
    _write(path, lambda out: torch.save(content, out))


def import_checkpoint(weights: Mapping[str, torch.Tensor] | PathLike, folder: PathLike) -> Path:
    """Make a checkpoint of a plain model's weights, for `pipe.load`: optimizers and step then begin anew.

    Arguments:
        weights: state dict, or a file of one, of safetensors or torch.save. Tensors that share memory are tied.
        folder: where it becomes the latest checkpoint.

    Returns the checkpoint. Raises ValueError for what is no state dict, and where the folder cannot be written.
    """
    state = dict(weights) if isinstance(weights, Mapping) else _read_file(Path(weights))
    _check_state(state, "the state dict" if isinstance(weights, Mapping) else str(weights))
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        at = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if first.setdefault(at, name) != name:
            tied[name] = first[at]
    pieces = [
        HeldPiece(key=model_key(name), shape=tuple(tensor.shape), start=(0,) * tensor.ndim, tensor=tensor.detach())
        for name, tensor in state.items()
        if name not in tied
    ]
    snapshot = Snapshot(
        step=0, kind="weights", names=tuple(state), tied=tied, pieces=tuple(pieces), values={}, by_process={}
    )
    own = OwnCheckpoints()
    result = persist(folder, snapshot, processes=Alone(), own=own)
    if result.path is None:
        raise ValueError(result.problem)
    return result.path


def _state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    manifest = checkpoint.manifest
    found: dict[str, torch.Tensor] = {}
    for name in manifest.names:
        first = manifest.tied.get(name, name)
        if first not in found:
            found[first] = checkpoint.full(model_key(first)).clone()
        found[name] = found[first]
    return {name: found[name] for name in manifest.names}


def _entry(checkpoint: Checkpoint, name: str, key: str) -> Entry:
    record = checkpoint.record(key)
    return Entry(
        name=name,
        dtype=record.dtype,
        shape=record.shape,
        make=lambda: checkpoint.read(key, Shard.whole(record.shape)),
    )


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """A file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        try:
            with flushed(partial) as out:
                write(out)
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
    except (OSError, RuntimeError) as error:
        said = error.strerror or error if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be written: {said}: expected a file in a folder that can be written") from None


def _read_file(path: Path) -> dict[str, Any]:
    """The state dict in a file; executes no code."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} cannot be read: expected a plain file")
    if path.suffix == SAFETENSORS:
        try:
            mapped = MappedFile(path)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        return {name: mapped.tensor(name) for name in mapped.names()}
    if path.suffix not in TORCH:
        raise ValueError(f"{path}: expected a file that ends in {SAFETENSORS} or {TORCH[0]}")
    try:
        with suppress(BadZipFile), ZipFile(path) as packed:  # torch.save compresses nothing
            if any(one.compress_type != ZIP_STORED for one in packed.infolist()):
                raise ValueError("it is compressed: expected a file of torch.save, which unpacks to its own size")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]  # as `export_checkpoint` with optimizers writes it
    return dict(content) if isinstance(content, Mapping) else {"": content}


def _check_state(state: Mapping[str, Any], where: str) -> None:
    odd = [name for name, value in state.items() if not isinstance(name, str) or not isinstance(value, torch.Tensor)]
    if odd or not state:
        shown = f"{type(state[odd[0]]).__name__} under {odd[0]!r:.80}" if odd else "nothing"
        raise ValueError(f"{where} has {shown}: expected a model's state_dict(), tensors by name")
    for name, tensor in state.items():
        dtype_name(tensor, what=f"{name!r} of {where}")

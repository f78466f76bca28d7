"""Between checkpoints and the files of plain models.

read_checkpoint      checkpoint -> state dict, for model.load_state_dict
export_checkpoint    checkpoint -> model.safetensors; or model.pt or a folder of DCP, with optimizers
import_checkpoint    state dict, file or folder of DCP -> checkpoint, for pipe.load
take_weights         weights= of PipelineModule -> the model's tensors, of which a process reads those of its stages:

    model.safetensors                one file, as save_model and `stagewright export` write it
    model.safetensors.index.json     an index of several, of transformers
    a folder                         with one of these; of torch.distributed.checkpoint; or of pipe.save
    {"name": tensor}                 a state dict

Names, shapes and types are checked before anything is read: they must be those of the whole model.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...comm.store_exchange import Alone
from ...partition.deferred.filling import put, rnns_of
from ...partition.deferred.recipes import device_where_built, reading
from ..settings.arguments import Weights
from ..shards.shard import Shard
from ..stage.own_state import EXTRA, keys_of, tensors_of
from .files import OwnCheckpoints, flushed
from .manifest import model_key, optimizer_key
from .persist import persist
from .reader import Checkpoint, some_of
from .saved_optimizers import SavedOptimizers
from .snapshot import HeldPiece, Snapshot
from .tensor_file import Entry, MappedFile, load_saved, plain_file, write_tensors
from .values import DTYPES, Json, dtype_name, encode

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth", ".bin")

PathLike = str | os.PathLike[str]


def read_checkpoint(folder: PathLike) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a checkpoint under their original names, on the CPU; tied names share one tensor.

    Arguments:
        folder: as passed to pipe.save, whose latest checkpoint is read, or one of the checkpoints in it.

    Returns a state dict for a plain model. Raises ValueError, with the name of file and tensor, for a folder without a
    whole checkpoint.
    """
    return _state(Checkpoint(Path(folder)))


def export_checkpoint(folder: PathLike, file: PathLike, *, optimizer: bool = False, dcp: bool = False) -> None:
    """Writes a checkpoint as a file that a plain model loads, or as a folder of torch.distributed.checkpoint.

    A safetensors file has the state dict, with a tensor of several names under each of them. A file of torch.save (.pt)
    has the state dict as well. With `optimizer` it has {"model": state dict, "step": steps so far, "optimizers": state
    dicts of torch.optim.Optimizer with "param_names", "schedulers": those of their schedulers}, as one process has them
    that was given all parameters at once.

    Arguments:
        folder: as in `read_checkpoint`.
        file: to write; its name ends in .safetensors or .pt, unless it is a folder (`dcp`).
        optimizer: whether to write optimizers, schedulers and step, too.
        dcp: whether to write a folder for torch.distributed.checkpoint.

    Raises ValueError for another kind of file, for a folder without a whole checkpoint, and for a file that cannot be
    written.
    """
    path = Path(file)
    if dcp and (path.exists() or path.suffix in (SAFETENSORS, *TORCH)):
        raise ValueError(f"{path}: expected a new folder for torch.distributed.checkpoint")
    if not dcp and path.suffix not in (SAFETENSORS, *TORCH):
        raise ValueError(f"{path}: expected a file that ends in {SAFETENSORS} or {TORCH[0]}, or --dcp")
    if optimizer and not dcp and path.suffix == SAFETENSORS:
        raise ValueError(
            f"{path} with optimizers: expected a file that ends in {TORCH[0]}; safetensors hold tensors alone"
        )
    checkpoint = Checkpoint(Path(folder))
    manifest = checkpoint.manifest
    if path.suffix == SAFETENSORS and not dcp:
        sources = {name: model_key(manifest.tied.get(name, name)) for name in manifest.names}
        for key in dict.fromkeys(sources.values()):
            if checkpoint.record(key).dtype == "complex128":
                raise ValueError(f"{path}: safetensors have no complex128, as {key!r} is: expected {TORCH[0]}")
            checkpoint.check(key, Shard.whole(checkpoint.record(key).shape))
        entries = [_entry(checkpoint, name, key) for name, key in sources.items()]
        _write(path, lambda out: write_tensors(out, entries, {"format": "pt"}))
        return
    content: dict[str, Any] = {"model": _state(checkpoint)}
    if optimizer:
        with checkpoint.as_refusals():
            joined = SavedOptimizers(checkpoint).joined(manifest.names)
            content |= {
                "step": manifest.step,
                "optimizers": [state for state, _ in joined],
                "schedulers": [scheduler for _, scheduler in joined],
            }
    if dcp:
        from .dcp import write_dcp

        return _write(path, lambda out: write_dcp(content, out), opened=nullcontext)
    _write(path, lambda out: torch.save(content if optimizer else content["model"], out))


def import_checkpoint(weights: Mapping[str, Any] | PathLike, folder: PathLike, *, optimizer: bool = False) -> Path:
    """Makes a checkpoint of a plain model's weights, for `pipe.load`; step and optimizers begin anew unless imported.

    Arguments:
        weights: state dict, its file (safetensors, torch.save) or a folder of DCP. Tensors that share memory are tied.
        folder: in which it becomes the latest checkpoint.
        optimizer: whether to import optimizer and step, too, from a folder that has {"model", "optimizer"}.

    Returns the checkpoint's path. Raises ValueError for weights that are not a state dict, and for a folder that cannot
    be written.
    """
    where = "the state dict" if isinstance(weights, Mapping) else str(weights)
    content = {"model": dict(weights)} if isinstance(weights, Mapping) else _read_file(Path(weights))
    state = {name: x for name, x in content["model"].items() if str(name).rpartition(".")[2] != EXTRA}
    extra = {name: x for name, x in content["model"].items() if name not in state}
    _check_state(state, where)
    step, more, values = _optimizer_of(content, where) if optimizer else (0, {}, {})
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        at = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if first.setdefault(at, name) != name:
            tied[name] = first[at]
    pieces = [
        HeldPiece(key=key, shape=tuple(tensor.shape), start=(0,) * tensor.ndim, tensor=tensor.detach())
        for key, tensor in ({model_key(name): x for name, x in state.items() if name not in tied} | more).items()
    ]
    snapshot = Snapshot(
        step=step,
        kind="weights",
        names=tuple(state),
        tied=tied,
        pieces=tuple(pieces),
        values=values,
        by_process={EXTRA: encode(extra, what=f"extra state of {where}")} if extra else {},
    )
    result = persist(folder, snapshot, processes=Alone(), own=OwnCheckpoints())
    if result.path is None:
        raise ValueError(result.problem)
    return result.path


def _optimizer_of(content: Mapping[str, Any], place: str) -> tuple[int, dict[str, torch.Tensor], dict[str, Json]]:
    """Step, tensors and values of get_state_dict, flattened or nested. Raises ValueError for others."""
    kept: dict[str, Any] = next(
        (content[key] for key in ("optimizer", "optim") if isinstance(content.get(key), dict)), {}
    )
    state: dict[str, dict[str, Any]] = dict(kept.get("state", {}))
    groups = kept.get("param_groups", ())
    options = {name: {k: x for k, x in group.items() if k != "params"} for group in groups for name in group["params"]}
    for key, value in kept.items():
        section, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        if rest and not groups:
            (state if section == "state" else options).setdefault(name, {})[entry] = value
    odd = [name for name in (*state, *options) if name not in content["model"]]
    if odd or not options or not all(isinstance(each, dict) for each in state.values()):
        raise ValueError(
            f"{place} has {f'an optimizer of {odd[0]!r}' if odd else 'no optimizer'}: expected one next to 'model', of "
            f"torch.distributed.checkpoint.state_dict.get_state_dict"
        )
    if left := content.keys() - {"model", "step", "optimizer", "optim", *content["model"]}:
        warnings.warn(f"{place}: a checkpoint has no place for {', '.join(sorted(left)[:5])}, left out", stacklevel=3)
    steps = [each["step"] for each in state.values() if getattr(each.get("step"), "ndim", 1) == 0]
    keys = {optimizer_key(entry, name): value for name, each in state.items() for entry, value in each.items()}
    tensors = {key: value for key, value in keys.items() if isinstance(value, torch.Tensor)}
    values: dict[str, Json] = {key: encode(value, what=key) for key, value in keys.items() if key not in tensors}
    saved = [{"names": [name], "options": encode(each, what=name)} for name, each in options.items()]
    values["optimizers"] = [[{"stage": 0, "class": "", "groups": saved, "scheduler": None}]]
    return content.get("step", max(map(int, steps), default=0)), tensors, values


def _state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    manifest = checkpoint.manifest
    found: dict[str, torch.Tensor] = {}
    for name in manifest.names:
        first = manifest.tied.get(name, name)
        if first not in found:
            found[first] = checkpoint.full(model_key(first)).clone()
        found[name] = found[first]
    extra = {key: x for each in reversed(checkpoint.value(EXTRA) or ()) for key, x in (each or {}).items()}
    return {name: found[name] for name in manifest.names} | extra


def _entry(checkpoint: Checkpoint, name: str, key: str) -> Entry:
    record = checkpoint.record(key)
    return Entry(
        name=name, dtype=record.dtype, shape=record.shape, make=lambda: checkpoint.read(key, Shard.whole(record.shape))
    )


def _write(path: Path, write: Callable[[Any], object], *, opened: Callable[[Path], Any] = flushed) -> None:
    """Writes a file or folder that exists whole or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        try:
            with opened(partial) as out:
                write(out)
            partial.replace(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):
                partial.unlink()
            raise
    except (OSError, RuntimeError) as error:
        said = error.strerror or error if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be written: {said}: expected a name in a folder that can be written") from None


def _read_file(path: Path) -> dict[str, Any]:
    """{"model": state dict} and other content of a file or folder of DCP; runs no code from it."""
    if (path / ".metadata").exists():
        from .dcp import read_dcp

        return read_dcp(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} cannot be read: expected a plain file, or a folder of DCP, with .metadata")
    if path.suffix == SAFETENSORS:
        try:
            mapped = MappedFile(path)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        return {"model": {name: mapped.tensor(name) for name in mapped.names()}}
    if path.suffix not in TORCH:
        raise ValueError(f"{path}: expected a file that ends in {SAFETENSORS} or {TORCH[0]}")
    try:
        with path.open("rb") as file:
            content = load_saved(file)
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        return {"model": dict(content["model"])}  # as `export_checkpoint` with optimizers writes it
    return {"model": dict(content) if isinstance(content, Mapping) else {"": content}}


def _check_state(state: Mapping[str, Any], where: str) -> None:
    odd = [name for name, value in state.items() if not isinstance(name, str) or not isinstance(value, torch.Tensor)]
    if odd or not state:
        shown = f"{type(state[odd[0]]).__name__} under {odd[0]!r:.80}" if odd else "nothing"
        raise ValueError(f"{where} has {shown}: expected a model's state_dict(), tensors by name")
    for name, tensor in state.items():
        dtype_name(tensor, what=f"{name!r} of {where}")


_INDEX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Stored:
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def take_weights(root: nn.Module, weights: Weights, undo: ExitStack) -> None:
    """Sets every parameter and persistent buffer to be read from the files when it is filled; `undo` restores them.

    Raises ValueError with the names that are missing, unexpected or of another shape; then nothing is changed.
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
            f"weights of {where}: missing {some_of(missing, 'none')}, unexpected {some_of(unexpected, 'none')}: "
            f"expected the {len(tensors)} names of the model's state_dict()"
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
            raise ValueError(f"weights={str(source)!r} does not exist: expected a file of safetensors, or a folder")
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
            raise ValueError(f"{path} lists {name!r} in {file}, which has no such tensor")
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
    """Prefix of the model's names in the files, such as "model."; of tied names one must be there."""
    if not tied or any(name in stored for names in tied for name in names):
        return ""
    starts = (key.removesuffix(name) for name in tied[0] for key in stored if key.endswith(f".{name}"))
    return next((start for start in starts if all(any(start + name in stored for name in names) for names in tied)), "")


def _read_as(read: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return read().to(dtype)

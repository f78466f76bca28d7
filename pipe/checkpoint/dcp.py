"""Folders of torch.distributed.checkpoint (DCP), of get_state_dict; read without running code from them, and written.

.metadata       a pickle: shapes, chunks, the path to each entry. It makes what `_ALLOWED` names, or is refused
__0_0.distcp    chunk after chunk as torch.save writes it, loaded with weights_only
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from .values import DTYPES

_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in metadata.__all__},
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): lambda _: metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): lambda _: torch.strided,
    **{(f"pathlib{room}", f"{kind}Path"): lambda *_: "" for room in ("", "._local") for kind in ("Posix", "Windows")},
    **{("torch", name): kind for name, kind in (DTYPES | {"Size": torch.Size}).items()},
}


class _DcpUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f".metadata names {module}.{name}, which is none of DCP's records and might run code")
        found = _ALLOWED[module, name]
        # A pickle can set what a class has: torch's own stays as it is.
        return type(name, (found,), {}) if isinstance(found, type) and found is not torch.Size else found


class _DcpReader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **options: Any) -> metadata.Metadata:
        with Path(self.path, ".metadata").open("rb") as file:
            found: metadata.Metadata = _DcpUnpickler(file).load()
        for name, entry in found.state_dict_metadata.items():
            if sum(prod(chunk.sizes) for chunk in getattr(entry, "chunks", ())) != prod(getattr(entry, "size", (0,))):
                raise ValueError(f"{name!r} is not there whole")
        stored = {metadata.MetadataIndex(at.fqn, at.offset, at.index): x for at, x in found.storage_data.items()}
        if any(Path(info.relative_path).name != info.relative_path for info in stored.values()):
            raise ValueError(".metadata names files elsewhere: expected files of the same folder")
        found.storage_data = stored
        return found


class _DcpPlanner(default_planner._EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        try:
            content = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            content = error  # which a checkpoint has no form for: refused where it is needed
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)


def read_dcp(place: Path) -> dict[str, Any]:
    """{"model": state dict, ...}, whoever saved it. Raises ValueError for what is no such folder."""
    state: dict[str, Any] = {}
    try:
        reader = _DcpReader(place)
        reader.read_metadata()  # `_load_state_dict` would log its errors
        _load_state_dict(state, reader, planner=_DcpPlanner(), no_dist=True)  # type: ignore[no-untyped-call]
    except (Exception, CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        said = f"{type(cause).__name__}: {str(cause)[:300]}".splitlines()[0]
        raise ValueError(f"{place} cannot be read as a folder of torch.distributed.checkpoint: {said}") from None
    while len(state) == 1 and "model" not in state and isinstance(inner := next(iter(state.values())), dict):
        state = inner  # {"app": {"model": ...
    model = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    return state if isinstance(state.get("model"), dict) else {**state, "model": model}


def write_dcp(content: Mapping[str, Any], place: Path) -> None:
    """Content of `export_checkpoint`, for get_state_dict with flatten_optimizer_state_dict or without."""
    made: dict[str, Any] = {"state": {}, "param_groups": []}
    for one in content.get("optimizers", ()):
        for group in one["param_groups"]:
            options = {key: x for key, x in group.items() if key not in ("params", "param_names")}
            names = dict(zip(group["params"], group["param_names"], strict=True))
            made["state"] |= {name: one["state"][n] for n, name in names.items() if n in one["state"]}
            made["param_groups"].append({**options, "params": list(names.values())})
            made |= {f"param_groups.{name}.{key}": x for name in names.values() for key, x in options.items()}
    if any(content.get("schedulers", ())):
        warnings.warn("DCP has no place for learning-rate schedules, left out", stacklevel=5)
    state = {"model": content["model"]} | ({"optimizer": made, "step": content["step"]} if "step" in content else {})
    try:
        _save_state_dict(state, filesystem.FileSystemWriter(place), no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None

"""Folders of torch.distributed.checkpoint (DCP): written, and read without running code from them.

.metadata       a pickle: shapes, chunks, the path to each entry; only the types in `_ALLOWED` are made from it
__0_0.distcp    chunk after chunk as torch.save writes it, loaded with weights_only
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import default_planner, filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from .tensor_file import check_archive, load_saved, plain_file
from .values import DTYPES

_Text = type("", (), {"__new__": lambda *_: ""})
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in metadata.__all__},
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): type("", (), {"__init__": lambda *_: None, "__eq__": lambda *_: True}),
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): type("", (), {"__new__": lambda *_: torch.strided}),
    **{(f"pathlib{room}", f"{kind}Path"): _Text for room in ("", "._local") for kind in ("Posix", "Windows")},
    **{("torch", name): kind for name, kind in (DTYPES | {"Size": torch.Size}).items()},
}


class _DcpUnpickler(pickle._Unpickler):
    """An unpickler in Python, since the one in C allocates a list as long as the pickle says."""

    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {pickle.BYTEARRAY8[0]: None}  # allocates as it says

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f".metadata names {module}.{name}, which is not one of DCP's records and might run code")
        found = _ALLOWED[module, name]
        # A pickle can change a class: it gets a subclass of its own, except for types that cannot change.
        return type(name, (found,), {}) if isinstance(found, type) and found is not torch.Size else found


class _DcpReader(filesystem.FileSystemReader):
    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        found = super()._slice_file(file, sinfo)
        check_archive(found, sinfo.length)
        return found

    def read_metadata(self, *args: Any, **options: Any) -> metadata.Metadata:
        text = plain_file(Path(self.path, ".metadata")).read_bytes()
        found: metadata.Metadata = _DcpUnpickler(io.BytesIO(text)).load()
        for name, entry in found.state_dict_metadata.items():
            if sum(prod(chunk.sizes) for chunk in getattr(entry, "chunks", ())) != prod(getattr(entry, "size", (0,))):
                raise ValueError(f"{name!r} is not there whole")
        stored = {metadata.MetadataIndex(at.fqn, at.offset, at.index): x for at, x in found.storage_data.items()}
        if any(Path(info.relative_path).name != info.relative_path for info in stored.values()):
            raise ValueError(".metadata names files elsewhere: expected files of the same folder")
        self._check_sizes(found, stored)
        found.storage_data = stored
        return found

    def _check_sizes(self, found: metadata.Metadata, stored: Mapping[Any, Any]) -> None:
        """Raises ValueError if the entries need more bytes than the files have."""
        names = {info.relative_path for info in stored.values()}
        left = {name: plain_file(Path(self.path, name)).stat().st_size for name in names}
        for info in stored.values():
            left[info.relative_path] -= max(0, info.length)
            if left[info.relative_path] < 0 or info.transform_descriptors:
                raise ValueError(f"{info.relative_path} is shorter than .metadata says, or compressed")
        entry: Any
        for name, entry in found.state_dict_metadata.items():
            for chunk in getattr(entry, "chunks", ()):
                length = stored[metadata.MetadataIndex(name, chunk.offsets)].length
                if prod(chunk.sizes) * entry.properties.dtype.itemsize > length:
                    raise ValueError(f"a chunk of {name!r} is larger than what its file has of it")
        places = found.planner_data or {}
        if any(isinstance(at, int) and at >= len(places) for place in places.values() for at in place):
            raise ValueError(".metadata has an entry beyond the end of its list")


class _DcpPlanner(default_planner._EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        try:
            content = load_saved(value)
        except pickle.UnpicklingError as error:
            content = error  # raised only if the entry is needed
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)


class DcpTensors:
    """Tensors of a folder; `described` has (shape, type) by name. Raises ValueError for another kind of folder."""

    def __init__(self, place: Path) -> None:
        self._place, self._reader = place, _DcpReader(place)
        with _refusing(place):
            known = self._reader.read_metadata()
            paths = {name: (known.planner_data or {}).get(name, (name,)) for name in known.state_dict_metadata}
            while len({path[0] for path in paths.values()}) == 1 and all(len(path) > 1 for path in paths.values()):
                paths = {name: path[1:] for name, path in paths.items()}  # {"app": {"model": ...
            models = {name: path[1:] for name, path in paths.items() if path[0] == "model" and len(path) > 1}
            self._names = {".".join(map(str, path)): name for name, path in (models or paths).items()}
            entries = {name: known.state_dict_metadata[stored] for name, stored in self._names.items()}
            self.described = {
                name: (tuple(entry.size), entry.properties.dtype)
                for name, entry in entries.items()
                if isinstance(entry, metadata.TensorStorageMetadata)
            }
        self._reader.read_metadata = lambda *args, **options: known  # type: ignore[method-assign]

    def tensor(self, name: str) -> torch.Tensor:
        shape, dtype = self.described[name]
        found = {(stored := self._names[name]): torch.empty(shape, dtype=dtype)}
        planner = default_planner.DefaultLoadPlanner(flatten_state_dict=False)
        with _refusing(self._place):
            _load_state_dict(found, self._reader, planner=planner, no_dist=True)
        return found[stored]


@contextmanager
def _refusing(place: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        said = f"{type(cause).__name__}: {str(cause)[:300]}".splitlines()[0]
        raise ValueError(f"{place} cannot be read as a folder of torch.distributed.checkpoint: {said}") from None


def read_dcp(place: Path) -> dict[str, Any]:
    """{"model": state dict, ...} of a folder of any origin. Raises ValueError for a folder of another kind."""
    state: dict[str, Any] = {}
    with _refusing(place):
        reader = _DcpReader(place)
        reader.read_metadata()  # `_load_state_dict` would log its errors
        _load_state_dict(state, reader, planner=_DcpPlanner(), no_dist=True)  # type: ignore[no-untyped-call]
    while len(state) == 1 and "model" not in state and isinstance(inner := next(iter(state.values())), dict):
        state = inner  # {"app": {"model": ...
    model = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    return state if isinstance(state.get("model"), dict) else {**state, "model": model}


def write_dcp(content: Mapping[str, Any], place: Path) -> None:
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

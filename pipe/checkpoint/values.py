"""Values as JSON and back, with their types: what optimizers, schedulers and loaders hold besides large tensors.

    3, "a", True, None, 0.1, [1, 2]      unchanged
    (1, 2)                               {"tuple": [1, 2]}
    {1: "a"}                             {"dict": [[1, "a"]]}
    tensor, numpy array                  {"tensor": "float32", "shape": [2], "data": base64}

Nothing that is read back can run code: no other types exist.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ...comm.transport import memory_of

Json = Any  # None, bool, int, float, str, or lists and dicts of them

FORMAT_NAMES = {  # of torch's types, in files of tensors
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "complex128": "U8",  # safetensors has none: 16 bytes of each element, along a last dimension
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FORMAT_NAMES}

_LISTS: dict[str, tuple[type, Callable[[Iterable[Any]], Any]]] = {
    "tuple": (tuple, tuple),
    "size": (torch.Size, torch.Size),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "deque": (deque, deque),
}
_DICTS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def encode(value: object, *, what: str) -> Json:
    """A value as JSON; `what` names it in errors.

    Raises ValueError for a type that cannot be kept.

    >>> decode(encode({"betas": (0.9, 0.95), "milestones": {4: 1}}, what="options"))
    {'betas': (0.9, 0.95), 'milestones': {4: 1}}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        name = dtype_name(value, what=what)
        return {"tensor": name, "shape": list(value.shape), "data": _text(tensor_bytes(value))}
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":  # objects, and records of fields
        return {"array": str(value.dtype), "shape": list(value.shape), "data": _text(value.tobytes())}
    if isinstance(value, bytes):
        return {"bytes": _text(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if type(value) is list:
        return [encode(each, what=what) for each in value]
    for tag, (kind, _) in _LISTS.items():
        if type(value) is kind:
            items: Iterable[object] = value  # type: ignore[assignment]
            return {tag: [encode(each, what=what) for each in items]}
    for tag, kind in _DICTS.items():
        if type(value) is kind:
            pairs = value.items()  # type: ignore[attr-defined]
            return {tag: [[encode(key, what=what), encode(each, what=f"{what}[{key!r}]")] for key, each in pairs]}
    raise ValueError(
        f"{what} is {value!r:.80} of type {type(value).__name__}, which a checkpoint cannot hold: expected "
        f"numbers, text, tensors, numpy arrays, and lists, tuples, sets and dicts of them"
    )


def decode(value: Json) -> Any:
    """The value that was encoded. Raises ValueError for what `encode` does not return."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decode(each) for each in value]
    try:
        return _decode_tagged(value)
    except (AttributeError, KeyError, TypeError, RuntimeError, ArithmeticError, ValueError, StopIteration) as error:
        raise ValueError(f"{value!r:.80} is not a value of a checkpoint: {type(error).__name__}: {error}") from None


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Bytes of its elements in order, without a copy if they are contiguous on the CPU."""
    flat = memory_of(tensor.detach().to("cpu").contiguous())
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def dtype_name(tensor: torch.Tensor, *, what: str) -> str:
    """Name of its type. Raises ValueError for a type without a name here, and for a sparse or quantized tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout != torch.strided:
        raise ValueError(
            f"{what} is a tensor of {tensor.dtype}, {tensor.layout}: expected a dense one of {', '.join(DTYPES)}"
        )
    return name


def _decode_tagged(value: dict[str, Json]) -> Any:
    tag, content = next(iter(value.items()))
    if tag in ("tensor", "array"):
        data = bytearray(base64.b64decode(value["data"], validate=True))
        if tag == "array":
            return np.frombuffer(data, dtype=np.dtype(content)).reshape(value["shape"])
        flat = torch.frombuffer(data, dtype=DTYPES[content]) if data else torch.empty(0, dtype=DTYPES[content])
        return flat.reshape(value["shape"])
    if len(value) != 1:
        raise ValueError(f"expected one entry, not {list(value)}")
    if tag == "float":
        return float(content)
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "complex":
        return complex(float(content[0]), float(content[1]))
    if tag in _LISTS:
        return _LISTS[tag][1]([decode(each) for each in content])
    pairs = [(decode(key), decode(each)) for key, each in content]
    return _DICTS[tag](dict(pairs)) if tag == "counter" else _DICTS[tag](pairs)


def _text(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")

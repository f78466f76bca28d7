"""Where the batch stands in each argument of a model: `batch_dims={"tokens": 1, "mask": None}`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .forms import Arguments, argument_name

BatchDims = Mapping[str | int, int | None]

TARGET = "target"


def parameter_names(signature: inspect.Signature | None) -> list[str]:
    """Names of the parameters that may be given by position, in order, then of the others."""
    if signature is None:
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, each in signature.parameters.items() if each.kind not in variable]


def check_batch_dims(
    batch_dims: object,
    signature: inspect.Signature | None,
    *,
    option: str = "batch_dims",
    shared_by: str = "microbatches",
) -> BatchDims:
    """The option as given; ValueError for what it cannot be, and for names that no argument can have."""
    if batch_dims is None:
        return {}
    if not isinstance(batch_dims, Mapping):
        raise ValueError(f"{option}={batch_dims!r}: expected a dict, as in {option}={{'tokens': 1, 'mask': None}}")
    names = parameter_names(signature)
    takes_any = signature is not None and any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()
    )
    for key, dim in batch_dims.items():
        if not (dim is None or (isinstance(dim, int) and not isinstance(dim, bool))):
            raise ValueError(
                f"{option}[{key!r}]={dim!r}: expected the number of a dimension, or None for an input that all "
                f"{shared_by} share"
            )
        if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, int) and key < 0):
            raise ValueError(f"{option} has the key {key!r}: expected an argument's name, or its position from 0")
        if isinstance(key, int) or key == TARGET or takes_any or _first(key) in names:
            continue
        near = difflib.get_close_matches(_first(key), names, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(map(repr, names)) if names else "positions, since this model takes positional arguments alone"
        raise ValueError(f"{option} names {key!r}, which is no argument of the model: expected {known}{meant}")
    return batch_dims


def with_dims(arguments: Arguments, batch_dims: BatchDims, names: Sequence[str]) -> Arguments:
    """The arguments with the batch where `batch_dims` says; dimension 0, or none without dimensions, by default. Keys
    are the name of an argument or its position; a name with a path, as in "states['x']" or "pair[0]", is of a tensor in
    it, and goes first. ValueError for a dimension that a tensor does not have."""
    dims = list(arguments.dims)
    for i, (path, x) in enumerate(zip(arguments.form.paths, arguments.tensors, strict=True)):
        for key in keys_of(path, names):
            if key in batch_dims:
                dim = batch_dims[key]
                if dim is not None and not -x.dim() <= dim < x.dim():
                    raise ValueError(
                        f"batch_dims[{key!r}]={dim} and {argument_name(path)} has shape {tuple(x.shape)}: expected a "
                        f"dimension below {x.dim()}, or None"
                    )
                dims[i] = dim if dim is None else dim % x.dim()
                break
    return replace(arguments, dims=tuple(dims))


def keys_of(path: Sequence[str], names: Sequence[str]) -> list[str | int]:
    """Keys under which a tensor may be named, the most special ones first."""
    kind, first, *inner = path
    if kind == "[0]":
        position: int | None = int(first[1:-1])
        name = names[position] if position is not None and position < len(names) else None
    else:
        name = first[2:-2]
        position = names.index(name) if name in names else None
    found: list[str | int] = []
    for end in range(len(inner), -1, -1):
        if name is not None:
            found.append(name + "".join(inner[:end]))
        if position is not None:
            found.append(f"{position}{''.join(inner[:end])}" if end else position)
    return found


def _first(key: str) -> str:
    """The name of the argument in a key with a path."""
    for i, letter in enumerate(key):
        if letter in "[.":
            return key[:i]
    return key

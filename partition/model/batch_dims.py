"""Which dimension of each argument is the batch of a model: `batch_dims={"tokens": 1, "mask": None}`.

An axis may be as long as the batch by chance: a [T, T] mask of T samples, positions [3, B, T] of 3.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, count, product

import torch
from torch import nn

from .forms import Arguments, argument_name, tensors_in
from .model_units import model_units

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


def key_of(name: str) -> str:
    """How an argument is named in batch_dims."""
    return name.removeprefix("input ") if name.startswith("input ") else repr(name)


_Way = dict[int, int | None]  # other dimensions of the batch, of some tensors


def refuse_chance(
    model: nn.Module, whole: Arguments, named: Collection[int], *, num_parts: int, device: torch.device
) -> None:
    """ValueError for a batch that would be cut along an axis which is as long as it by chance: with another number of
    samples there the model fails, and it runs with them elsewhere.

    Asked where the inputs have another axis of that size; or the model has, and microbatches of one sample would be
    broadcast, where larger ones fail by themselves. `named`: tensors whose dimension the user has said.
    """
    num_samples = whole.num_samples
    sizes = [size for x, at in zip(whole.tensors, whole.dims, strict=True) for d, size in enumerate(x.shape) if d != at]
    if num_samples == num_parts and len(whole.tensors) > 1:
        sizes += [size for x in (*model.parameters(), *model.buffers()) for size in x.shape]
    if num_samples not in sizes or 1 in (num_samples, num_parts):
        return
    other = next(number for number in count(2, 2) if number not in (*sizes, num_samples))

    def runs(way: _Way) -> bool:
        dims = [way.get(i, dim) for i, dim in enumerate(whole.dims)]
        tensors = tuple(
            x.new_empty([other if d == dim else size for d, size in enumerate(x.shape)], device="meta")
            for x, dim in zip(whole.tensors, dims, strict=True)
        )
        try:
            model_units(model, Arguments(whole.form, tensors, tuple(dims)), enter_unit=None, device=device)
        except ValueError:
            return False
        return any(dim is not None for dim in dims)

    running: list[_Way] = next(filter(None, ([*filter(runs, ways)] for ways in _ways(whole, named))), [{}])
    if running == [{}]:  # or it takes no such number at all
        return
    told = [*running, {i: whole.dims[i] for way in running for i in way}]
    *better, same = (f"{{{', '.join(f'{key_of(whole.names[i])}: {d}' for i, d in way.items())}}}" for way in told)
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(whole.names, whole.tensors, strict=True))
    raise ValueError(
        f"{num_samples} samples, and another axis of that size ({shapes}): with {other} samples where the batch "
        f"seems to be the model fails, and it runs with batch_dims={' or '.join(better)}. Expected that; or, to keep "
        f"it as it is, batch_dims={same}"
    )


def _ways(whole: Arguments, named: Collection[int]) -> Iterator[list[_Way]]:
    """None; then other dimensions of one tensor that have that size, or that it has none; then of two."""
    others = {
        i: [*(d for d in range(1, x.dim()) if x.shape[d] == whole.num_samples), None]
        for i, x in enumerate(whole.tensors)
        if x.dim() and i not in named
    }
    for changes in range(3):
        yield [
            dict(zip(chosen, dims, strict=True))
            for chosen in combinations(reversed(others), changes)
            for dims in product(*(others[i] for i in chosen))
        ]


def refuse_target(whole: Arguments, target: object) -> None:
    """ValueError where inputs have the batch in another dimension than 0, and the target could in either."""
    for dim in filter(None, whole.dims):
        for shape in (tuple(leaf.shape) for leaf in tensors_in(target)):
            if shape[:1] == shape[dim : dim + 1] == (whole.num_samples,):
                raise ValueError(
                    f"a target of shape {shape} for inputs with {whole.num_samples} samples in dimension {dim}: "
                    f"expected batch_dims={{{TARGET!r}: {dim}}} along with theirs, or {TARGET!r}: 0"
                )


def _first(key: str) -> str:
    """The name of the argument in a key with a path."""
    for i, letter in enumerate(key):
        if letter in "[.":
            return key[:i]
    return key

"""Axes that are as long as the batch by chance: a [T, T] mask of T samples, positions [3, B, T] of 3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, count, product

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...partition.model.batch_dims import TARGET, keys_of
from ...partition.model.forms import Arguments
from ...partition.model.model_units import model_units
from ..options import Options
from .given import Given, key_of

_Dims = tuple[int | None, ...]


def refuse_chance(options: Options, given: Given, num_parts: int) -> None:
    """ValueError for a whole batch that would be cut along an axis which is as long as it by chance: with another
    number of samples there the model fails, and it runs with them elsewhere.

    Asked where the inputs have another axis of that size; or the model has, and microbatches of one sample would be
    broadcast, where larger ones fail by themselves.
    """
    model, whole, num_samples = options.model, given.arguments, given.num_samples
    if model is None or given.microbatches or num_parts == 1 or num_samples == 1:
        return
    _refuse_target(options, given)
    sizes = [size for x, at in zip(whole.tensors, whole.dims, strict=True) for d, size in enumerate(x.shape) if d != at]
    if num_samples == num_parts and len(whole.tensors) > 1:
        sizes += [size for x in (*model.parameters(), *model.buffers()) for size in x.shape]
    if num_samples not in sizes:
        return
    other = next(number for number in count(2, 2) if number not in (*sizes, num_samples))
    for ways in _ways(options, whole):
        if running := [way for way in ways if _runs(model, whole, way, other, device=options.device)]:
            break
    else:
        return  # it takes no such number at all
    if running == [whole.dims]:
        return
    places = range(len(whole.dims))
    changed = [[i for i in places if way[i] != whole.dims[i]] for way in running]
    better = [_as_option(whole, way, chosen) for way, chosen in zip(running, changed, strict=True)]
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(whole.names, whole.tensors, strict=True))
    raise ValueError(
        f"{num_samples} samples, and another axis of that size ({shapes}): with {other} samples in dimension 0 of each "
        f"input the model fails, and it runs with {' or '.join(better)}. Expected that; or, where dimension 0 is the "
        f"batch all the same, {_as_option(whole, whole.dims, sorted({*chain(*changed)}))}"
    )


def _as_option(whole: Arguments, dims: _Dims, chosen: Sequence[int]) -> str:
    return f"batch_dims={{{', '.join(f'{key_of(whole.names[i])}: {dims[i]}' for i in chosen)}}}"


def _refuse_target(options: Options, given: Given) -> None:
    """ValueError where the inputs have the batch in another dimension, and the target could in either."""
    for dim in {dim for dim in given.arguments.dims if dim} if TARGET not in options.calls.batch_dims else ():
        for leaf in pytree.tree_leaves(given.target):
            shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
            if shape[:1] == shape[dim : dim + 1] == (given.num_samples,):
                raise ValueError(
                    f"a target of shape {shape} for inputs with {given.num_samples} samples in dimension {dim}: "
                    f"expected batch_dims={{{TARGET!r}: {dim}}} beside theirs, or {TARGET!r}: 0"
                )


def _ways(options: Options, whole: Arguments) -> Iterator[list[_Dims]]:
    """Dimensions of the batch: as they are; then of one tensor others of that size, or none; then of two."""
    calls, places = options.calls, list(zip(whole.tensors, whole.dims, whole.form.paths, strict=True))
    others = {
        i: [*(d for d in range(1, x.dim()) if x.shape[d] == whole.num_samples), None]
        for i, (x, dim, path) in reversed([*enumerate(places)])
        if dim is not None and calls.batch_dims.keys().isdisjoint(keys_of(path, calls.names))
    }
    for changes in range(3):
        yield [
            tuple(dict(zip(chosen, dims, strict=True)).get(i, dim) for i, dim in enumerate(whole.dims))
            for chosen in combinations(others, changes)
            for dims in product(*(others[i] for i in chosen))
        ]


def _runs(
    model: nn.Module, whole: Arguments, dims: Sequence[int | None], num_samples: int, *, device: torch.device
) -> bool:
    tensors = tuple(
        x.new_empty([num_samples if d == dim else size for d, size in enumerate(x.shape)], device="meta")
        for x, dim in zip(whole.tensors, dims, strict=True)
    )
    try:
        model_units(model, Arguments(whole.form, tensors, tuple(dims)), enter_unit=None, device=device)
    except ValueError:
        return False
    return any(dim is not None for dim in dims)

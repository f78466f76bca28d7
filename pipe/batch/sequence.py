"""Cutting microbatches into slices along the sequence.

microbatch   tokens [B, T], target [B, T]
slice q      tokens [B, start : end], target [B, start : end]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch.utils import _pytree as pytree

from ...partition.model.batch_dims import TARGET, BatchDims, key_of, keys_of, parameter_names
from ...partition.model.forms import Arguments
from ..settings.given import Given, signature_of
from ..settings.options import Options
from ..stage.slices import TokenSpan

Slice: TypeAlias = tuple[Given, TokenSpan]  # of a microbatch, and where it stands in its sequence


def _spans(lengths: Sequence[int] | None, total: int, num_slices: int) -> list[TokenSpan]:
    if total < num_slices:
        raise ValueError(
            f"a sequence of {total} tokens for num_slices={num_slices}: expected at least one token a slice"
        )
    if lengths is None:
        least, longer = divmod(total, num_slices)
        lengths = [least + (q < longer) for q in range(num_slices)]
    elif sum(lengths) != total:
        raise ValueError(
            f"lengths={list(lengths)} make {sum(lengths)} tokens, and the sequences of this batch have "
            f"{total}: expected lengths that add up to {total}, or none, for slices as equal as can be"
        )
    return [TokenSpan(start, end, total) for start, end in pairwise([0, *accumulate(lengths)])]


def cut_in_slices(options: Options, given: Given, num_slices: int) -> list[Slice]:
    """The slices of a microbatch; ValueError where it is not clear where the sequence stands in a tensor."""
    arguments, named = given.arguments, options.slices.dims or {}
    names = parameter_names(signature_of(options.model))
    keys = [next((key for key in keys_of(path, names) if key in named), None) for path in arguments.form.paths]
    dims = _dims(arguments, keys, named)
    total = next((x.shape[d] for x, d in zip(arguments.tensors, dims, strict=True) if d is not None), None)
    if total is None:
        raise ValueError(
            "no input has a sequence: expected one with it in dimension 1, or named by stagewright.Slices(dims=)"
        )
    for key, name, x, dim in zip(keys, arguments.names, arguments.tensors, dims, strict=True):
        if dim is not None and (x.shape[dim] != total or (key is None and total in x.shape[2:])):
            raise ValueError(_unclear(name, x, key_of(name), total))
    leaves, spec = pytree.tree_flatten(given.target)
    target_dims = [_target_dim(leaf, named, total) for leaf in leaves]
    slices = []
    for span in _spans(options.slices.lengths, total, num_slices):
        tensors = tuple(span.part(x, dim) for x, dim in zip(arguments.tensors, dims, strict=True))
        target = [
            span.part(leaf, dim) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, dim in zip(leaves, target_dims, strict=True)
        ]
        part = replace(
            given,
            arguments=Arguments(arguments.form, tensors, arguments.dims),
            target=pytree.tree_unflatten(target, spec),
        )
        slices.append((part, span))
    return slices


def _dims(arguments: Arguments, keys: Sequence[str | int | None], named: BatchDims) -> list[int | None]:
    found: list[int | None] = []
    for key, name, x, batch in zip(keys, arguments.names, arguments.tensors, arguments.dims, strict=True):
        if key is not None:
            found.append(_checked(f"dims[{key!r}]", name, x, named[key], batch))
        elif x.dim() == 0:
            found.append(None)
        elif x.dim() == 1 or batch != 0:
            raise ValueError(_unclear(name, x, key_of(name)))
        else:
            found.append(1)
    return found


def _target_dim(leaf: object, named: BatchDims, total: int) -> int | None:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return None
    if TARGET in named:
        dim = _checked(f"dims[{TARGET!r}]", "the target", leaf, named[TARGET], None)
        if dim is None or leaf.shape[dim] == total:
            return dim
        raise ValueError(_unclear("the target", leaf, repr(TARGET), total))
    if leaf.dim() < 2 or leaf.shape[1] != total or total in leaf.shape[2:]:
        raise ValueError(_unclear("the target", leaf, repr(TARGET), total))
    return 1


def _checked(option: str, name: str, x: torch.Tensor, dim: int | None, batch: int | None) -> int | None:
    if dim is None:
        return None
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == batch:
        raise ValueError(
            f"{option}={dim} and {name} has shape {tuple(x.shape)}: expected a dimension below {x.dim()} beside that "
            f"of the batch, or None where all slices share it"
        )
    return dim % x.dim()


def _unclear(name: str, x: torch.Tensor, key: str, total: int | None = None) -> str:
    of = "" if total is None else f" of {total} tokens"
    return (
        f"{name} has shape {tuple(x.shape)}, and where in it the sequence{of} stands is not clear: expected it in "
        f"dimension 1, and nowhere else; or dims={{{key}: its dimension, or None where all slices share it}}"
    )

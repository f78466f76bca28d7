"""Data of Trainer and accelerate for a pipeline: data replicas as processes, and batches as microbatches."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ..pipe import PipelineModule


@contextmanager
def seen_as(states: tuple[Any, ...], index: int, count: int) -> Iterator[None]:
    """Context in which accelerate takes this process for number `index` of `count`."""
    before = [(state.process_index, state.num_processes) for state in states]
    try:
        for state in states:
            state.process_index, state.num_processes = index, count
        yield
    finally:
        for state, (own, number) in zip(states, before, strict=True):
            state.process_index, state.num_processes = own, number


def read_pipeline(pipeline: object) -> dict[str, Any]:
    known = inspect.signature(PipelineModule).parameters
    if not isinstance(pipeline, Mapping | None) or not all(isinstance(name, str) for name in pipeline or {}):
        raise ValueError(
            f'pipeline={pipeline!r:.60}: expected arguments of PipelineModule, as in {{"schedule": "1f1b"}}'
        )
    for name in pipeline or {}:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or list(known)[1:-1]
            raise ValueError(f"pipeline={{{name!r}: ...}}: expected {', '.join(map(repr, near))}")
    return dict(pipeline or {})


def from_all(value: object, replica: int) -> list[Any]:
    """Values of all processes, in order of their data replica or share of a batch; None is left out. Collective."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (replica, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)))
    return [each for _, each in sorted(dict(pair for pair in found if pair[1] is not None).items())]


Batch = Mapping[str, Any]
_IGNORED = -100  # a label that a loss leaves out


def num_rows(batch: Batch) -> int:
    return next((len(x) for x in batch.values() if isinstance(x, torch.Tensor) and x.dim()), 0)


def cut(batch: Batch, rows: slice | torch.Tensor) -> dict[str, Any]:
    size = num_rows(batch)
    return {
        name: x[rows] if isinstance(x, torch.Tensor) and x.dim() and len(x) == size else x for name, x in batch.items()
    }


def one_each(batches: Sequence[Batch], count: int) -> list[Batch] | None:
    """One microbatch per batch, and empty ones after them; None if that does not make `count`."""
    empty = _without_labels(batches[-1])
    if len(batches) > count or (len(batches) < count and empty is None):
        return None
    return [*batches, *[empty or {}] * (count - len(batches))]


def arranged(batches: Sequence[Batch], count: int) -> Batch:
    whole = _joined(batches)
    return {"microbatches": _divided(batches, count)} if whole is None or num_rows(whole) < count else whole


def _without_labels(batch: Batch) -> Batch | None:
    """The same without labels to learn from; None if its labels cannot be ignored."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dtype not in (torch.int64, torch.int32):
        return None
    return {**batch, "labels": torch.full_like(labels, _IGNORED)}


def _joined(batches: Sequence[Batch]) -> Batch | None:
    """One batch of all rows; None if they differ in more than their number, as padded ones do."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    shapes = [{name: getattr(x, "shape", (0,))[1:] for name, x in batch.items()} for batch in batches]
    are_rows = all(
        isinstance(x, torch.Tensor) and x.dim() and len(x) == num_rows(b) for b in batches for x in b.values()
    )
    if not are_rows or any(shape != shapes[0] for shape in shapes):
        return None
    return {name: torch.cat([batch[name] for batch in batches]) for name in first}


def _divided(batches: Sequence[Batch], count: int) -> list[Batch]:
    """The same rows in `count` microbatches, since an epoch's last step has fewer batches."""
    pieces = list(batches)
    while len(pieces) < count:
        longest = max(range(len(pieces)), key=lambda number: num_rows(pieces[number]))
        size, piece = num_rows(pieces[longest]), pieces[longest]
        if size < 2:
            filled = one_each(pieces, count)
            if filled is None:
                raise ValueError(
                    f"a step of {len(pieces)} samples cannot be cut into {count} microbatches: expected "
                    f"dataloader_drop_last=True, or fewer gradient_accumulation_steps"
                )
            return filled
        halves = slice(None, size // 2), slice(size // 2, None)
        pieces[longest : longest + 1] = [cut(piece, rows) for rows in halves]
    if len(pieces) > count:
        raise ValueError(
            f"{len(pieces)} batches of several shapes make no {count} microbatches: expected num_microbatches="
            f"{len(pieces)}, as gradient_accumulation_steps says"
        )
    return pieces

"""Memory that edits save, measured, and what it buys: the largest microbatch under the same limit.

kept     what a forward leaves, its outputs included        } measured for two sizes of a microbatch; around
peak     the highest level of a forward and its backward    } these both are straight lines
total    weights, gradients and optimizer's state + (in flight - 1) kept + peak
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...partition.profiler.memory import bytes_of, peaks
from ...partition.quantities import size as size_of
from ...schedules.wording import size
from ..stage.nested import mapped
from .beside import called, random_backward
from .kinds import Edit


def explain(
    edits: Sequence[Edit],
    edited: Callable[[Sequence[Edit]], nn.Module],
    example: Any,
    *,
    limit: str,
    in_flight: int,
    state: float,
) -> str:
    """A table: a row for the untouched model, and one for each edit with those in front of it."""
    most = size_of("limit", limit)
    rows = [("with", "kept of a microbatch", "in all", f"largest microbatch in {limit}")]
    for number in range(len(edits) + 1):
        name = str(edits[number - 1]) if number else "no edit"
        rows.append((name, *_row(edited(edits[:number]), example, limit=most, in_flight=in_flight, state=state)))
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)


def _row(model: nn.Module, example: Any, *, limit: float, in_flight: int, state: float) -> tuple[str, str, str]:
    whole = _samples(example)
    half = whole // 2
    (kept, peak), (less_kept, less_peak) = (measure(model, first(example, each)) for each in (whole, half))
    fixed = bytes_of(model.parameters()) * (1 + state) + bytes_of(model.buffers())

    def total(samples: int) -> float:
        share = (samples - half) / (whole - half)
        return (
            fixed + (in_flight - 1) * (less_kept + share * (kept - less_kept)) + less_peak + share * (peak - less_peak)
        )

    each = total(whole) - total(whole - 1)
    most = whole + math.floor((limit - total(whole)) / each) if each > 0 else 0
    fits = str(most) if most > 0 else f"none: 1 takes {size(total(1))}"
    return size(kept), size(total(whole)), fits


def measure(model: nn.Module, example: Any) -> tuple[int, int]:
    """Bytes that a forward leaves, and the highest level of one with its backward, gradients of weights included."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def forward() -> Any:
        leaves = mapped(example, lambda x: x.detach().requires_grad_(x.is_floating_point() or x.is_complex()))
        return called(model, mapped(leaves, torch.clone))  # which may be changed in place

    random_backward(forward())  # what is made once, is made
    model.zero_grad()
    (_, kept), (peak, _) = peaks([forward, lambda: random_backward(forward())], device)
    model.zero_grad()
    return kept, peak


def _samples(example: Any) -> int:
    sizes: list[int] = []
    mapped(example, lambda x: sizes.append(x.shape[0] if x.dim() else 0) or x)  # type: ignore[func-returns-value]
    if not sizes or sizes[0] < 2:
        raise ValueError(f"memory: an example of {sizes[0] if sizes else 0} samples: expected at least 2")
    return sizes[0]


def first(example: Any, number: int) -> Any:
    """So many samples of it: of tensors that have one size with its first tensor's batch."""
    whole = _samples(example)

    return mapped(example, lambda x: x[:number] if x.dim() and x.shape[0] == whole else x)

"""Edits compared with the untouched model, one more at a time: the first whose numbers differ is named.

Compared are outputs, every gradient, gradients of inputs, buffers, and which parameters are one, wherever an edit puts
them. Inputs are an example; random numbers are seeded alike, and the backward begins with a random gradient of each
output. Rounding of a type shorter than float32 is measured as the effect of weights that are off by it. A gradient that
this changes as a whole is not compared, and one more edit may change none by much more.

The memory that edits save is measured: what a forward leaves, and the highest level of a forward and its backward, for
two sizes of a microbatch, between which both are taken as straight lines. The largest microbatch is the one with which
weights, gradients and optimizer state + (in flight - 1) kept + peak are under the limit.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...partition.profiler.memory import bytes_of, peaks
from ...partition.quantities import size as size_of
from ...schedules.wording import size
from ..stage.nested import mapped
from ..verify.compare import Outcome, first_apart, graph_of, rounded, tolerance_of, types_of
from ..verify.verification import VerificationError
from .kinds import Edit

_REPEATS = 5
_SLOWER = 1.02  # a ratio of medians that may be noise
_NOISE = 0.25  # share of a gradient from which it is only rounding
_ROUNDINGS = 2.2  # that one more edit may make


class Edited(NamedTuple):
    """A copy of a model with some edits; `names` are by name in the untouched model, `lost` no longer exist."""

    model: nn.Module
    names: Mapping[str, str]
    lost: Sequence[str]


class Ran(NamedTuple):
    """Numbers of a run."""

    outcome: Outcome
    tolerance: float  # of its shortest type
    rounding: float  # of that type, if it is shorter than float32; else 0
    tied: list[set[str]]  # sets of names of one parameter


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def found_again(model: nn.Module, before: Mapping[str, Tensor]) -> Edited:
    """An edited model, with the tensors that it had before, found by identity or else by name."""
    now = tensors_of(model)
    moved = {id(x): name for name, x in now.items() if name not in before}
    names = {name: name if now.get(name) is x else moved.get(id(x), name) for name, x in before.items()}
    return Edited(model, names, [name for name, place in names.items() if place not in now])


def run(edited: Edited, example: Any, *, seed: int) -> Ran:
    """A forward and backward for a tuple of arguments, or a dict of keywords; the gradients stay."""
    model = edited.model
    leaves: list[Tensor] = []

    def fresh(x: Tensor) -> Tensor:
        leaves.append(x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex()))
        return leaves[-1].clone()  # which may be changed in place

    given = mapped(example, fresh)
    model.zero_grad()
    _seed(seed)
    outputs = _tensors(called(model, given))
    if not outputs:
        raise ValueError(f"verify: {type(model).__name__} returns no tensor that could be compared: expected one")
    nodes = graph_of(outputs)
    short = [torch.finfo(dtype).eps for dtype in types_of(nodes) if dtype.itemsize < 4]
    _seed(seed + 1)
    random_backward(outputs)
    now = tensors_of(model)
    own = {name: now[place] for name, place in edited.names.items() if place in now}
    parameters = {name: p for name, p in own.items() if isinstance(p, nn.Parameter)}
    same: dict[int, set[str]] = {}
    for name, p in parameters.items():
        same.setdefault(id(p), set()).add(name)
    inputs = {f"input {number}": x.grad for number, x in enumerate(leaves) if x.requires_grad}
    gradients = inputs | {name: p.grad for name, p in parameters.items()}
    outcome = Outcome(
        loss=0.0,
        gradients={name: None if grad is None else _whole(grad) for name, grad in gradients.items()},
        buffers={name: _whole(x) for name, x in own.items() if name not in parameters},
        outputs=[[_whole(x)] for x in outputs],
    )
    tied = [names for names in same.values() if len(names) > 1]
    return Ran(outcome, tolerance_of(nodes), max(short, default=0.0), tied)


def called(model: nn.Module, given: Any) -> Any:
    if not isinstance(given, Mapping | list | tuple):
        raise ValueError(f"example: a {type(given).__name__}: expected a tuple of arguments, or a dict of keywords")
    return model(**given) if isinstance(given, Mapping) else model(*given)


def random_backward(output: Any) -> None:
    trained = [x for x in _tensors(output) if x.requires_grad]
    torch.autograd.backward(trained, [torch.randn_like(x) for x in trained])


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def _seed(seed: int) -> None:
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(seed)


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def first_difference(plain: Ran, edited: Ran, noise: Mapping[str, float]) -> str | None:
    """Text for the first difference; None for none. Names in one of them only, and noisy gradients, do not count."""
    theirs, ours = plain.outcome, edited.outcome
    if len(theirs.outputs or ()) != len(ours.outputs or ()):
        return f"the model returns {len(ours.outputs or ())} tensors, and {len(theirs.outputs or ())} untouched"
    for number, ((one,), (other,)) in enumerate(zip(theirs.outputs or (), ours.outputs or (), strict=True)):
        if one.dtype != other.dtype:
            return f"output {number} is of {other.dtype}, and of {one.dtype} untouched"
    sizes = [{name: float(x.norm()) for name, x in _numbers(each).items()} for each in (theirs, ours)]
    is_noise = {name for name, off in noise.items() if off > _NOISE * max(each.get(name, 0.0) for each in sizes)}
    kept = {name: grad for name, grad in ours.gradients.items() if name not in is_noise}
    tolerance = max(plain.tolerance, edited.tolerance)
    found = first_apart(theirs, replace(ours, gradients=kept), tolerance, where="with this edit")
    if found is not None:
        return found[1].format(name=repr(found[0]))
    for names in plain.tied:
        left = names & ours.gradients.keys()
        if len(left) > 1 and not any(left <= other for other in edited.tied):
            return f"{', '.join(map(repr, sorted(left)))} are no longer one parameter"
    return None


def more_than_noise(before: Ran, edited: Ran, noise: Mapping[str, float]) -> str | None:
    """Text for a change by one more edit of a model in a short type, whose tolerance is wide; None for none."""
    sizes = {name: float(x.norm()) or 1.0 for name, x in _numbers(edited.outcome).items()}
    for name, off in _apart(before.outcome, edited.outcome).items():
        share, rounding = off / sizes[name], noise.get(name, 0.0) / sizes[name]
        if share > 1e-3 + _ROUNDINGS * rounding * (1 + rounding):
            what = f"the gradient of {name!r}" if name in edited.outcome.gradients else name
            return f"{what} changes by {share:.2g} of its norm, for which rounding accounts for {rounding:.2g}"
    return None


def _apart(one: Outcome, other: Outcome) -> dict[str, float]:
    theirs = _numbers(other)
    pairs = [(name, x, theirs[name]) for name, x in _numbers(one).items() if name in theirs]
    return {name: float((x - y).norm()) for name, x, y in pairs if x.shape == y.shape}


def _numbers(outcome: Outcome) -> dict[str, Tensor]:
    found = {f"output {number}": x for number, (x,) in enumerate(outcome.outputs or ())}
    found |= {name: grad for name, grad in outcome.gradients.items() if grad is not None}
    dense = {name: x.to_dense() if x.is_sparse else x for name, x in found.items() if x.is_floating_point()}
    return {name: x.double() for name, x in dense.items()}


def verify(
    edits: Sequence[Edit], edited: Callable[[Sequence[Edit]], Edited], example: Any, *, seed: int
) -> tuple[list[tuple[Edit, float]], list[tuple[Edit, str]]]:
    """(edits that their gate takes back, with ratios of times; tensors not compared, with the edit that removes them).

    `edited` copies the model with some of the edits. Raises VerificationError for the first edit whose numbers differ.
    """
    plain = before = run(edited([]), example, seed=seed)
    applied: list[Edit] = []
    slower: list[tuple[Edit, float]] = []
    lost: list[tuple[Edit, str]] = []
    for each in edits:
        model = edited([*applied, each])
        ran, noise = run(model, example, seed=seed), {}
        if ran.rounding:
            rounded = run(_rounded(edited([*applied, each]), ran.rounding), example, seed=seed)
            noise = _apart(ran.outcome, rounded.outcome)
        difference = first_difference(plain, ran, noise)
        if difference is None and ran.rounding and before.rounding == ran.rounding:
            difference = more_than_noise(before, ran, noise)
        if difference is not None:
            raise VerificationError(f"{each}: {difference}. Expected the untouched model's numbers")
        if each.given.get("gate"):
            seconds, after = _seconds(edited(applied), model, example=example, seed=seed)
            if after > _SLOWER * seconds:
                slower.append((each, after / seconds))
                continue
        applied.append(each)
        before = ran
        lost += [(each, name) for name in model.lost if name not in [name for _, name in lost]]
    return slower, lost


@torch.no_grad()
def _rounded(edited: Edited, rounding: float) -> Edited:
    """Change the weights by up to the rounding, each by another share."""
    for p in edited.model.parameters():
        held = p.to_local() if isinstance(p, DTensor) else p
        held.copy_(rounded(held, rounding))
    return edited


def _seconds(*models: Edited, example: Any, seed: int) -> list[float]:
    """Medians of a forward and backward of each, repeated in turn [s]."""
    took: list[list[float]] = [[] for _ in models]
    for _ in range(_REPEATS):
        for each, model in zip(took, models, strict=True):
            started = time.perf_counter()
            run(model, example, seed=seed)
            each.append(time.perf_counter() - started)
    return [statistics.median(each) for each in took]


def explain(
    edits: Sequence[Edit],
    edited: Callable[[Sequence[Edit]], Edited],
    example: Any,
    *,
    limit: str,
    in_flight: int,
    state: float,
) -> str:
    """A table with a row for the untouched model, and one for each edit together with those before it."""
    most = size_of("limit", limit)
    rows = [("with", "kept of a microbatch", "in all", f"largest microbatch in {limit}")]
    for number in range(len(edits) + 1):
        name = str(edits[number - 1]) if number else "no edit"
        rows.append((name, *_row(edited(edits[:number]).model, example, limit=most, in_flight=in_flight, state=state)))
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
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def forward() -> Any:
        leaves = mapped(example, lambda x: x.detach().requires_grad_(x.is_floating_point() or x.is_complex()))
        return called(model, mapped(leaves, torch.clone))  # which may be changed in place

    random_backward(forward())  # allocates what is made only once
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
    """The first samples of an example: of tensors whose size is that of its first tensor's batch."""
    whole = _samples(example)

    return mapped(example, lambda x: x[:number] if x.dim() and x.shape[0] == whole else x)

"""Edits held against the untouched model, one more at a time: the first whose numbers depart is named.

compared    outputs, every gradient, gradients of inputs, which parameters are one
inputs      an example; random numbers are seeded alike; the backward begins with a random gradient of each output
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..stage.nested import mapped
from ..verify.compare import differs, graph_of, size, tolerance_of

if TYPE_CHECKING:
    from .listed import Edits

_BELOW_THE_LARGEST = 1e-3  # gradients that are so much smaller than the model's largest count as that small
_REPEATS = 5
_SLOWER = 1.02  # a ratio of medians that says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """One forward and backward.

    Arguments:
        inputs: gradients of floating inputs, in order.
        tied: names that are one parameter.
        tolerance: of the shortest type that was computed in.
    """

    outputs: Sequence[Tensor]
    gradients: Mapping[str, Tensor | None]
    inputs: Sequence[Tensor | None]
    tied: frozenset[frozenset[str]]
    tolerance: float


def run(model: nn.Module, example: Any, *, seed: int) -> _Ran:
    """A forward and backward of the model for a tuple of arguments, or a dict of keywords; its gradients are left."""
    leaves: list[Tensor] = []

    def fresh(x: Tensor) -> Tensor:
        leaves.append(x.detach().clone().requires_grad_(x.is_floating_point()))
        return leaves[-1]

    given = mapped(example, fresh)
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(**given) if isinstance(given, Mapping) else model(*given)
    outputs = [x for x in _tensors(output) if x.is_floating_point()]
    trained = [x for x in outputs if x.requires_grad]
    torch.manual_seed(seed + 1)
    tolerance = tolerance_of(graph_of(trained))
    torch.autograd.backward(trained, [torch.randn_like(x) for x in trained])
    named = list(model.named_parameters(remove_duplicate=False))
    same: dict[int, set[str]] = {}
    for name, p in named:
        same.setdefault(id(p), set()).add(name)
    return _Ran(
        outputs=[_whole(x) for x in outputs],
        gradients={name: None if p.grad is None else _whole(p.grad) for name, p in named},
        inputs=[None if x.grad is None else _whole(x.grad) for x in leaves if x.is_floating_point()],
        tied=frozenset(frozenset(names) for names in same.values() if len(names) > 1),
        tolerance=tolerance,
    )


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def first_difference(plain: _Ran, edited: _Ran) -> str | None:
    """What departs, in words; None: nothing. Names that only one of them has are left out."""
    tolerance = max(plain.tolerance, edited.tolerance)
    gradients = [g for g in plain.gradients.values() if g is not None]
    floor = _BELOW_THE_LARGEST * max(map(size, gradients), default=0.0)
    if len(plain.outputs) != len(edited.outputs):
        return f"the model returns {len(edited.outputs)} tensors, and {len(plain.outputs)} untouched"
    for what, theirs, ours in _pairs(plain, edited):
        if theirs is None or ours is None:
            if (theirs is None) != (ours is None):
                return f"{what} is {'missing' if ours is None else 'there'}, other than untouched"
            continue
        found = differs(theirs, ours, tolerance=tolerance, floor=floor)
        if found is not None:
            return f"{what} {found}"
    for names in plain.tied:
        left = {name for name in names if name in edited.gradients}
        if len(left) > 1 and not any(left <= other for other in edited.tied):
            return f"{', '.join(map(repr, sorted(left)))} are one parameter no more"
    return None


def _pairs(plain: _Ran, edited: _Ran) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    for number, both in enumerate(zip(plain.outputs, edited.outputs, strict=True)):
        yield f"output {number}", *both
    for number, each in enumerate(zip(plain.inputs, edited.inputs, strict=True)):
        yield f"the gradient of input {number}", *each
    for name, gradient in plain.gradients.items():
        if name in edited.gradients:
            yield f"the gradient of {name!r}", gradient, edited.gradients[name]


class EditError(ValueError):
    """An edit changes what the model computes; the message names the edit and the first tensor that departs."""


def verify(edits: Edits, example: Any, *, mesh: Any, seed: int) -> list[str]:
    """See Edits.verify."""
    plain = run(copy.deepcopy(edits.model), example, seed=seed)
    applied: list[Any] = []
    left: list[str] = []
    for each in list(edits):
        if each.kind.word == "shard" and mesh is None:
            left.append(f"not run: {each}: expected verify(..., mesh=), of the tensor group")
            continue
        model = _edited(edits, [*applied, each], mesh)
        difference = first_difference(plain, run(model, example, seed=seed))
        if difference is not None:
            raise EditError(f"{each}: {difference}. Expected the untouched model's numbers")
        if getattr(each.kind, "gate", False):
            before, after = _seconds(_edited(edits, applied, mesh), model, example=example, seed=seed)
            if after > _SLOWER * before:
                left.append(f"taken back: {each}: {after / before:.2f} times as long as without; gate=False keeps it")
                continue
        applied.append(each)
    edits.keep_only(applied, those_not_run=mesh is None)
    return left


def _edited(edits: Edits, applied: Sequence[Any], mesh: Any) -> nn.Module:
    other = type(edits)(copy.deepcopy(edits.model))
    for each in applied:
        other.add(each)
    return other.build(mesh)


def _seconds(*models: nn.Module, example: Any, seed: int) -> list[float]:
    """Of a forward and backward of each, medians of repetitions in turn [s]."""
    took: list[list[float]] = [[] for _ in models]
    for _ in range(_REPEATS):
        for each, model in zip(took, models, strict=True):
            started = time.perf_counter()
            run(model, example, seed=seed)
            each.append(time.perf_counter() - started)
    return [statistics.median(each) for each in took]

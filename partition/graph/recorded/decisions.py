"""Decisions of the code between the units on numbers that it drew itself, such as which layer to leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from .calls import Call, GlueCall
from .templates import Constant, Parts, Ref, Slot, State, Template

# What Python calls to read a tensor's value.
READS = {getattr(torch.Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item")}
_SAMPLES = 64


def calls_behind(number: int, made_by: Sequence[int], calls: Sequence[Call]) -> list[GlueCall] | None:
    """The calls that make a value, in order; None where they take an input, a parameter or a unit's value.

    Arguments:
        number: of the value.
        made_by: call, by value number; -1: an input.
    """
    found: dict[int, GlueCall] = {}
    todo = [made_by[number]]
    while todo:
        at = todo.pop()
        call = calls[at] if at >= 0 else None
        if not isinstance(call, GlueCall) or call.changed or call.writes or call.is_effect:
            return None
        if at in found:
            continue
        found[at] = call
        for each in call.templates():
            if isinstance(each, Slot | State):
                return None
            if isinstance(each, Ref):
                todo.append(made_by[each.number])
    return [found[at] for at in sorted(found)]


def samples_of(number: int, calls: Sequence[GlueCall], read: Callable[[Any], object]) -> list[object]:
    """Readings of a value that these calls make, of real tensors: one where none of them draws random numbers."""
    samples = []
    for _ in range(_SAMPLES if any(call.is_random for call in calls) else 1):
        values: dict[int, Any] = {}
        with unset_fake_temporarily():
            for call in calls:
                result = call.function(*_filled(call.args, values), **_filled(call.kwargs, values))
                leaves = pytree.tree_leaves(result)
                values |= {value: leaves[place] for place, value in call.results.items()}
            samples.append(read(values[number]))
    return samples


def _filled(template: Template, values: Mapping[int, Any]) -> Any:
    """Arguments with values in the places of references."""
    if isinstance(template, Ref):
        return values[template.number]
    if isinstance(template, Constant):
        return template.value
    assert isinstance(template, Parts)
    parts = [_filled(each, values) for each in template.parts]
    if template.kind is dict:
        return dict(zip(template.keys, parts, strict=True))
    if template.kind is slice:
        return slice(*parts)
    if template.kind is None:
        assert template.spec is not None
        return pytree.tree_unflatten(parts, template.spec)
    return template.kind(parts)

"""Gradients in float16, which become 0 without a loss scale: found in the graphs that shape inference makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...partition.graph.fakes import original_of


def float16_gradients(outputs: Sequence[torch.Tensor], names: Mapping[int, str]) -> str | None:
    """Description of what some outputs were computed with in float16; None: no gradient is in float16 on the way back.

    Arguments:
        outputs: with their graph, of fake tensors.
        names: of the model's parameters, by id.
    """
    pending: list[Any] = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if any(spec.dtype is torch.float16 for spec in getattr(node, "_input_metadata", ())):
            return _near(node, names)
        fresh = [ahead for ahead, _ in node.next_functions if ahead is not None and ahead not in seen]
        seen.update(fresh)
        pending += fresh
    return None


def _near(node: Any, names: Mapping[int, str]) -> str:
    """The parameter next to an operation, or else the operation."""
    pending = [node]
    for each in pending:  # grows
        variable = getattr(each, "variable", None)
        name = names.get(id(original_of(variable))) if variable is not None else None
        if name is not None:
            return f"with parameter {name!r}"
        pending += [ahead for ahead, _ in each.next_functions if ahead is not None and ahead not in pending]
    return f"in an operation without parameters ({node.name().removesuffix('0').removesuffix('Backward')})"

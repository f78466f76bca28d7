"""torch.export, with what a pipeline must know besides the graph: batch sizes, the form of the output, errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from .source_line import first_line, users_line


class BatchSizes(NamedTuple):
    """The batch sizes for which a graph is right: forward may branch on the size, or fix it (`int(x.shape[0])`)."""

    least: int = 1
    most: float = math.inf

    def check(self, size: int) -> None:
        """ValueError for a size of which nothing is known."""
        if not self.least <= size <= self.most:
            known = f"exactly {self.least}" if self.least == self.most else f"{self.least} to {self.most:g}"
            raise ValueError(
                f"microbatches of {size} samples for a model that was traced for {known}: its forward depends on the "
                f"batch size (a branch on x.shape[0], int(x.shape[0]), a loop over samples). Expected batches that "
                f"num_microbatches divides into such sizes, or x.shape[0] used as it is"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How a model's flat outputs go together, with what is no tensor among them (None, numbers) by position."""

    spec: pytree.TreeSpec
    constants: Mapping[int, object]

    def assemble(self, flat: Sequence[object]) -> object:
        """The model's output, with these in the places of its tensors."""
        tensors = iter(flat)
        leaves = [
            self.constants[i] if i in self.constants else next(tensors) for i in range(len(flat) + len(self.constants))
        ]
        return pytree.tree_unflatten(leaves, self.spec)


def export_model(model: nn.Module, example_inputs: Sequence[torch.Tensor]) -> torch.export.ExportedProgram:
    """The model's graph for any batch size that its forward allows.

    Raises ValueError, with the user's source line, for a model that cannot be traced whole.
    """
    for position, value in enumerate(example_inputs):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"example_inputs[{position}] is {type(value).__name__}: expected a tensor, batch first")
    # A size of 1 would be taken for a constant.
    batches = tuple(torch.cat([x, x]) if x.dim() and x.shape[0] == 1 else x for x in example_inputs)
    dynamic = tuple({0: Dim.AUTO} if x.dim() else {} for x in batches)
    try:
        inspect.signature(model.forward).bind(*batches)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}.forward{inspect.signature(model.forward)} does not take {len(batches)} tensors "
            f"({error}): expected all that it needs, in its order; example_inputs=(...) or train_step(*inputs, target)"
        ) from None
    try:
        return torch.export.export(model, batches, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        raise ValueError(
            f"torch.export cannot trace {type(model).__name__} whole{users_line(error)}: {first_line(error)}. "
            f"Expected a model without data-dependent Python control flow; change that line, make the model an "
            f"nn.Sequential, or give the parts yourself: PipelineModule(stages=[...])"
        ) from error


def batch_sizes(placeholders: Sequence[fx.Node], ranges: Mapping[Any, Any]) -> BatchSizes:
    """The sizes that the exported graph allows.

    Arguments:
        placeholders: of the model's inputs.
        ranges: by symbol, as torch.export gives them.
    """
    least, most = 1, math.inf
    for node in placeholders:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        size = value.shape[0]
        symbol = size.node.expr if isinstance(size, torch.SymInt) else None
        if symbol is None or symbol.is_number:
            least, most = max(least, int(size)), min(most, int(size))
        elif symbol in ranges:
            span = ranges[symbol]
            least = max(least, int(span.lower) if span.lower > 2 else 1)  # 2 is where torch begins to tell sizes apart
            most = min(most, float(span.upper) if span.upper < 1 << 62 else math.inf)
    return BatchSizes(least, most)

"""torch.export, with what a pipeline must know besides the graph: batch sizes, the form of the output, errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import Dim

from .forms import Arguments, Form, FormError, Tensors
from .source_line import first_line, users_line
from .untouched import untouched


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


def export_model(model: nn.Module, example: Arguments) -> tuple[fx.GraphModule, Mapping[Any, Any], Form]:
    """(the model's graph for any batch size that its forward allows, ranges of its symbols, the form of its output).

    The graph takes the tensors of arguments of the example's form and returns the tensors of the output, flat.

    Raises ValueError, with the user's source line, for a model that cannot be traced whole.
    """
    # A size of 1 would be taken for a constant.
    batches = tuple(
        x if dim is None or x.shape[dim] != 1 else torch.cat([x, x], dim)
        for x, dim in zip(example.tensors, example.dims, strict=True)
    )
    dynamic = {"tensors": tuple({} if dim is None else {dim: Dim.AUTO} for dim in example.dims)}
    try:
        example.call(inspect.signature(model.forward).bind)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}.forward{inspect.signature(model.forward)} does not take {example} ({error}): "
            f"expected all that it needs, in its order or by name; example_inputs=(...) or train_step(*inputs, target)"
        ) from None
    try:
        with untouched(model, device=batches[0].device), _flat(model, example.form) as forms:
            exported = torch.export.export(model, batches, dynamic_shapes=dynamic, strict=False)
    except _ShapeNumberError as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(
            f"torch.export cannot trace {type(model).__name__} whole{users_line(error)}: {first_line(error)}. "
            f"Expected inputs that it takes (given: {example}), and a model without data-dependent Python control "
            f"flow; change that line, make the model an nn.Sequential, or give the parts yourself: "
            f"PipelineModule(stages=[...])"
        ) from error
    return exported.module(check_guards=False), exported.range_constraints, forms[-1]


class _ShapeNumberError(Exception):
    """The model returns a number that follows from the shape of its input."""


@contextmanager
def _flat(model: nn.Module, form: Form) -> Iterator[list[Form]]:
    """Within: the model is a function from flat tensors to flat tensors, which is what torch.export sees.

    A module around it would do the same, but torch.export follows buffers that are assigned anew at the root alone.

    Arguments:
        form: of the model's arguments.

    Yields a list that holds the form of its output after each run.
    """
    own: dict[str, object] = {
        name: vars(model)[name] for name in ("forward", "_forward_hooks", "_forward_pre_hooks") if name in vars(model)
    }
    forms: list[Form] = []

    def flat(*tensors: torch.Tensor) -> Tensors:
        args, kwargs = form.assemble(tensors)
        with _replaced(model, own):  # its hooks see its own arguments and output
            output = model(*args, **kwargs)
        try:
            found, outputs = Form.of_output(output)
        except FormError as error:
            raise _ShapeNumberError(
                f"the model returns a number that depends on its input's shape{_at(error)}: expected tensors and "
                f"constants; return torch.tensor(...), or leave it out"
            ) from None
        forms.append(found)
        return outputs

    with _replaced(model, {"forward": flat, "_forward_hooks": {}, "_forward_pre_hooks": {}}):
        yield forms


@contextmanager
def _replaced(model: nn.Module, attributes: Mapping[str, object]) -> Iterator[None]:
    """Within: these are the module's own attributes of that name, and no other of those."""
    names = ("forward", "_forward_hooks", "_forward_pre_hooks")
    before = {name: vars(model).pop(name) for name in names if name in vars(model)}
    vars(model).update(attributes)
    try:
        yield
    finally:
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(before)


def _at(error: FormError) -> str:
    return f", in {''.join(error.path)} of its output" if error.path else ""


def batch_sizes(placeholders: Sequence[fx.Node], dims: Sequence[int | None], ranges: Mapping[Any, Any]) -> BatchSizes:
    """The sizes that the exported graph allows.

    Arguments:
        placeholders: of the tensors among the model's arguments.
        dims: of the batch in each.
        ranges: by symbol, as torch.export gives them.
    """
    least, most = 1, math.inf
    for node, dim in zip(placeholders, dims, strict=True):
        value = node.meta.get("val")
        if dim is None or not isinstance(value, torch.Tensor):
            continue
        size = value.shape[dim]
        symbol = size.node.expr if isinstance(size, torch.SymInt) else None
        if symbol is None or symbol.is_number:
            least, most = max(least, int(size)), min(most, int(size))
        elif symbol in ranges:
            span = ranges[symbol]
            least = max(least, int(span.lower) if span.lower > 2 else 1)  # 2 is where torch begins to tell sizes apart
            most = min(most, float(span.upper) if span.upper < 1 << 62 else math.inf)
    return BatchSizes(least, most)

"""The parts of a model that are profiled one by one: children of an nn.Sequential, or groups of a traced graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..graph.export import OutputForm
from ..graph.source_line import first_line, users_line
from ..graph.trace import MODEL_INPUT, TracedModel, ValueRef
from .fingerprint import graph_form, module_form

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True, kw_only=True)
class Part:
    """Flat tensors -> flat tensors.

    Arguments:
        module: runs it; its parameters and buffers.
        inputs: where each comes from; None: all that the part before returns, which only running it shows.
        form: equal for parts that do equal work on equal inputs.
        in_spec: how the inputs go together, for a child of a Sequential; None: one argument each.
        out_spec: how the outputs go together, once it ran.
        clone_inputs: whether it changes an input in place, and gets copies.
    """

    name: str
    description: str
    module: nn.Module
    inputs: tuple[ValueRef, ...] | None
    form: object
    in_spec: pytree.TreeSpec | None = None
    out_spec: pytree.TreeSpec | None = None
    clone_inputs: bool = False

    def run(self, flat: Sequence[torch.Tensor]) -> Tensors:
        """The outputs."""
        leaves = [x.clone() for x in flat] if self.clone_inputs else list(flat)
        arguments = leaves if self.in_spec is None else [pytree.tree_unflatten(leaves, self.in_spec)]
        outputs = self.module(*arguments)
        if self.inputs is not None:  # a piece of a graph
            return tuple(outputs)
        flat_outputs, self.out_spec = pytree.tree_flatten(outputs)
        for leaf in flat_outputs:
            if not isinstance(leaf, torch.Tensor):
                raise ValueError(
                    f"{self.name} ({type(self.module).__name__}) returns a {type(leaf).__name__} ({leaf!r:.60}): "
                    f"expected tensors (in tuples, lists or dicts)"
                )
        return tuple(flat_outputs)

    def try_run(self, flat: Sequence[torch.Tensor]) -> Tensors:
        """The first run: finds out whether inputs are changed in place; ValueError for inputs that do not fit."""
        try:
            return self._run_or_clone(flat)
        except (RuntimeError, TypeError, IndexError, AssertionError) as error:
            given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in flat)
            raise ValueError(
                f"{self.name} ({self.description}) cannot take ({given}){users_line(error)}: {first_line(error)}. "
                f"Expected example_inputs of one microbatch, batch first, that fit the model"
            ) from error

    def _run_or_clone(self, flat: Sequence[torch.Tensor]) -> Tensors:
        before = [x.detach().clone() for x in flat]
        versions = [x._version for x in flat]
        try:
            outputs = self.run(flat)
        except RuntimeError as error:
            if "in-place" not in str(error):  # what autograd says of a leaf that is changed
                raise
        else:
            if versions == [x._version for x in flat]:
                return outputs
        with torch.no_grad():
            for x, value in zip(flat, before, strict=True):
                x.detach().copy_(value)
        self.clone_inputs = True
        return self.run(flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsOfModel:
    """All parts in order, and how the outputs of the last one make the model's output."""

    parts: tuple[Part, ...]
    assemble: Callable[[Tensors], Any]


def make_parts(model: nn.Module, example_inputs: Sequence[torch.Tensor]) -> PartsOfModel:
    """Cut a model into parts; ValueError where it cannot be traced."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return _sequential_parts(model)
    return _traced_parts(model, example_inputs)


def _sequential_parts(model: nn.Sequential) -> PartsOfModel:
    children = [(name, child) for name, child in model._modules.items() if child is not None]
    if not children:
        raise ValueError("an nn.Sequential without children: expected at least one to profile")
    parts = tuple(
        Part(name=name, description=type(child).__name__, module=child, inputs=None, form=module_form(child))
        for name, child in children
    )

    def assemble(flat: Tensors) -> Any:
        assert parts[-1].out_spec is not None
        return pytree.tree_unflatten(list(flat), parts[-1].out_spec)

    return PartsOfModel(parts=parts, assemble=assemble)


def _traced_parts(model: nn.Module, example_inputs: Sequence[torch.Tensor]) -> PartsOfModel:
    traced = TracedModel(model, example_inputs, enter_unit=None)
    traced.batch_sizes.check(int(example_inputs[0].shape[0]))
    groups = traced.groups()
    stage_of = traced.assign_groups({group.name: i for i, group in enumerate(groups)})
    parts = tuple(
        Part(
            name=group.name,
            description=f"{stage.name}, {group.num_nodes} operations",
            module=stage.module,
            inputs=stage.inputs,
            form=graph_form(stage.module),
        )
        for group, stage in zip(groups, traced.split(stage_of, len(groups)), strict=True)
    )
    form: OutputForm = traced.output_form
    return PartsOfModel(parts=parts, assemble=form.assemble)


def sources_of(part: Part, index: int, num_outputs: Sequence[int], num_inputs: int) -> tuple[ValueRef, ...]:
    """Where the inputs of part `index` come from, once all parts before it ran."""
    if part.inputs is not None:
        return part.inputs
    if index == 0:
        return tuple(ValueRef(MODEL_INPUT, slot) for slot in range(num_inputs))
    return tuple(ValueRef(index - 1, slot) for slot in range(num_outputs[index - 1]))

"""The backward of a piece of graph in two halves: I, the gradients of its inputs, then W, those of its parameters.

    x --> [linear] --> [gelu] --> [linear] --> y         I walks from y to x once and notes what arrives at the
             ^                       ^                   operations that take parameters (the linears);
             w1                      w2                  W takes it from there: one short walk for each of them

So I + W is about B, as where a schedule splits the backward (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

Tensors = Sequence[torch.Tensor]


class SplitBackward:
    """The two halves of the backward of one graph, which it retains until it is dropped.

    Arguments:
        outputs, gradients: where the backward begins.
        leaves: inputs that want a gradient.
        parameters: that want one.

    What only parameters lead to belongs to W. A parameter that an operation reaches both directly and through another
    operation's result is walked to on both ways.
    """

    def __init__(self, outputs: Tensors, gradients: Tensors, *, leaves: Tensors, parameters: Tensors) -> None:
        self._outputs, self._gradients, self._leaves = list(outputs), list(gradients), list(leaves)
        self._arrived: dict[Node, tuple[Any, ...]] = {}
        self._handles: list[Any] = []
        by_id = {id(parameter): parameter for parameter in parameters}
        wanted = {id(leaf) for leaf in leaves}
        roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
        order = _children_first(roots)
        to_inputs: set[Node] = set()
        below: dict[Node, dict[int, torch.Tensor]] = {}  # parameters that a node leads to
        self._direct: dict[Node, list[torch.Tensor]] = {}
        for node in order:
            variable = getattr(node, "variable", None)  # AccumulateGrad's
            children = [child for child, _ in node.next_functions if child is not None]
            if id(variable) in wanted or any(child in to_inputs for child in children):
                to_inputs.add(node)
            below[node] = {k: p for child in children for k, p in below[child].items()}
            if id(variable) in by_id:
                below[node] = {id(variable): by_id[id(variable)]}
        for node in order:
            children = [child for child, _ in node.next_functions if child is not None]
            pure = {k: p for child in children if child not in to_inputs for k, p in below[child].items()}
            if pure and node in to_inputs:
                self._direct[node] = list(pure.values())
        self._whole = [  # outputs that no input leads to: all of their backward is W
            (output, gradient, list(below[output.grad_fn].values()))
            for output, gradient in zip(self._outputs, self._gradients, strict=True)
            if output.grad_fn is not None and output.grad_fn not in to_inputs and below[output.grad_fn]
        ]

    def input_grad(self) -> None:
        """I: into `.grad` of the leaves."""
        self._handles = [node.register_prehook(self._note(node)) for node in self._direct]
        try:
            torch.autograd.backward(self._outputs, self._gradients, inputs=self._leaves, retain_graph=True)
        finally:
            for handle in self._handles:
                handle.remove()

    def weight_grad(self) -> None:
        """W: adds to `.grad` of the parameters; once, behind `input_grad`."""
        for output, gradient, parameters in self._whole:
            torch.autograd.backward(output, gradient, inputs=parameters, retain_graph=True)
        for node, gradients in self._arrived.items():
            edges = [GradientEdge(node, i) for i, each in enumerate(gradients) if each is not None]
            arrived = [each for each in gradients if each is not None]
            if edges:
                torch.autograd.backward(edges, arrived, inputs=self._direct[node], retain_graph=True)
        self._arrived.clear()

    def _note(self, node: Node) -> Any:
        def note(gradients: tuple[Any, ...]) -> None:
            self._arrived[node] = gradients

        return note


def _children_first(roots: Sequence[Node]) -> list[Node]:
    order: dict[Node, None] = {}
    todo: list[tuple[Node, bool]] = [(root, False) for root in roots]
    seen: set[Node] = set()
    while todo:
        node, done = todo.pop()
        if done:
            order[node] = None
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return list(order)

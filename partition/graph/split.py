"""A traced graph split into stages: a graph for each, and what flows between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from .fingerprint import graph_form
from .flat_graph import FlatGraph
from .forms import Form
from .fx_nodes import get_attribute, set_attribute, span_name
from .units import MODEL_INPUT, EnterUnit, Linked, StageModule, ValueRef


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPiece:
    """One stage of a traced model: `module(*inputs)` returns a tuple of tensors."""

    name: str
    module: fx.GraphModule
    inputs: tuple[ValueRef, ...]

    @property
    def end(self) -> str:
        """See Piece."""
        return f"the graph of {self.name}"

    def link(self, before: StageModule | None, *, index: int, inputs: Form) -> Linked:
        """See Piece."""
        return Linked(module=self.module, inputs=self.inputs, is_flat=True)

    def form(self) -> object:
        """See Piece."""
        return graph_form(self.module)


def split(
    graph: FlatGraph, stage_of: Mapping[fx.Node, int], num_stages: int, *, enter_unit: EnterUnit | None
) -> tuple[GraphPiece, ...]:
    """The stages; the last one returns the model's flat outputs.

    Arguments:
        stage_of: by operation.
        enter_unit: called with the ordinal of a random operation right before it runs.
    """
    splitter = _Splitter(graph, stage_of, num_stages, enter_unit)
    return tuple(splitter.piece(stage) for stage in range(num_stages))


class _Splitter:
    """Copies each stage's operations into a graph of its own."""

    def __init__(
        self, graph: FlatGraph, stage_of: Mapping[fx.Node, int], num_stages: int, enter_unit: EnterUnit | None
    ) -> None:
        self._graph = graph
        self._stage_of = stage_of
        self._last = num_stages - 1
        self._enter_unit = enter_unit
        self._order = {node: i for i, node in enumerate(graph.root.graph.nodes)}
        final = [n for n in graph.output.all_input_nodes if n.op != "get_attr"]
        self._outputs: list[list[fx.Node]] = [[] for _ in range(num_stages)]  # what later stages take, by stage
        for node in graph.nodes:
            if node in graph.shape_nodes:
                continue
            later = any(stage_of.get(user, -1) > stage_of[node] for user in graph.users(node))
            at_the_end = node in final and stage_of[node] < self._last
            if later or at_the_end:
                self._outputs[stage_of[node]].append(node)

    def piece(self, stage: int) -> GraphPiece:
        own = [n for n in self._graph.nodes if self._stage_of[n] == stage and n not in self._graph.shape_nodes]
        external, internal = self._needed(stage, own)
        graph = fx.Graph()
        copies = {source: graph.placeholder(source.name) for source in external}
        attributes: dict[str, Any] = {}
        for node in internal:
            if node.op == "get_attr":
                attributes[str(node.target)] = get_attribute(self._graph.root, str(node.target))
            if node in self._graph.random and self._enter_unit is not None:
                unit = self._graph.random[node]
                attributes[f"enter_unit_{unit}"] = _EnterUnit(self._enter_unit, unit)
                graph.call_module(f"enter_unit_{unit}")
            if node.op == "call_module":
                attributes[str(node.target)] = self._graph.root.get_submodule(str(node.target))
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        results = self._graph.results if stage == self._last else self._outputs[stage]
        graph.output(tuple(copies[n] for n in results))
        root = nn.Module()
        for target, value in attributes.items():
            set_attribute(root, target, value)
        module = fx.GraphModule(root, graph, class_name=f"Stage{stage}")
        return GraphPiece(name=span_name(own), module=module, inputs=tuple(map(self._source, external)))

    def _source(self, node: fx.Node) -> ValueRef:
        """Where a value from outside a stage comes from."""
        if node.op == "placeholder":
            return ValueRef(MODEL_INPUT, self._graph.placeholders.index(node))
        producer = self._stage_of[node]
        return ValueRef(producer, self._outputs[producer].index(node))

    def _needed(self, stage: int, own: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Model inputs and values of earlier stages; what the stage computes, attributes and shape numbers included.

        Both in graph order.
        """
        external: dict[fx.Node, None] = {}
        internal: dict[fx.Node, None] = {}

        def need(node: fx.Node) -> None:
            if node in internal or node in external:
                return
            computed_here = self._stage_of.get(node) == stage or node in self._graph.shape_nodes
            if node.op == "get_attr" or computed_here:
                for source in node.all_input_nodes:
                    need(source)
                internal[node] = None
            else:
                external[node] = None

        for node in own:
            need(node)
        if stage == self._last:
            for node in self._graph.output.all_input_nodes:
                need(node)
        order = self._order.__getitem__
        return sorted(external, key=order), sorted(internal, key=order)


class _EnterUnit(nn.Module):
    """Stands in the graph right before a random operation."""

    def __init__(self, enter_unit: EnterUnit, unit: int) -> None:
        super().__init__()
        self._enter_unit = enter_unit
        self._unit = unit

    def forward(self) -> None:
        self._enter_unit(self._unit)

"""The graph tracer: any module that torch.export can trace whole, as a graph that can be cut into stages.

The exported graph is flat. Its nodes are numbered in order; a cut is a position in that order; a stage is the
nodes between two cuts, as a GraphModule over the user's own Parameters. A value that a later stage uses
goes straight to it (skip connections), model inputs are at hand on every stage, integers derived from shapes
are computed again where they are needed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .aliases import changed_views
from .export import OutputForm, batch_sizes, export_model
from .groups import Group, assign_groups, make_groups, unit_paths

MODEL_INPUT = -1


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Where a stage's input comes from: output `slot` of stage `producer` (MODEL_INPUT: the model's input `slot`)."""

    producer: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """One stage of a traced model: `module(*inputs)` returns a tuple of `num_outputs` tensors."""

    module: fx.GraphModule
    inputs: tuple[ValueRef, ...]
    num_outputs: int
    name: str


class TracedModel:
    """A model's flat graph, in training or evaluation mode.

    Arguments:
        model: traced as it stands (its training flags decide).
        example_inputs: a microbatch: tensors with the batch in dimension 0.
        enter_unit: called with the ordinal of a random node right before it runs (seeds its generator).

    Raises ValueError, with the user's source line, for a model that cannot be traced whole.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Sequence[torch.Tensor],
        *,
        enter_unit: Callable[[int], None] | None,
    ) -> None:
        exported = export_model(model, tuple(example_inputs))
        self._units = unit_paths(model)
        self._root = exported.module(check_guards=False)
        self._enter_unit = enter_unit
        nodes = list(self._root.graph.nodes)
        self._placeholders = [n for n in nodes if n.op == "placeholder"]
        self._output = next(n for n in nodes if n.op == "output")
        self.batch_sizes = batch_sizes(self._placeholders, exported.range_constraints)
        self.nodes = [n for n in nodes if n.op in ("call_function", "call_module", "call_method") and not _is_guard(n)]
        self._number = {node: i for i, node in enumerate(self.nodes)}
        self._shape_nodes = {n for n in self.nodes if _is_shape_number(n)}
        self._results, self.output_form = self._read_output(exported.call_spec.out_spec)
        self._together = [*self._tuples_and_parts(), *changed_views(self.nodes)]
        self._random = {n: i for i, n in enumerate(n for n in self.nodes if _is_random(n))}

    def _read_output(self, spec: pytree.TreeSpec) -> tuple[tuple[fx.Node, ...], OutputForm]:
        """The nodes of the flat outputs that are tensors, and the form of the whole."""
        flat = self._output.args[0]
        assert isinstance(flat, tuple | list)
        for leaf in flat:
            if isinstance(leaf, fx.Node) and not _is_tensor(leaf) and leaf.op != "get_attr":
                raise ValueError(
                    f"the model returns {leaf.name!r}, a number that depends on its input's shape: expected tensors "
                    f"and constants; return torch.tensor(...), or leave it out"
                )
        constants = {i: leaf for i, leaf in enumerate(flat) if not isinstance(leaf, fx.Node)}
        return tuple(leaf for leaf in flat if isinstance(leaf, fx.Node)), OutputForm(spec=spec, constants=constants)

    def _tuples_and_parts(self) -> list[tuple[fx.Node, fx.Node]]:
        tuples = [n for n in self.nodes if not _is_tensor(n) and n not in self._shape_nodes]
        return [(node, user) for node in tuples for user in node.users if user in self._number]

    def parameter_weights(self) -> list[float]:
        """[n] parameter elements first used by each node."""
        seen: set[int] = set()
        weights = []
        for node in self.nodes:
            weight = 0.0
            for attribute in _attributes(node):
                value = _get(self._root, str(attribute.target))
                if isinstance(value, nn.Parameter) and id(value) not in seen:
                    seen.add(id(value))
                    weight += value.numel()
            weights.append(weight)
        return weights

    def crossing_bytes(self) -> list[float]:
        """[n] bytes of the values that cross a cut before node i; infinite where no cut may be made."""
        crossing = self._crossing(_bytes)
        for first, second in self._together:
            for between in range(self._number[first] + 1, self._number[second] + 1):
                crossing[between] = math.inf
        return crossing

    def crossing_values(self) -> list[float]:
        """[n] how many values cross a cut before node i, model inputs apart."""
        return self._crossing(lambda node: 1.0)

    def _crossing(self, size_of: Callable[[fx.Node], float]) -> list[float]:
        """[n] what the values that cross a cut before node i add up to."""
        n = len(self.nodes)
        change = [0.0] * (n + 1)
        for i, node in enumerate(self.nodes):
            if node in self._shape_nodes:
                continue
            last = max((self._number.get(user, n - 1) for user in node.users), default=i)
            size = size_of(node)
            change[i + 1] += size
            if last + 1 <= n:
                change[last + 1] -= size
        return list(accumulate(change[:n]))

    def groups(self) -> tuple[Group, ...]:
        """The model's cut units (module `groups`): a function of the model and its graph alone."""
        return make_groups(
            [[] if node in self._shape_nodes else _module_paths(node) for node in self.nodes],
            self._units,
            crossing_bytes=self.crossing_bytes(),
            crossing_values=self.crossing_values(),
            has_parameters=[self._uses_parameters(node) for node in self.nodes],
        )

    def _uses_parameters(self, node: fx.Node) -> bool:
        return any(isinstance(_get(self._root, str(each.target)), nn.Parameter) for each in _attributes(node))

    def assign_groups(self, stage_by_group: Mapping[str, int]) -> dict[fx.Node, int]:
        """Node -> stage, from a stage for each of `groups()`; for `split`.

        Stages need not be contiguous in the graph, but a group never stands on an earlier stage than what it needs.
        Raises ValueError for a group that is missing or unknown, a stage without groups, and a wrong order.
        """
        return assign_groups(self.nodes, self.groups(), stage_by_group, {n: self._sources(n) for n in self.nodes})

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values a node takes; numbers derived from shapes are computed wherever they are needed."""
        if node in self._shape_nodes:
            return []
        found, todo = [], list(node.all_input_nodes)
        while todo:
            source = todo.pop()
            if source in self._shape_nodes:
                todo += source.all_input_nodes
            elif source in self._number:
                found.append(source)
        return found

    def starts_at(self, split_points: Sequence[str]) -> tuple[int, ...]:
        """The node at which each named module begins, 0 in front; ValueError with near matches for a wrong name."""
        first: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            for path in _module_paths(node):
                first.setdefault(path, i)
        starts = [0]
        for point in split_points:
            if point not in first:
                near = difflib.get_close_matches(point, first, n=3, cutoff=0.4)
                raise ValueError(
                    f"split point {point!r} is no module that the model runs: expected the name of a module that "
                    f"begins a stage, such as {', '.join(map(repr, near or list(first)[:3]))}"
                )
            if first[point] <= starts[-1]:
                raise ValueError(
                    f"split point {point!r} begins at or before the one in front of it: expected names in "
                    f"the order in which the model runs them, each leaving something to the stage before"
                )
            starts.append(first[point])
        return tuple(starts)

    def assign(self, starts: Sequence[int]) -> dict[fx.Node, int]:
        """Node -> stage, for stages that begin at these nodes."""
        stage_of = {}
        stage = 0
        for i, node in enumerate(self.nodes):
            while stage + 1 < len(starts) and i >= starts[stage + 1]:
                stage += 1
            stage_of[node] = stage
        return stage_of

    def assign_like(self, holders: dict[str, list[int]], num_stages: int) -> dict[fx.Node, int]:
        """Node -> stage, for a graph of the same model in another mode.

        Each node goes to the earliest stage that has its inputs and, if it uses parameters or buffers, holds them
        (`holders`: name -> stages); one without inputs goes to its first user.
        """
        stage_of: dict[fx.Node, int] = {}
        for node in self.nodes:
            stage = max((stage_of[n] for n in node.all_input_nodes if n in stage_of), default=0)
            for attribute in _attributes(node):
                stages = holders.get(str(attribute.target), [])
                if stages and stage not in stages:
                    stage = min((s for s in stages if s >= stage), default=stage)
            stage_of[node] = min(stage, num_stages - 1)
        for node in reversed(self.nodes):
            users = [stage_of[user] for user in node.users if user in stage_of]
            if users and not any(n in stage_of or n.op == "get_attr" for n in node.all_input_nodes):
                stage_of[node] = min(users)
        return stage_of

    def holders(self, stage_of: dict[fx.Node, int]) -> dict[str, list[int]]:
        """Parameter and buffer names -> the stages that use them, ascending."""
        found: dict[str, set[int]] = {}
        for node, stage in stage_of.items():
            for attribute in _attributes(node):
                found.setdefault(str(attribute.target), set()).add(stage)
        return {name: sorted(stages) for name, stages in found.items()}

    def split(self, stage_of: dict[fx.Node, int], num_stages: int) -> tuple[TracedStage, ...]:
        """Cut the graph into stages; the last one returns the model's (flat) outputs.

        Raises ValueError for a cut between a view and an in-place change of the same memory.
        """
        for first, second in self._together:
            if stage_of[first] != stage_of[second]:
                module = (_module_paths(second) or ["the model itself"])[-1]
                raise ValueError(
                    f"stage {stage_of[first]} ends between {first.name!r} and {second.name!r} (in {module}), which "
                    f"share memory or are parts of one value: expected both in one stage; split elsewhere, or take an "
                    f"operation that is not in-place (inplace=False)"
                )
        return _Splitter(self, stage_of, num_stages).run()


class _Splitter:
    """Copies each stage's nodes into a graph of its own, and finds what flows between the graphs."""

    def __init__(self, traced: TracedModel, stage_of: dict[fx.Node, int], num_stages: int) -> None:
        self._traced = traced
        self._num_stages = num_stages
        self._stage_of = stage_of
        final = [n for n in traced._output.all_input_nodes if n.op != "get_attr"]
        self._outputs: list[list[fx.Node]] = [[] for _ in range(num_stages)]
        for node in traced.nodes:
            if node in traced._shape_nodes:
                continue
            later = any(stage_of.get(user, -1) > stage_of[node] for user in self._real_users(node))
            at_the_end = node in final and stage_of[node] < num_stages - 1
            if later or at_the_end:
                self._outputs[stage_of[node]].append(node)

    def _real_users(self, node: fx.Node) -> list[fx.Node]:
        """Users, with numbers derived from shapes replaced by their users: those are computed again at each."""
        users = []
        stack = list(node.users)
        while stack:
            user = stack.pop()
            if user in self._traced._shape_nodes:
                stack += user.users
            else:
                users.append(user)
        return users

    def run(self) -> tuple[TracedStage, ...]:
        return tuple(self._build(stage) for stage in range(self._num_stages))

    def _build(self, stage: int) -> TracedStage:
        traced = self._traced
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[ValueRef] = []
        is_last = stage == self._num_stages - 1
        own = [n for n in traced.nodes if self._stage_of[n] == stage and n not in traced._shape_nodes]
        wanted = _in_order(traced, own, traced._output if is_last else None, self._stage_of, stage)
        for source in wanted.external:
            copies[source] = graph.placeholder(source.name)
            if source.op == "placeholder":
                inputs.append(ValueRef(MODEL_INPUT, traced._placeholders.index(source)))
            else:
                producer = self._stage_of[source]
                inputs.append(ValueRef(producer, self._outputs[producer].index(source)))
        attributes: dict[str, Any] = {}
        for node in wanted.internal:
            if node.op == "get_attr":
                attributes[str(node.target)] = _get(traced._root, str(node.target))
            if node in traced._random and traced._enter_unit is not None:
                unit = traced._random[node]
                attributes[f"enter_unit_{unit}"] = _EnterUnit(traced._enter_unit, unit)
                graph.call_module(f"enter_unit_{unit}")
            if node.op == "call_module":
                attributes[str(node.target)] = traced._root.get_submodule(str(node.target))
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        if is_last:
            results = tuple(copies[n] for n in traced._results)
        else:
            results = tuple(copies[n] for n in self._outputs[stage])
        graph.output(results)
        root = nn.Module()
        for target, value in attributes.items():
            _assign(root, target, value)
        module = fx.GraphModule(root, graph, class_name=f"Stage{stage}")
        return TracedStage(module=module, inputs=tuple(inputs), num_outputs=len(results), name=_span_name(own))


class _EnterUnit(nn.Module):
    """Stands in the graph right before a random node."""

    def __init__(self, callback: Callable[[int], None], unit: int) -> None:
        super().__init__()
        self._callback = callback
        self._unit = unit

    def forward(self) -> None:
        self._callback(self._unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    external: list[fx.Node]  # model inputs and values of earlier stages
    internal: list[fx.Node]  # what this stage computes, attributes and shape numbers included, in graph order


def _in_order(
    traced: TracedModel, own: list[fx.Node], output: fx.Node | None, stage_of: dict[fx.Node, int], stage: int
) -> _Wanted:
    external: dict[fx.Node, None] = {}
    internal: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node in internal or node in external:
            return
        mine = stage_of.get(node) == stage and node not in traced._shape_nodes
        if node.op == "get_attr" or node in traced._shape_nodes or mine:
            for source in node.all_input_nodes:
                need(source)
            internal[node] = None
        else:
            external[node] = None

    for node in own:
        need(node)
    if output is not None:
        for node in output.all_input_nodes:
            need(node)
    order = {node: i for i, node in enumerate(traced._root.graph.nodes)}
    return _Wanted(external=sorted(external, key=order.__getitem__), internal=sorted(internal, key=order.__getitem__))


def _is_guard(node: fx.Node) -> bool:
    return node.op == "call_module" and str(node.target).startswith("_guards")


def _value(node: fx.Node) -> object:
    return node.meta.get("val")


def _is_shape_number(node: fx.Node) -> bool:
    return isinstance(_value(node), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_value(node), torch.Tensor)


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _bytes(node: fx.Node) -> float:
    value = _value(node)
    if not isinstance(value, torch.Tensor):
        return 0.0
    elements = 1
    for size in value.shape:
        elements *= size.node.hint if isinstance(size, torch.SymInt) else int(size)
    return float(elements * value.element_size())


def _attributes(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.op == "get_attr"]


def _module_paths(node: fx.Node) -> list[str]:
    """Names of the modules around the node, outermost first: blocks, blocks.2, blocks.2.mlp."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values() if path]


def _span_name(nodes: list[fx.Node]) -> str:
    """The modules in which the stage begins and ends."""
    paths = [paths[-1] for node in nodes if (paths := _module_paths(node))]
    if not paths:
        return "-"
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} .. {paths[-1]}"


def _get(root: nn.Module, target: str) -> Any:
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _assign(root: nn.Module, target: str, value: Any) -> None:
    *path, name = target.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    elif isinstance(value, torch.Tensor):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)

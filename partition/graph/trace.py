"""Cut units of a traced model, whose modules cannot run as they are: the graph of torch.export, cut into stages.

Operations are numbered in order; a cut is a position in that order; a stage is the operations between two cuts, as a
GraphModule over the user's own Parameters (`split`). A value that a later stage uses goes straight to it (skip
connections), model inputs are at hand on every stage. Runs of operations make the units (`boundaries`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .boundaries import make_spans, unit_paths
from .cut import cut_evenly
from .flat_graph import FlatGraph
from .forms import Arguments
from .fx_nodes import attributes, bytes_of_value, get_attribute, module_paths, span_name
from .modes import evaluating
from .positions import contiguous, crossing, forbid, stages_by_unit, starts_at
from .split import split
from .units import Cut, EnterUnit, Unit

StageOf = dict[fx.Node, int]  # the stage of each operation


class TracedUnits:
    """Runs of operations of a model's graph.

    Arguments:
        model: traced as it stands (its training flags decide).
        example: arguments of a microbatch, with the batch in dimension 0.
        enter_unit: called with the ordinal of a random operation right before it runs.

    Raises ValueError, with the user's source line, for a model that cannot be traced whole.
    """

    def __init__(self, model: nn.Module, example: Arguments, *, enter_unit: EnterUnit | None) -> None:
        self._model = model
        self._enter_unit = enter_unit
        self.graph = FlatGraph(model, example)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units (`boundaries` says where one begins): a function of the model and its graph alone."""
        graph = self.graph
        spans = make_spans(
            [[] if node in graph.shape_nodes else module_paths(node) for node in graph.nodes],
            unit_paths(self._model),
            crossing_bytes=self._crossing_bytes(),
            crossing_values=self._crossing(lambda node: 1.0),
            has_parameters=[graph.uses_parameters(node) for node in graph.nodes],
        )
        units = []
        for name, first, last in spans:
            own = [node for node in graph.nodes[first : last + 1] if node not in graph.shape_nodes]
            description = f"{span_name(own)}, {last + 1 - first} operations"
            units.append(Unit(name=name, description=description, first=first, last=last))
        return tuple(units)

    def evenly(self, num_stages: int) -> Cut:
        """See ModelUnits; cuts may stand between any two operations, where few bytes cross."""
        return self._contiguous(
            cut_evenly(self._parameter_weights(), num_stages=num_stages, crossing_bytes=self._crossing_bytes())
        )

    def at(self, split_points: Sequence[str]) -> Cut:
        """See ModelUnits; any module that the model runs may begin a stage."""
        first: dict[str, int] = {}
        for i, node in enumerate(self.graph.nodes):
            for path in module_paths(node):
                first.setdefault(path, i)
        return self._contiguous(starts_at(split_points, first))

    def by_unit(self, stage_of: Mapping[str, int]) -> Cut:
        """See ModelUnits; stages need not be contiguous, but none needs what a later one makes."""
        number = self.graph.number
        sources = [[number[source] for source in self.graph.sources(node)] for node in self.graph.nodes]
        stages = stages_by_unit(self.units, stage_of, sources)
        return self._cut(dict(zip(self.graph.nodes, stages, strict=True)))

    # Where a cut costs what

    def _parameter_weights(self) -> list[float]:
        """[n] parameter elements first used by each operation."""
        seen: set[int] = set()
        weights = []
        for node in self.graph.nodes:
            weight = 0.0
            for attribute in attributes(node):
                value = get_attribute(self.graph.root, str(attribute.target))
                if isinstance(value, nn.Parameter) and id(value) not in seen:
                    seen.add(id(value))
                    weight += value.numel()
            weights.append(weight)
        return weights

    def _crossing_bytes(self) -> list[float]:
        """[n] bytes of the values that cross a cut before operation i; infinite where no cut may be made."""
        number = self.graph.number
        together = [(number[first], number[second]) for first, second in self.graph.together]
        return forbid(self._crossing(bytes_of_value), together)

    def _crossing(self, size_of: Callable[[fx.Node], float]) -> list[float]:
        """[n] what the values that cross a cut before operation i add up to, model inputs apart."""
        graph = self.graph
        n = len(graph.nodes)
        return crossing(
            n,
            [
                (i, max((graph.number.get(user, n - 1) for user in node.users), default=i), size_of(node))
                for i, node in enumerate(graph.nodes)
                if node not in graph.shape_nodes
            ],
        )

    # Cuts

    def _contiguous(self, starts: Sequence[int]) -> Cut:
        """Stages that begin at these operations."""
        nodes = self.graph.nodes
        return self._cut(dict(zip(nodes, contiguous(starts, len(nodes)), strict=True)))

    def _cut(self, stage_of: StageOf) -> Cut:
        """ValueError for a cut between a view and an in-place change of the same memory."""
        for first, second in self.graph.together:
            if stage_of[first] != stage_of[second]:
                module = (module_paths(second) or ["the model itself"])[-1]
                raise ValueError(
                    f"stage {stage_of[first]} ends between {first.name!r} and {second.name!r} (in {module}), which "
                    f"share memory or are parts of one value: expected both in one stage; split elsewhere, or take an "
                    f"operation that is not in-place (inplace=False)"
                )
        num_stages = 1 + max(stage_of.values())
        return Cut(
            pieces=split(self.graph, stage_of, num_stages, enter_unit=self._enter_unit),
            batch_sizes=self.graph.batch_sizes,
            output_form=self.graph.output_form,
            evaluation=partial(_evaluation, self._model, self._enter_unit, _holders(stage_of), num_stages),
            entering=lambda model, enter: _DrawInOrder(enter),
            is_live=False,
        )


def _evaluation(
    model: nn.Module,
    enter_unit: EnterUnit | None,
    holders: Mapping[str, Sequence[int]],
    num_stages: int,
    example: Arguments,
) -> Cut:
    """The model in evaluation mode, cut as `holders` says; no method, since what is traced again keeps no weights."""
    # Exported modules refuse eval(): the evaluation is traced by itself, over the same parameters.
    with evaluating(model):
        units = TracedUnits(model, example, enter_unit=enter_unit)
    return units._cut(_cut_like(units.graph, holders, num_stages))


def _holders(stage_of: StageOf) -> dict[str, list[int]]:
    """Parameter and buffer names -> the stages that use them, ascending."""
    found: dict[str, set[int]] = {}
    for node, stage in stage_of.items():
        for attribute in attributes(node):
            found.setdefault(str(attribute.target), set()).add(stage)
    return {name: sorted(stages) for name, stages in found.items()}


def _cut_like(graph: FlatGraph, holders: Mapping[str, Sequence[int]], num_stages: int) -> StageOf:
    """Stages for a graph of the same model in another mode.

    Each operation goes to the earliest stage that has its inputs and, if it uses parameters or buffers, holds them
    (`holders`: name -> stages); one without inputs goes to its first user.
    """
    stage_of: StageOf = {}
    for node in graph.nodes:
        stage = max((stage_of[n] for n in node.all_input_nodes if n in stage_of), default=0)
        for attribute in attributes(node):
            stages = holders.get(str(attribute.target), [])
            if stages and stage not in stages:
                stage = min((s for s in stages if s >= stage), default=stage)
        stage_of[node] = min(stage, num_stages - 1)
    for node in reversed(graph.nodes):
        users = [stage_of[user] for user in node.users if user in stage_of]
        if users and not any(n in stage_of or n.op == "get_attr" for n in node.all_input_nodes):
            stage_of[node] = min(users)
    return stage_of


class _DrawInOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds before each random operation: the j-th is operation j of the traced graph."""

    def __init__(self, enter: EnterUnit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._enter = enter
        self._drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._enter(self._drawn)
            self._drawn += 1
        return func(*args, **(kwargs or {}))

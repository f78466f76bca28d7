"""Cut units of a traced model: runs of its graph that are profiled as one, and stand on a stage as one.

    norm1 qkv sdpa out + | norm2 up gelu down + | norm1 qkv ...        | a boundary
    blocks.0.norm1       | blocks.0.norm2       | blocks.1.norm1       names

A boundary may stand where a cut may be made. It does stand where the module changes that the graph runs, and inside a
module where exactly one tensor crosses, such as behind a residual sum. The modules are the children of the model;
those that only hold others (Sequential, ModuleList, ModuleDict, and what is made of them) count as their children.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NAMELESS = "model"  # of a group whose nodes stand in the model itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes `first` to `last` of a traced model, both included, in graph order.

    Arguments:
        name: the first module in it, unique in the model; "#2" where that module runs again.
    """

    name: str
    first: int
    last: int

    @property
    def num_nodes(self) -> int:
        """At least 1."""
        return self.last - self.first + 1


def unit_paths(model: nn.Module) -> frozenset[str]:
    """Names of the modules that the rule above takes for units."""
    found: set[str] = set()

    def expand(module: nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            if child is None:
                continue
            inner = f"{path}.{name}" if path else name
            if _holds_others(child):
                expand(child, inner)
            else:
                found.add(inner)

    expand(model, "")
    return frozenset(found)


def _holds_others(module: nn.Module) -> bool:
    """A container, a module with a list or dict of others (a stack of layers), or one made of containers alone."""
    children = [child for child in module._modules.values() if child is not None]
    if isinstance(module, _CONTAINERS):
        return bool(children)
    if any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in children):
        return True
    return bool(children) and not module._parameters and all(_holds_others(child) for child in children)


def make_groups(
    paths: Sequence[Sequence[str]],
    units: frozenset[str],
    *,
    crossing_bytes: Sequence[float],
    crossing_values: Sequence[float],
    has_parameters: Sequence[bool],
) -> tuple[Group, ...]:
    """The groups of nodes 0..n-1.

    Arguments:
        paths: [n] the modules around each node, outermost first.
        units: their names, from `unit_paths`.
        crossing_bytes: [n] of a cut before each node; infinite where none may be made.
        crossing_values: [n] tensors over that cut.
        has_parameters: [n] whether the node uses any.
    """
    bounds = [0]
    unit = _unit(paths[0], units)
    for i in range(1, len(paths)):
        own = _unit(paths[i], units)
        changes = own is not None and own != unit and unit is not None
        unit = own if own is not None else unit
        if math.isfinite(crossing_bytes[i]) and (changes or crossing_values[i] == 1):
            bounds.append(i)
    ends = [*bounds[1:], len(paths)]
    kept: list[tuple[int, int]] = []
    for first, end in zip(bounds, ends, strict=True):
        # A group without parameters joins the one before it; the first one the one behind.
        if kept and not (any(has_parameters[first:end]) and any(has_parameters[slice(*kept[-1])])):
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((first, end))
    return _named(kept, paths)


def _unit(paths: Sequence[str], units: frozenset[str]) -> str | None:
    return next((path for path in paths if path in units), None)


def _named(spans: Sequence[tuple[int, int]], paths: Sequence[Sequence[str]]) -> tuple[Group, ...]:
    groups = []
    times: dict[str, int] = {}
    for first, end in spans:
        name = next((paths[i][-1] for i in range(first, end) if paths[i]), _NAMELESS)
        times[name] = times.get(name, 0) + 1
        unique = name if times[name] == 1 else f"{name}#{times[name]}"
        groups.append(Group(name=unique, first=first, last=end - 1))
    return tuple(groups)


def assign_groups(
    nodes: Sequence[fx.Node],
    groups: Sequence[Group],
    stage_by_group: Mapping[str, int],
    sources: Mapping[fx.Node, Sequence[fx.Node]],
) -> dict[fx.Node, int]:
    """Node -> stage, see `TracedModel.assign_groups`.

    Arguments:
        sources: of each node, the nodes whose values it takes.
    """
    names = [group.name for group in groups]
    for name in stage_by_group:
        if name not in names:
            raise ValueError(f"group {name!r} is not in the model: expected its groups, {', '.join(names)}")
    missing = [name for name in names if name not in stage_by_group]
    if missing:
        raise ValueError(f"no stage for group {missing[0]!r}: expected one for each of {', '.join(names)}")
    for name, stage in stage_by_group.items():
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise ValueError(f"group {name!r} on stage {stage!r}: expected a whole number of at least 0")
    empty = set(range(max(stage_by_group.values()))) - set(stage_by_group.values())
    if empty:
        raise ValueError(
            f"stage {min(empty)} has no group: expected at least one on each stage 0 to {max(stage_by_group.values())}"
        )
    group_of = {nodes[i]: group.name for group in groups for i in range(group.first, group.last + 1)}
    for node in nodes:
        for source in sources[node]:
            before, behind = group_of[source], group_of[node]
            if stage_by_group[before] > stage_by_group[behind]:
                raise ValueError(
                    f"group {behind!r} on stage {stage_by_group[behind]} needs {before!r} of the later stage "
                    f"{stage_by_group[before]}: expected stages that never go back along the graph"
                )
    return {node: stage_by_group[name] for node, name in group_of.items()}

"""Where the cut units of a traced model begin: runs of its graph that are profiled, and put on a stage, as one.

    norm1 qkv sdpa out + | norm2 up gelu down + | norm1 qkv ...        | a boundary
    blocks.0.norm1       | blocks.0.norm2       | blocks.1.norm1       names

A boundary may stand where a cut may be made. It does stand where the module changes that the graph runs, and inside a
module where exactly one tensor crosses, such as behind a residual sum. The modules are the children of the model;
those that only hold others (Sequential, ModuleList, ModuleDict, and what is made of them) count as their children.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NAMELESS = "model"  # a unit whose operations stand in the model itself

Span = tuple[str, int, int]  # a unit's name, its first and its last operation


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


def make_spans(
    paths: Sequence[Sequence[str]],
    units: frozenset[str],
    *,
    crossing_bytes: Sequence[float],
    crossing_values: Sequence[float],
    has_parameters: Sequence[bool],
) -> list[Span]:
    """The units of operations 0..n-1; each is named after its first module, with "#2" where that runs again.

    Arguments:
        paths: [n] the modules around each operation, outermost first.
        units: names of modules, from `unit_paths`.
        crossing_bytes: [n] over a cut before each operation; infinite where none may be made.
        crossing_values: [n] tensors over that cut.
        has_parameters: [n] whether the operation uses any.
    """
    bounds = [0]
    unit = _unit(paths[0], units)
    for i in range(1, len(paths)):
        own = _unit(paths[i], units)
        changes = own is not None and own != unit and unit is not None
        unit = own if own is not None else unit
        if math.isfinite(crossing_bytes[i]) and (changes or crossing_values[i] == 1):
            bounds.append(i)
    return _named(joined(bounds, has_parameters), paths)


def joined(bounds: Sequence[int], has_parameters: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs of positions, [first, end): one without parameters joins the run before it; the first one the run behind.

    Arguments:
        bounds: where runs begin, ascending from 0.
        has_parameters: [n] whether a position uses any.
    """
    ends = [*bounds[1:], len(has_parameters)]
    kept: list[tuple[int, int]] = []
    for first, end in zip(bounds, ends, strict=True):
        if kept and not (any(has_parameters[first:end]) and any(has_parameters[slice(*kept[-1])])):
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((first, end))
    return kept


def _unit(paths: Sequence[str], units: frozenset[str]) -> str | None:
    return next((path for path in paths if path in units), None)


def _named(spans: Sequence[tuple[int, int]], paths: Sequence[Sequence[str]]) -> list[Span]:
    named = []
    times: dict[str, int] = {}
    for first, end in spans:
        name = next((paths[i][-1] for i in range(first, end) if paths[i]), _NAMELESS)
        times[name] = times.get(name, 0) + 1
        unique = name if times[name] == 1 else f"{name}#{times[name]}"
        named.append((unique, first, end - 1))
    return named

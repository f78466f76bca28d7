"""Reader of PipeDream's profile text (format: github.com/msr-fiddle/pipedream, profiler output `graph.txt`)."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from .profile import Node, Profile
from .strict import number

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def read_pipedream_profile(path: str | Path) -> Profile:
    """Read a profile as PipeDream's profiler writes it: node lines, then edge lines that begin with a tab.

        node2 -- ReLU() -- forward_compute_time=1.5, backward_compute_time=1.2, activation_size=64.0, parameter_size=0.0
        <tab>node1 -- node2

    Times stand there in ms, sizes in bytes; the sizes of a tuple, `[a; b]`, are added up. Sources described as
    `Input...` and sinks described as `__getitem__...` are left out, as PipeDream's optimizer does. What is kept for
    the backward is not in the text: the size of the output stands for it.

    Raises ValueError that names file, line, field and what was expected.
    """
    nodes: dict[str, Node] = {}
    edges: list[tuple[str, str]] = []
    for line_number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{path}, line {line_number}"
        if not line.strip():
            continue
        parts = [part.strip() for part in line.strip().split(" -- ")]
        if line.startswith("\t"):
            if len(parts) != 2:
                _fail(where, line, "<tab>producer -- consumer")
            for name in parts:
                if name not in nodes:
                    _fail(where, name, "a node that a line above describes")
            edges.append((parts[0], parts[1]))
        else:
            if len(parts) < 3:
                _fail(where, line, f"name -- description -- {'=..., '.join(_FIELDS)}=...")
            if parts[0] in nodes:
                _fail(where, parts[0], "a name that no line above has")
            nodes[parts[0]] = _node(parts[0], " -- ".join(parts[1:-1]), parts[-1], where)
    sources, sinks = {src for src, _ in edges}, {dst for _, dst in edges}
    dropped = {
        name
        for name, node in nodes.items()
        if (name not in sinks and node.description.startswith("Input"))
        or (name not in sources and node.description.startswith("__getitem__"))
    }
    kept = tuple(node for name, node in nodes.items() if name not in dropped)
    remaining = tuple(edge for edge in edges if not dropped & set(edge))
    try:
        return Profile(nodes=kept, edges=remaining, origin="published")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _node(name: str, description: str, text: str, where: str) -> Node:
    values: dict[str, float] = {}
    for part in text.split(", "):
        key, _, value = part.partition("=")
        if key not in _FIELDS or key in values:
            _fail(where, part, f"each of {', '.join(_FIELDS)} once")
        values[key] = _value(f"{where}, field {key}", value)
    missing = [key for key in _FIELDS if key not in values]
    if missing:
        _fail(where, text, f"{missing[0]}=...")
    return Node(
        name=name,
        description=description,
        forward_seconds=values["forward_compute_time"] / 1000,
        backward_seconds=values["backward_compute_time"] / 1000,
        activation_bytes=values["activation_size"],
        parameter_bytes=values["parameter_size"],
        stash_bytes=values["activation_size"],
    )


def _value(where: str, text: str) -> float:
    """A number, or the sum of `[a; b; c]`."""
    is_list = text.startswith("[") and text.endswith("]")
    total = 0.0
    for item in text[1:-1].split(";") if is_list else [text]:
        try:
            value = float(item)
        except ValueError:
            _fail(where, text, "a number, or [a; b] for a tuple")
        total += number(where, value)
    return total


def _fail(where: str, found: str, expected: str) -> NoReturn:
    raise ValueError(f"{where}: {found!r}: expected {expected}")

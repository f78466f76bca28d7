"""PipeDream: the text of its profiles (its profiler's output `graph.txt`), and its cost model.

The model is the one that its optimizer shipped (Narayanan et al., SOSP 2019; github.com/msr-fiddle/pipedream).

With m machines of a level, bandwidth B [bytes/s], n the machines of the level below (1 at the lowest), C compute [s],
W parameters [bytes], a_k the bytes that cross cut k, rho the compression of activations:

    A(i,j,m) = min( (C(i,j) + 4 (m-1)/m W(i,j)/B/n) / m,
                    min over k, 1 <= q < m of max{ A(i,k,m-q),  (C(k,j) + 4 (q-1)/q W(k,j)/B) / q,
                                                   2 a_k / (B q rho),  2 a_j / (B q rho) unless j is the last } )

A of one level is the compute of the next, whose machines are whole groups. It differs from the paper: compute and
synchronisation are added up, and a group is never shared by two stages of the outer level.

Ties: one stage rather than two; then the earliest cut (in the order of `Cuts`); then the fewest machines after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..profile import Node, Profile
from ..solve.cut_sums import Cuts
from ..strict import number
from ..topology import Floats

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def read_pipedream_profile(path: str | Path) -> Profile:
    """Read a profile as PipeDream's profiler writes it: node lines, then edge lines that begin with a tab.

        node2 -- ReLU() -- forward_compute_time=1.5, backward_compute_time=1.2, activation_size=64.0, parameter_size=0.0
        <tab>node1 -- node2

    Times are in ms, sizes in bytes; the sizes of a tuple, `[a; b]`, are added up. Sources described as
    `Input...` and sinks described as `__getitem__...` are left out, as PipeDream's optimizer does. What is kept for
    the backward is not in the text: the size of the output is taken instead.

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


# A stage of one level: its first and last cut, how many machines of that level it is on, and the first of these.
LevelStage = tuple[int, int, int, int]


class PipeDreamModel:
    """The tables of all levels.

    Arguments:
        cuts: N of them, the empty one included.
        levels: (machines, bandwidth [bytes/s]), innermost first.
        compression: rho; None leaves the two terms of activations out.
        straight: no replication, m = 1 in each first term and q = 1.

    O(N^3 M^2) elementary steps for each inner level of M machines, O(N^2 M^2) for the outermost; O(N^2 M) numbers.
    """

    def __init__(
        self, cuts: Cuts, levels: Sequence[tuple[int, float]], *, compression: float | None, straight: bool
    ) -> None:
        self.cuts, self.levels, self.compression, self.straight = cuts, tuple(levels), compression, straight
        seconds, parameters = cuts.seconds, cuts.parameters
        self._weights = parameters[None] - parameters[:, None]
        compute = np.where(cuts.inside, seconds[None] - seconds[:, None], np.inf)
        self._compute: list[Floats] = []  # by level [N, N]
        self._tables: list[Floats] = []  # by level A [rows, N, M]
        for level, (machines, _) in enumerate(self.levels):
            self._compute.append(compute)
            is_outermost = level == len(self.levels) - 1
            table = self._table(level, rows=1 if is_outermost else len(cuts))
            self._tables.append(table)
            compute = table[:, :, machines - 1] if not is_outermost else compute

    @property
    def seconds(self) -> float:
        return float(self._tables[-1][0, -1, -1])

    def _whole(self, level: int, first: slice | int, last: slice | int) -> Floats:
        """[..., M] seconds of one stage between two cuts on m = 1..M machines: the first term of the recurrence."""
        machines, bandwidth = self.levels[level]
        below = self.levels[level - 1][0] if level else 1
        m = np.arange(1, machines + 1)
        compute = self._compute[level][first, last][..., None]
        weights = self._weights[first, last][..., None]
        seconds: Floats = (compute + 4 * (m - 1) / m * weights / bandwidth / below) / m
        if self.straight:
            seconds[..., 1:] = np.inf
        return seconds

    def _last_stage(self, level: int, last: int) -> Floats:
        """[k, q]: the stage between cuts k and `last` on q+1 machines, and what crosses its borders."""
        machines, bandwidth = self.levels[level]
        q = np.arange(1, machines)
        compute, weights = self._compute[level][:last, last, None], self._weights[:last, last, None]
        seconds: Floats = (compute + 4 * (q - 1) / q * weights / bandwidth) / q
        if self.compression is not None:
            crossing = 2 * self.cuts.crossing / bandwidth / self.compression
            seconds = np.maximum(seconds, crossing[:last, None] / q)
            if last < len(self.cuts) - 1:
                seconds = np.maximum(seconds, crossing[last] / q)
        if self.straight:
            seconds[:, 1:] = np.inf
        return seconds

    def _table(self, level: int, *, rows: int) -> Floats:
        """[rows, n, M] A(i, j, m) of a level, from each of the first `rows` cuts i."""
        machines = self.levels[level][0]
        table = self._whole(level, slice(0, rows), slice(None))
        pairs = [(m, q) for m in range(2, machines + 1) for q in range(1, m)]
        if not pairs:
            return table
        before = np.array([m - q - 1 for m, q in pairs])
        behind = np.array([q - 1 for _, q in pairs])
        starts = np.searchsorted([m for m, _ in pairs], np.arange(2, machines + 1))
        for last in range(1, len(self.cuts)):
            ends = np.flatnonzero(self.cuts.inside[:last, last])
            if rows == 1:
                ends = ends[ends > 0]
            stage = self._last_stage(level, last)[ends]
            reach = min(rows, last)
            best = np.full((reach, len(pairs)), np.inf)
            # A block of middle cuts at a time keeps the intermediate arrays in the cache.
            step = max(1, 200_000 // (reach * len(pairs)))
            for low in range(0, len(ends), step):
                chunk = slice(low, low + step)
                slowest = np.maximum(table[:reach, ends[chunk]][:, :, before], stage[chunk][:, behind])
                np.minimum(best, slowest.min(axis=1), out=best)
            split = np.minimum.reduceat(best, starts, axis=1)
            table[:reach, last, 1:] = np.minimum(table[:reach, last, 1:], split)
        return table

    def blocks(self, level: int, first: int, last: int) -> list[LevelStage]:
        """The best stages of `level` between two cuts, in order, on all machines of the level, by the rule for ties."""
        table, free = self._tables[level], self.levels[level][0]
        found = []
        while True:
            whole = self._whole(level, first, last)[free - 1]
            if free == 1 or whole <= table[first, last, free - 1]:
                found.append((first, last, free, 0))
                return found[::-1]
            stage = self._last_stage(level, last)[:, : free - 1]  # [k, q]
            slowest = np.maximum(table[first, :last, : free - 1][:, ::-1], stage)
            slowest[: first + 1] = np.inf
            cut, q = divmod(int(slowest.argmin()), free - 1)
            found.append((cut, last, q + 1, free - q - 1))
            last, free = cut, free - q - 1

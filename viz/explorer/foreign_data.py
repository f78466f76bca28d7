"""Rows of traces that others wrote, as columns: a line a lane and depth, since slices of a lane nest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..exhibit import Row, Slice

_NUMBERS = re.compile(r"[0-9]+")


def foreign_panel(rows: Sequence[Row], tick: float) -> dict[str, Any]:
    """Names once, then each row's lines with their slices."""
    starts = [each.start for row in rows for each in row.slices]
    ends = [each.end for row in rows for each in row.slices]
    origin = min(starts, default=0.0)
    names = _Names()

    def ticks(seconds: float) -> int:
        return round((seconds - origin) / tick)

    return {
        "makespan": max(ends, default=0.0) - origin,
        "rows": [
            {
                "name": row.name,
                "lines": [
                    {
                        "lane": lane,
                        "names": [names.number(each.name) for each in line],
                        "starts": [ticks(each.start) for each in line],
                        "ends": [ticks(each.end) for each in line],
                    }
                    for lane, line in _lines(row.slices)
                ],
            }
            for row in rows
        ],
        "names": names.texts,
        "hues": names.hues(),
    }


class _Names:
    """Names of slices, each kept once; those that differ in numbers alone share a hue."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self._number.setdefault(name, len(self._number))

    @property
    def texts(self) -> list[str]:
        return list(self._number)

    def hues(self) -> list[int]:
        """The number of each name's hue, in the order in which they first come."""
        kinds: dict[str, int] = {}
        return [kinds.setdefault(_NUMBERS.sub("", name), len(kinds)) for name in self._number]


def _lines(slices: Sequence[Slice]) -> list[tuple[str, list[Slice]]]:
    """Slices by lane and depth, in which none overlap."""
    lanes: dict[str, list[list[Slice]]] = {}
    open_ends: dict[str, list[float]] = {}
    for each in sorted(slices, key=lambda each: (each.start, -each.end)):
        lines, ends = lanes.setdefault(each.lane, []), open_ends.setdefault(each.lane, [])
        depth = next((depth for depth, end in enumerate(ends) if end <= each.start), len(ends))
        ends[depth:] = [each.end]
        if depth == len(lines):
            lines.append([])
        lines[depth].append(each)
    return [(lane, line) for lane, lines in sorted(lanes.items()) for line in lines if line]

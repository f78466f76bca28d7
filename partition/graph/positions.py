"""A model's work in a line of positions 0..n-1, calls, and what a cut in front of each one would cost."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from .units import Unit, check_stages


def crossing(count: int, values: Iterable[tuple[int, int, float]]) -> list[float]:
    """[n] what the values that cross a cut before each position add up to.

    Arguments:
        values: (position that makes it, last position that takes it, size).
    """
    change = [0.0] * (count + 2)
    for first, last, size in values:
        change[first + 1] += size
        change[last + 1] -= size
    return list(accumulate(change[:count]))


def forbid(crossing: list[float], together: Iterable[tuple[int, int]]) -> list[float]:
    """The same, infinite between positions that no cut may separate."""
    found = list(crossing)
    for first, second in together:
        for between in range(first + 1, second + 1):
            found[between] = math.inf
    return found


def starts_at(split_points: Sequence[str], first: Mapping[str, int]) -> list[int]:
    """The positions at which stages begin, 0 before all.

    Arguments:
        first: position of each module that the model runs.

    Raises ValueError with near matches for a name that is none of them, and for a wrong order.
    """
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
    return starts


def contiguous(starts: Sequence[int], count: int) -> list[int]:
    """[n] the stage of each position."""
    ends = [*starts[1:], count]
    return [stage for stage, (begin, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(begin, end)]


def stages_by_unit(units: Sequence[Unit], stage_of: Mapping[str, int], sources: Sequence[Iterable[int]]) -> list[int]:
    """[n] the stage of each position, from those of the units.

    Arguments:
        sources: [n] the positions whose values each one takes.

    Raises ValueError for stages that these units cannot make.
    """
    check_stages(units, stage_of)
    unit_of = [unit for unit in units for _ in range(unit.size)]
    for position, taken in enumerate(sources):
        for source in taken:
            before, behind = unit_of[source].name, unit_of[position].name
            if stage_of[before] > stage_of[behind]:
                raise ValueError(
                    f"unit {behind!r} on stage {stage_of[behind]} needs {before!r} of the later stage "
                    f"{stage_of[before]}: expected stages that never go back along the graph"
                )
    return [stage_of[unit.name] for unit in unit_of]

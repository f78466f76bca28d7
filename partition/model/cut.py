"""A model's work in a line of units or calls, 0..n-1: what a cut before each would cost, and where to cut."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from .units import Unit, check_stages

SLACK = 1.1  # a stage may be this much heavier than the best balance if fewer bytes cross the cuts


def cut_evenly(
    weights: Sequence[float], *, num_stages: int, crossing_bytes: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Cut units 0..n-1 into contiguous stages of nearly equal weight.

    First the smallest possible weight of the heaviest stage, then, among the cuts whose heaviest stage weighs at most
    SLACK times that, the one over which the fewest bytes cross. Ties: the last stage begins as early as possible, then
    the one before it, and so on.

    Arguments:
        weights: [n] by unit, at least 0: parameter elements.
        num_stages: S, at most n.
        crossing_bytes: [n] bytes that cross a cut made before unit i (entry 0 is never used), infinite where none
            may be made; all free where not given.

    Returns the first unit of each stage, [S], beginning with 0. Every stage has at least one unit.
    Raises ValueError when there are fewer units, or places for a cut, than stages need, and for numbers below 0.
    O(S * n) numpy operations on n numbers each.

    >>> cut_evenly([1, 1, 1, 3], num_stages=2)
    (0, 3)
    """
    n = len(weights)
    crossing = np.zeros(n) if crossing_bytes is None else np.asarray(crossing_bytes, dtype=float)
    padded = np.asarray(weights, dtype=float)
    if len(crossing) != n or not (np.isfinite(padded).all() and (padded >= 0).all() and (crossing >= 0).all()):
        raise ValueError(
            f"weights={list(weights)}, crossing_bytes={crossing_bytes}: expected a number of at least 0 for each unit"
        )
    most = min(n, 1 + int(np.isfinite(crossing[1:]).sum()))
    if not 1 <= num_stages <= most:
        raise ValueError(
            f"num_stages={num_stages} for a model of {most} units that can be cut apart: expected 1 to {most}; "
            f"take fewer ranks or chunks (stages = ranks x chunks)"
        )
    # A small equal share for each unit spreads units without weight.
    padded = padded + max(padded.sum(), 1.0) * 1e-6 / n
    prefix = np.concatenate([[0.0], np.cumsum(padded)])
    slack = 1.0 + 1e-9 if crossing_bytes is None else SLACK
    cap = slack * _smallest_maximum(prefix, np.isfinite(crossing), num_stages)
    return _fewest_bytes(prefix, crossing, num_stages, cap)


def _smallest_maximum(prefix: np.ndarray, may_cut: np.ndarray, num_stages: int) -> float:
    n = len(prefix) - 1
    best = prefix.copy()  # best[j]: the first j units in the stages so far
    best[0] = np.inf
    for stage in range(1, num_stages):
        longer = np.full(n + 1, np.inf)
        for j in range(stage + 1, n + 1):
            heaviest = np.maximum(best[stage:j], prefix[j] - prefix[stage:j])
            longer[j] = np.where(may_cut[stage:j], heaviest, np.inf).min()
        best = longer
    return float(best[n])


def _fewest_bytes(prefix: np.ndarray, crossing: np.ndarray, num_stages: int, cap: float) -> tuple[int, ...]:
    n = len(prefix) - 1
    cost = np.where(prefix <= cap, 0.0, np.inf)
    cost[0] = np.inf
    choices = []
    for stage in range(1, num_stages):
        longer = np.full(n + 1, np.inf)
        choice = np.zeros(n + 1, dtype=int)
        for j in range(stage + 1, n + 1):
            window = np.where(prefix[j] - prefix[stage:j] <= cap, cost[stage:j] + crossing[stage:j], np.inf)
            choice[j] = stage + int(window.argmin())
            longer[j] = window.min()
        cost = longer
        choices.append(choice)
    starts = [n]
    for choice in reversed(choices):
        starts.append(int(choice[starts[-1]]))
    return (0, *reversed(starts[1:]))


def crossing(count: int, values: Iterable[tuple[int, int, float]]) -> list[float]:
    """[n] what values (position of its maker, of its last taker, size) that cross a cut before each position add up
    to."""
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


def starts_at(split_points: Sequence[str], first: Mapping[str, int], kind: str) -> list[int]:
    """The positions at which stages begin, 0 before all; ValueError, with near matches, for a wrong name or order."""
    starts = [0]
    for point in split_points:
        if point not in first:
            near = difflib.get_close_matches(point, first, n=3, cutoff=0.3)
            raise ValueError(
                f"cut={point!r} is no {kind}: expected the name of one that begins a stage, such as "
                f"{', '.join(map(repr, near or list(first)[1:4]))}"
            )
        if first[point] <= starts[-1]:
            raise ValueError(
                f"cut={point!r} begins at or before the previous one: expected names in "
                f"the order in which the model runs them, each leaving something to the stage before"
            )
        starts.append(first[point])
    return starts


def contiguous(starts: Sequence[int], count: int) -> list[int]:
    """[n] the stage of each position."""
    ends = [*starts[1:], count]
    return [stage for stage, (begin, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(begin, end)]


def stages_by_unit(units: Sequence[Unit], stage_of: Mapping[str, int], sources: Sequence[Iterable[int]]) -> list[int]:
    """[n] the stage of each position, which takes values of its `sources`; ValueError for stages that cannot be
    made."""
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

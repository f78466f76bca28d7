"""Data of the "what if" panel: a prediction's wiring, for several numbers of microbatches where its family has them."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from ...schedules import Costs, Schedule
from ..exhibit import Exhibit
from .other_sizes import builder_of
from .replay_data import replay_data

_STEPS = tuple(
    Fraction(*each) for each in ((1, 4), (1, 2), (3, 4), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1))
)
_MAX_ACTIONS = 200_000  # of the prediction: about 3 MB of page, and half a second a change
_MAX_MORE = 60_000  # of the other numbers of microbatches together


def whatif_data(exhibit: Exhibit) -> dict[str, Any] | None:
    """Wirings by number of microbatches, ascending; None where nothing is simulated or under which costs is not known.

    `fixed` says to people why there is one number alone, `refused` why there is nothing at all.
    """
    if exhibit.predicted is None or exhibit.costs is None:
        return None
    schedule = exhibit.predicted.schedule
    if (actions := _size(schedule)) > _MAX_ACTIONS:
        return {"refused": f"{actions:,} actions: costs can be varied up to {_MAX_ACTIONS:,}."}
    others, fixed = _others(schedule, exhibit.costs)
    wirings = [replay_data(each, exhibit.costs, exhibit.links) for each in (*others, schedule)]
    wirings.sort(key=lambda wiring: int(wiring["microbatches"]))
    return {"wirings": wirings, "microbatches": schedule.num_microbatches, "fixed": fixed}


def _others(schedule: Schedule, costs: Costs) -> tuple[list[Schedule], str]:
    """The same with other numbers of microbatches, and why there are none."""
    if costs.table_for(schedule).varies:
        return [], "M is fixed: microbatches, or replicas, take different times, and nobody knows those of another M."
    build = builder_of(schedule)
    if build is None:
        return [], "M is fixed: this order is not one that a built-in schedule has, so nobody knows it for another M."
    found: list[Schedule] = []
    left = _MAX_MORE
    for number in _near(schedule.num_microbatches):
        try:
            other = build(number)
        except ValueError:
            continue  # the family does not take it
        if (left := left - _size(other)) < 0:
            break
        found.append(other)
    return found, "" if found else "M is fixed: schedules of other numbers of microbatches are too large for this page."


def _near(number: int) -> Iterable[int]:
    """Other numbers, the smallest first."""
    return sorted({int(number * step) for step in _STEPS if (number * step).denominator == 1} - {number})


def _size(schedule: Schedule) -> int:
    return sum(map(len, schedule.programs))

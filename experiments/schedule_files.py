"""Schedules that a user brings on a command line: a table, JSON, or a function of a Python file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..schedules import Schedule
from ..schedules.own import FORMS, find_own, is_own, sizes_of

__all__ = ["FORMS", "is_file", "is_function", "read"]


def is_file(name: str) -> bool:
    """Whether it names a file, or a function, rather than a family of schedules."""
    return is_own(name)


def is_function(name: str) -> bool:
    """Whether it names a function, which may take sizes."""
    return ":" in name or name.endswith(".py")


def read(name: str, sizes: Mapping[str, int | None], *, otherwise: Mapping[str, int] | None = None) -> Schedule:
    """The checked schedule of a file, or of `FILE.py:function` (`package.module:function`).

    Arguments:
        sizes: num_ranks, num_microbatches, num_chunks as they were asked for; None: not at all. A function is given
            those that it takes; what the schedule has must agree with them.
        otherwise: sizes for a function that takes some of which nobody asked.

    Raises ValueError for what cannot be read or does not agree, ScheduleError for a faulty schedule; both by its name.
    """
    own = find_own(name if is_function(name) else Path(name), option="schedule")
    assert own is not None
    asked = {size: number for size, number in sizes.items() if number is not None}
    schedule = own.build({**(otherwise or {}), **asked})
    has = sizes_of(schedule)
    for size, number in asked.items():
        if number != has[size]:
            option = size.removeprefix("num_")
            raise ValueError(f"--{option} {number} but {name} has {has[size]}: expected --{option} {has[size]}")
    return schedule

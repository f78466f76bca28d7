"""Schedules that a user brings: a table, JSON, or a function of a Python file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..schedules import Schedule, ScheduleError, check
from ..schedules.text import read_schedule
from .user_code import call, load

FORMS = "FILE.csv, FILE.json or FILE.py:function"


def is_file(name: str) -> bool:
    """Whether it names a file, or a function, rather than a family of schedules."""
    return name.endswith((".csv", ".json")) or ":" in name


def read(name: str, sizes: Mapping[str, int | None]) -> Schedule:
    """The checked schedule of a file, or of `FILE.py:function` (`package.module:function`).

    Arguments:
        sizes: num_ranks, num_microbatches, num_chunks, num_slices as they were asked for; None: not at all. A function
            is given those that it takes; what the schedule has must agree with them.

    Raises ValueError for what cannot be read or does not agree, ScheduleError for a faulty schedule; both by its name.
    """
    if ":" not in name:
        schedule = read_schedule(Path(name))
    else:
        asked = {size: number for size, number in sizes.items() if number is not None}
        made = call("schedule", name, load("schedule", name), **asked)
        if not isinstance(made, Schedule):
            raise ValueError(
                f"--schedule {name} returned {type(made).__name__}: expected a stagewright.schedules.Schedule, such as "
                f"Schedule.from_csv(text) or build(...) returns"
            )
        schedule = made
        try:
            check(schedule)
        except ScheduleError as error:
            raise ScheduleError(f"{name}: {error}") from None
    has = {
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": max(map(len, schedule.placement)),
        "num_slices": schedule.num_slices,
    }
    for size, number in sizes.items():
        if number not in (None, has[size]):
            option = size.removeprefix("num_")
            raise ValueError(f"--{option} {number} but {name} has {has[size]}: expected --{option} {has[size]}")
    return schedule

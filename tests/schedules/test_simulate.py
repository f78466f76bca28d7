"""The event simulator against a longest path, and what the closed forms leave out."""

from __future__ import annotations

import pytest
from hypothesis import given

from stagewright.schedules import (
    Action,
    Costs,
    Op,
    Schedule,
    ScheduleError,
    Span,
    build,
    ideal_makespan,
    simulate,
)

from .random_schedules import schedules_with_costs, steady
from .reference import seconds, starts


@steady
@given(schedules_with_costs())
def test_starts_equal_the_longest_paths(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    expected = starts(schedule, costs)
    timeline = simulate(schedule, costs)
    for rank, trace in enumerate(timeline.ranks):
        number = len(schedule.programs[rank])
        assert trace.compute[:number] == tuple(
            Span(action, expected[rank, action], expected[rank, action] + seconds(costs, action))
            for action in schedule.programs[rank]
        )

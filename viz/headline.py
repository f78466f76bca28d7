"""Figures over a timeline: what its step takes, beside what it should and what is possible at all.

            a step      bubble
closed form 33.0 ms      27.3%
predicted   33.4 ms      28.1%
measured    35.1 ms      31.6%
lower bound 33.0 ms      27.3%
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from ..schedules import Costs, Schedule
from ..schedules.timing.expected import busy_seconds, closed_form_seconds, least_seconds, median_costs
from ..schedules.timing.sampling import SHARE
from ..schedules.wording import duration
from .exhibit import Exhibit


class HeadFigure(NamedTuple):
    """Seconds from batch to batch, and the idle fraction of the ranks at that pace.

    label: "closed form", "predicted", "measured" or "lower bound".
    how: what it holds for, for people.
    """

    label: str
    seconds: float
    bubble: float
    how: str


def headline(exhibit: Exhibit) -> tuple[HeadFigure, ...]:
    """Closed form, prediction, measurement and lower bound, as far as there are: for page, terminal, picture and
    comparison alike.

    The closed form and the bound are under the costs of the prediction; where nobody knows them, under the medians of
    the timeline's own actions.
    """
    _, shown = exhibit.timelines[0]
    schedule = shown.schedule
    costs, whose = exhibit.costs, "costs of the prediction"
    if costs is None:
        costs, whose = median_costs(shown), "medians of its own actions"
    return (
        *_closed_form(schedule, costs),
        *_predicted(exhibit),
        *_measured(exhibit),
        *_bound(exhibit, schedule, costs, whose),
    )


def _closed_form(schedule: Schedule, costs: Costs) -> list[HeadFigure]:
    seconds = closed_form_seconds(schedule, costs)
    if not seconds:
        return []
    table = costs.table_for(schedule)
    alike = all(len(set(column)) == 1 for column in (table.forward, table.backward))
    what = "equal stages" if alike else "stages of the mean cost"
    bubble = _bubble(schedule, costs, seconds)
    return [HeadFigure("closed form", seconds, bubble, f"{schedule.name}, {what}, free links, no update")]


def _predicted(exhibit: Exhibit) -> list[HeadFigure]:
    if exhibit.predicted is None:
        return []
    if (sampled := exhibit.sampled) is not None:
        low, high = map(duration, sampled.range())
        how = f"{SHARE:.0%}: {low} .. {high}; median of {len(sampled.seconds)} steps with durations drawn as they vary"
        return [HeadFigure("predicted", sampled.median, sampled.bubble, how)]
    return [HeadFigure("predicted", exhibit.predicted.batch_seconds, exhibit.predicted.bubble, "simulated")]


def _measured(exhibit: Exhibit) -> list[HeadFigure]:
    steps = [step.timeline for step in exhibit.measured]
    if not steps:
        return []
    how = f"median of {len(steps)} steps" if len(steps) > 1 else f"step {exhibit.measured[0].number}"
    seconds = median(step.batch_seconds for step in steps)
    return [HeadFigure("measured", seconds, median(step.bubble for step in steps), how)]


def _bound(exhibit: Exhibit, schedule: Schedule, costs: Costs, whose: str) -> list[HeadFigure]:
    seconds = least_seconds(schedule, costs, exhibit.links)
    if seconds <= 0:
        return []
    what = "the largest work of a rank" if schedule.num_batches > 1 else "no order of this work is faster"
    return [HeadFigure("lower bound", seconds, _bubble(schedule, costs, seconds), f"{what}; {whose}")]


def _bubble(schedule: Schedule, costs: Costs, seconds: float) -> float:
    return 1 - busy_seconds(schedule, costs) / (schedule.num_ranks * seconds)

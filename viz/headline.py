"""Figures over a timeline: what its step takes, beside what it should and what is possible at all.

            a step      bubble
predicted   33.4 ms      28.1%
measured    35.1 ms      31.6%
lower bound 33.0 ms      27.3%
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from ..schedules.timing.bounds import least_seconds
from ..schedules.timing.measured_inputs import median_costs
from ..schedules.timing.sampling import SHARE
from ..schedules.timing.simulate import busy_seconds
from ..schedules.wording import duration
from .exhibit import Exhibit


class HeadFigure(NamedTuple):
    """Seconds from batch to batch, and the idle fraction of the ranks at that pace.

    label: "predicted", "measured" or "lower bound".
    how: what it holds for, for people.
    """

    label: str
    seconds: float
    bubble: float
    how: str


def headline(exhibit: Exhibit) -> tuple[HeadFigure, ...]:
    """Prediction, measurement and lower bound, as far as there are: for page, terminal, picture and comparison alike.

    The bound is under the costs of the prediction; where nobody knows them, under the medians of the timeline's own
    actions.
    """
    return tuple(_figures(exhibit))


def _figures(exhibit: Exhibit) -> Iterator[HeadFigure]:
    _, shown = exhibit.timelines[0]
    schedule = shown.schedule
    costs = median_costs(shown) if exhibit.costs is None else exhibit.costs
    whose = "medians of its own actions" if exhibit.costs is None else "costs of the prediction"

    def bubble(seconds: float) -> float:
        return 1 - busy_seconds(schedule, costs) / (schedule.num_ranks * seconds)

    if exhibit.predicted is not None and (sampled := exhibit.sampled) is not None:
        low, high = map(duration, sampled.range())
        how = f"{SHARE:.0%}: {low} .. {high}; median of {len(sampled.seconds)} steps with durations drawn as they vary"
        yield HeadFigure("predicted", sampled.median, sampled.bubble, how)
    elif exhibit.predicted is not None:
        yield HeadFigure("predicted", exhibit.predicted.batch_seconds, exhibit.predicted.bubble, "simulated")
    if steps := [step.timeline for step in exhibit.measured]:
        how = f"median of {len(steps)} steps" if len(steps) > 1 else f"step {exhibit.measured[0].number}"
        taken, idle = median(step.batch_seconds for step in steps), median(step.bubble for step in steps)
        yield HeadFigure("measured", taken, idle, how)
    if (least := least_seconds(schedule, costs, exhibit.links)) > 0:
        what = "the largest work of a rank" if schedule.num_batches > 1 else "no order of this work is faster"
        yield HeadFigure("lower bound", least, bubble(least), f"{what}; {whose}")

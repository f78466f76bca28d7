"""Exhibits: one run, plan or schedule, read once and drawn by every view.

run folder, plan, schedule, CSV, trace ---> Exhibit ---> page, PNG and SVG, terminal, comparison

A view draws the parts that are not None; `notes` report to people what is missing, and why. All views show the same
figures above it:

        per step    bubble
simulated   33.2 ms      27.8%      durations as given, or at their medians
predicted   33.6 ms      28.4%      where durations vary: the median of simulated steps
measured    35.1 ms      31.6%
lower bound 33.0 ms      27.3%
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ..schedules import Costs, Links, MemoryCurve, StageBytes, StepSamples, Timeline, memory_curves
from ..schedules.timing.bounds import schedule_bound
from ..schedules.timing.measured_inputs import median_costs
from ..schedules.timing.sampling import SHARE
from ..schedules.timing.simulate import busy_seconds
from ..schedules.timing.timeline import MeasuredStep
from ..schedules.wording import duration, size

SIMULATED, PREDICTED = "simulated", "predicted"  # captions, and labels of figures
_OF_PLAN = "predicted by the plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """One thing to look at.

    Arguments:
        name: for headings: the run's, the schedule's or the file's.
        simulated: None without a simulation.
        measured: traced steps, in ascending order.
        costs, links: of `simulated`; None: not known, and nothing can be varied.
        sampled: steps simulated with varying durations, whose median is predicted; None if their variation is not
            known.
        memory: [S] bytes of each stage, from which `curves` makes memory over time; empty if not known.
        memory_limit: [P] of each rank's device [bytes]; None if not known.
        predicted_peak, measured_peak: [P] bytes of tensors that a plan predicted and that a run had at its peak; None
            without one.
        context: parts in which each microbatch runs, each of them one of the schedule's.
        notes: what could not be read or is missing, a sentence each.
    """

    name: str
    simulated: Timeline | None = None
    measured: tuple[MeasuredStep, ...] = ()
    costs: Costs | None = None
    links: Links | None = None
    sampled: StepSamples | None = None
    memory: tuple[StageBytes, ...] = ()
    memory_limit: tuple[float, ...] | None = None
    predicted_peak: tuple[float, ...] | None = None
    measured_peak: tuple[float, ...] | None = None
    context: int = 1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.simulated is None and not self.measured:
            raise ValueError(f"nothing to show of {self.name!r}: expected a simulated or a measured step")

    @property
    def timelines(self) -> tuple[tuple[str, Timeline], ...]:
        """Captions and timelines: the simulated one, then the newest step."""
        found = [] if self.simulated is None else [(SIMULATED, self.simulated)]
        found += [(step.caption, step.timeline) for step in self.measured[-1:]]
        return tuple(found)

    def curves(self, timeline: Timeline) -> tuple[MemoryCurve, ...] | None:
        """[P] memory over time of one of its timelines; None if its stages' bytes are not known.

        Bytes are those of the simulated stages: a step measured with others, or on other ranks, has none.
        """
        simulated = timeline if self.simulated is None else self.simulated
        if not self.memory or timeline.schedule.placement != simulated.schedule.placement:
            return None
        return memory_curves(timeline, self.memory)

    def peaks(self, timeline: Timeline) -> tuple[tuple[float, ...] | None, str]:
        """[P] bytes at the peak of one of its timelines and how they were found, the surest first; None: not known."""
        if timeline.measured and self.measured_peak is not None:
            return self.measured_peak, "measured"
        if self.predicted_peak is not None:
            return self.predicted_peak, _OF_PLAN
        curves = self.curves(timeline)
        return (None, "") if curves is None else (tuple(curve.peak for curve in curves), "of the timeline")

    @property
    def memory_words(self) -> dict[str, str]:
        """Memory of the fullest rank: simulated, or predicted by the plan, and measured."""
        words = {}
        for caption, timeline in self.timelines:
            peaks, how = self.peaks(timeline)
            if timeline.measured and how == _OF_PLAN:  # the run has no figure of its own
                continue
            held = f"{held_activations(timeline):.3g} x activations of the model"
            label = PREDICTED if how == _OF_PLAN else caption.partition(",")[0]
            words[label] = held if peaks is None else size(max(peaks, default=0.0))
        return words


def held_activations(timeline: Timeline) -> float:
    """Most activations held at once on any rank, in those of one microbatch of the whole model, so that schedules with
    different numbers of stages compare."""
    schedule = timeline.schedule
    return max(timeline.peak_activations, default=0) / (schedule.num_stages * schedule.num_slices)


class HeadFigure(NamedTuple):
    """Seconds from batch to batch, and the idle fraction of the ranks at that pace."""

    label: str  # "simulated", "predicted", "measured" or "lower bound"
    seconds: float
    bubble: float
    how: str  # its conditions, for people


def headline(exhibit: Exhibit) -> tuple[HeadFigure, ...]:
    """Simulated, predicted and measured seconds, and the lower bound, as far as known, for all views.

    The bound is under the costs of the simulation; if these are not known, under the medians of the timeline's own
    actions.
    """
    return tuple(_figures(exhibit))


def _figures(exhibit: Exhibit) -> Iterator[HeadFigure]:
    _, shown = exhibit.timelines[0]
    schedule = shown.schedule
    costs = median_costs(shown) if exhibit.costs is None else exhibit.costs
    whose = "medians of its own actions" if exhibit.costs is None else "costs of the simulation"

    def bubble(seconds: float) -> float:
        return 1 - busy_seconds(schedule, costs) / (schedule.num_ranks * seconds)

    if exhibit.simulated is not None:
        durations = "durations as given" if exhibit.sampled is None else "durations at their medians"
        yield HeadFigure(SIMULATED, exhibit.simulated.batch_seconds, exhibit.simulated.bubble, durations)
    if (sampled := exhibit.sampled) is not None:
        low, high = map(duration, sampled.range())
        how = f"{SHARE:.0%}: {low} .. {high}; median of {len(sampled.seconds)} steps with durations drawn as they vary"
        yield HeadFigure(PREDICTED, sampled.median, sampled.bubble, how)
    if steps := [step.timeline for step in exhibit.measured]:
        how = f"median of {len(steps)} steps" if len(steps) > 1 else f"step {exhibit.measured[0].number}"
        taken, idle = median(step.batch_seconds for step in steps), median(step.bubble for step in steps)
        yield HeadFigure("measured", taken, idle, how)
    if (least := schedule_bound(schedule, costs, exhibit.links)) > 0:
        what = "the largest work of a rank" if schedule.num_batches > 1 else "no order of this work is faster"
        yield HeadFigure("lower bound", least, bubble(least), f"{what}; {whose}")

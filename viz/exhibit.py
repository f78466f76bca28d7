"""Exhibits: one run, plan or schedule, read once and drawn by every view alike.

    run folder, plan, schedule, CSV, trace ---> Exhibit ---> page, PNG and SVG, terminal, comparison

A view asks for what it draws and leaves out what is None; `notes` say to people what is missing, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schedules import Costs, Links, MemoryCurve, StageBytes, StepSamples, Timeline, memory_curves
from ..schedules.timing.timeline import MeasuredStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """One thing to look at.

    Arguments:
        name: for headings: the run's, the schedule's or the file's.
        predicted: simulated; None where nothing is.
        measured: traced steps, in ascending order.
        costs, links: under which `predicted` was simulated; None: they are not known, and nothing can be varied.
        sampled: steps simulated with durations as they vary; None where nobody knows how they do.
        memory: [S] bytes of each stage, of which `curves` makes memory over time; empty where they are not known.
        memory_limit: [P] of each rank's device [bytes]; None where nobody said.
        predicted_peak, measured_peak: [P] bytes of tensors that a plan predicted and that a run had at its peak; None
            where there is none.
        notes: what could not be read or is missing, a sentence each.
    """

    name: str
    predicted: Timeline | None = None
    measured: tuple[MeasuredStep, ...] = ()
    costs: Costs | None = None
    links: Links | None = None
    sampled: StepSamples | None = None
    memory: tuple[StageBytes, ...] = ()
    memory_limit: tuple[float, ...] | None = None
    predicted_peak: tuple[float, ...] | None = None
    measured_peak: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.predicted is None and not self.measured:
            raise ValueError(f"nothing to show of {self.name!r}: expected a prediction or a measured step")

    @property
    def timelines(self) -> tuple[tuple[str, Timeline], ...]:
        """Captions and timelines: the predicted one, then the newest step."""
        found = [] if self.predicted is None else [("predicted", self.predicted)]
        found += [(step.caption, step.timeline) for step in self.measured[-1:]]
        return tuple(found)

    def curves(self, timeline: Timeline) -> tuple[MemoryCurve, ...] | None:
        """[P] memory over time of one of its timelines; None where its stages' bytes are not known.

        Bytes are those of the predicted stages: a step measured with others, or on other ranks, has none.
        """
        predicted = timeline if self.predicted is None else self.predicted
        if not self.memory or timeline.schedule.placement != predicted.schedule.placement:
            return None
        return memory_curves(timeline, self.memory)

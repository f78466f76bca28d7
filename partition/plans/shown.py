"""A plan as what can be looked at; `viz` loads when somebody looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...schedules.wording import duration
from .record import PlanRecord
from .simulated import sampled, simulated

if TYPE_CHECKING:
    from ...viz.exhibit import Exhibit


def exhibit_of_plan(plan: PlanRecord, *, name: str | None = None, num_microbatches: int | None = None) -> Exhibit:
    """Its own schedule, simulated with its own costs and links; of a plan that keeps none over free ones, with a note.
    Raises ValueError as `schedule_of` does."""
    from ...viz.exhibit import Exhibit

    timeline, costs, links = simulated(plan, num_microbatches=num_microbatches)
    name = name or f"plan of {timeline.schedule.name}"
    notes = []
    if links is None:
        note = f"{name}: messages take no time in this picture, since the plan does not keep its links"
        if plan.simulated_step_time is not None:
            note += f"; with them the planner simulated {duration(plan.simulated_step_time)} a batch"
        notes.append(note)
    return Exhibit(
        name=name,
        predicted=timeline,
        costs=costs,
        links=links,
        sampled=sampled(plan, num_microbatches=num_microbatches),
        memory=plan.stage_bytes,
        memory_limit=plan.by_group(plan.memory_limits),
        predicted_peak=plan.by_group(plan.memory_bytes),
        notes=tuple(notes),
    )

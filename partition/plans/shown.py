"""A plan as what can be looked at; `viz` loads when somebody looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...schedules.timing.costs import Costs
from ...schedules.timing.simulate import simulate
from .record import PlanRecord
from .to_schedule import schedule_of

if TYPE_CHECKING:
    from ...viz.exhibit import Exhibit


def exhibit_of_plan(plan: PlanRecord, *, name: str | None = None, num_microbatches: int | None = None) -> Exhibit:
    """Its own schedule, simulated with its own costs, over links that are free, since a plan does not keep them.

    Arguments:
        name: for headings; the schedule's by default.
        num_microbatches: of the whole batch, where the plan leaves it open.

    Raises ValueError as `schedule_of` does.
    """
    from ...viz.exhibit import Exhibit

    schedule = schedule_of(plan, num_microbatches=num_microbatches)
    costs = Costs(
        forward=[stage.forward_seconds for stage in plan.stages],
        backward=[stage.backward_seconds for stage in plan.stages],
        update=[stage.update_seconds for stage in plan.stages],
    )
    name = name or f"plan of {schedule.name}"
    note = f"{name}: messages take no time in this picture, since a plan's file does not keep its links"
    if plan.simulated_step_time is not None:
        note += f"; with them the planner simulated {plan.simulated_step_time:.4g} s a batch"
    timeline = simulate(schedule, costs)
    return Exhibit(name=name, predicted=timeline, costs=costs, memory=plan.stage_bytes, notes=(note,))

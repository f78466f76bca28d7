"""A plan's own schedule, simulated as its planner did."""

from __future__ import annotations

from typing import NamedTuple

from ...schedules.ir import Schedule
from ...schedules.timing.costs import Costs
from ...schedules.timing.links import Links
from ...schedules.timing.sampling import LEAST_SAMPLES, MOST_ACTIONS, StepSamples, simulate_spread
from ...schedules.timing.simulate import simulate
from ...schedules.timing.spread import Spread
from ...schedules.timing.timeline import Timeline
from ...schedules.transform import with_late_updates
from .record import PlanRecord
from .to_schedule import schedule_of

MOST_SAMPLED = MOST_ACTIONS // LEAST_SAMPLES  # actions of a batch that is simulated many times


class SimulatedPlan(NamedTuple):
    """A plan's timeline, and what it was simulated from; `links` is None where the plan does not keep them."""

    timeline: Timeline
    costs: Costs
    links: Links | None


def simulated(plan: PlanRecord, *, num_microbatches: int | None = None) -> SimulatedPlan:
    """All ranks of the plan over a whole batch: `timeline.batch_seconds` is the plan's `simulated_step_time`.

    To the last bit where the planner simulated the same; to rounding where a short batch stood for a long one. Messages
    of unequal replicas that are ready at the same moment go in the order of ranks: where the planner took other nodes
    first than the cluster lists, another one may go first here.

    Without links messages take no time, and the sum of gradients is a part of each update.

    Arguments:
        num_microbatches: of the whole batch, where the plan leaves it open.

    Raises ValueError as `schedule_of` does.
    """
    schedule, links = _scheduled(plan, num_microbatches)
    return SimulatedPlan(simulate(schedule, plan.costs, links), plan.costs, links)


def sampled(plan: PlanRecord, *, num_microbatches: int | None = None) -> StepSamples | None:
    """Steps of the plan with durations that vary as they did in its profile, which knows of single actions alone.

    Fewer steps of larger batches: 200 of up to 10,000 actions, 19 of MOST_SAMPLED (105,263), so that 2 million actions
    are simulated at most. None for larger ones, and where the profile says nothing of that.
    """
    microbatches = num_microbatches or plan.num_microbatches or 0
    if not any(stage.spread for stage in plan.stages) or 2 * len(plan.stages) * microbatches > MOST_SAMPLED:
        return None
    schedule, links = _scheduled(plan, num_microbatches)
    return simulate_spread(schedule, plan.costs, Spread.of_half_ranges([stage.spread for stage in plan.stages]), links)


class ExpectedStep(NamedTuple):
    """What a step of a plan is expected to take [s], and its bubble."""

    seconds: float
    bubble: float


def expected(plan: PlanRecord) -> ExpectedStep | None:
    """The middle of the steps in which actions vary; of a plan that knows nothing of that, its simulated step; None
    where it was not simulated.

    Ranks that wait for each other wait for the slowest, so that this is longer than a step of which each action takes
    what it usually does: most where replicas run few microbatches each.
    """
    if plan.simulated_step_time is None:
        return None
    drawn = sampled(plan)
    if drawn is None:
        return ExpectedStep(plan.simulated_step_time, plan.bubble)
    return ExpectedStep(drawn.median, max(0.0, drawn.bubble))


def _scheduled(plan: PlanRecord, num_microbatches: int | None) -> tuple[Schedule, Links | None]:
    """What runs, and the links on the ranks that run it."""
    schedule, links = schedule_of(plan, num_microbatches=num_microbatches), plan.links
    if links is not None:
        links = links.on(schedule.owners[: len(plan.stages) // plan.num_chunks])
    return with_late_updates(schedule, links), links

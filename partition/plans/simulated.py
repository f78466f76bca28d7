"""A plan's own schedule, simulated as its planner did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...schedules.ir import Schedule
from ...schedules.timing.costs import Costs, by_owner
from ...schedules.timing.links import Links
from ...schedules.timing.sampling import LEAST_SAMPLES, MOST_ACTIONS, StepSamples, simulate_spread
from ...schedules.timing.simulate import simulate
from ...schedules.timing.spread import Spread
from ...schedules.timing.timeline import Timeline
from ...schedules.transform import defer_updates
from .record import PlanRecord
from .to_schedule import schedule_of
from .traffic import links_of

MOST_SAMPLED = MOST_ACTIONS // LEAST_SAMPLES  # actions of a batch that is simulated many times


class SimulatedPlan(NamedTuple):
    """A plan's timeline, and what it was simulated from; `links` is None where the plan does not keep its traffic."""

    timeline: Timeline
    costs: Costs
    links: Links | None


def simulated(plan: PlanRecord, *, num_microbatches: int | None = None) -> SimulatedPlan:
    """All ranks of the plan over a whole batch: `timeline.batch_seconds` is the plan's `simulated_step_time`.

    To the last bit where the planner simulated the same; to rounding where a short batch stood for a long one. Messages
    of unequal replicas that are ready at the same moment go in the order of ranks: where the planner took other nodes
    first than the cluster lists, another one may go first here.

    Without traffic messages take no time, and the sum of gradients is a part of each update.

    Arguments:
        num_microbatches: of the whole batch, where the plan leaves it open.

    Raises ValueError as `schedule_of` does.
    """
    schedule, costs, links = _inputs(plan, num_microbatches)
    return SimulatedPlan(simulate(schedule, costs, links), costs, links)


def sampled(plan: PlanRecord, *, num_microbatches: int | None = None) -> StepSamples | None:
    """Steps of the plan with durations that vary as they did in its profile, which knows of single actions alone.

    Fewer steps of larger batches: 200 of up to 10,000 actions, 19 of MOST_SAMPLED (105,263), so that 2 million actions
    are simulated at most. None for larger ones, and where the profile says nothing of that.
    """
    microbatches = num_microbatches or plan.num_microbatches or 0
    if not any(stage.spread for stage in plan.stages) or 2 * len(plan.stages) * microbatches > MOST_SAMPLED:
        return None
    schedule, costs, links = _inputs(plan, num_microbatches)
    return simulate_spread(schedule, costs, Spread.of_half_ranges([stage.spread for stage in plan.stages]), links)


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


def _inputs(plan: PlanRecord, num_microbatches: int | None) -> tuple[Schedule, Costs, Links | None]:
    schedule, traffic = schedule_of(plan, num_microbatches=num_microbatches), plan.traffic
    inputs = [stage.backward_seconds / 2 if (i := stage.input_grad_seconds) is None else i for stage in plan.stages]
    weights = [stage.backward_seconds - i for stage, i in zip(plan.stages, inputs, strict=True)]
    forwards = [stage.forward_ratios or (1.0,) for stage in plan.stages]
    backwards = [stage.backward_ratios or (1.0,) for stage in plan.stages]

    def column(seconds: Sequence[float], ratios: Sequence[Sequence[float]]) -> list[float | list[float]]:
        return by_owner(schedule, [[each * r for r in own] for each, own in zip(seconds, ratios, strict=True)])

    costs = Costs(
        forward=column([stage.forward_seconds for stage in plan.stages], forwards),
        backward=column([stage.backward_seconds for stage in plan.stages], backwards),
        input_grad=column(inputs, backwards),
        weight_grad=column(weights, backwards),
        update=[each.optimizer_seconds for each in traffic] or [stage.update_seconds for stage in plan.stages],
        overhead=plan.overheads,
        message_overhead=plan.message_overheads,
        around=plan.around_seconds,
        norm=plan.norm_seconds,
        tied=plan.tied,
        sum_busy=[each.sum_busy for each in traffic] or 0.0,
    )
    if not traffic:
        return schedule, costs, None
    if schedule.rule.updates_may_wait and any(each.sum_seconds for each in traffic):
        schedule = defer_updates(schedule)  # as the runtime does, so that sums overlap with compute
    ranks = schedule.owners[: len(plan.stages) // plan.num_chunks]
    links = links_of(traffic, ranks, positions=plan.positions, rings=ranks)
    return schedule, costs, links

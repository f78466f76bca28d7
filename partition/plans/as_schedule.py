"""A plan's own schedule: as it is carried out, simulated as its planner did, shown, and with what its steps took.

    inputs of the simulation, as steps show them  ->  F, B, I, W, runtime, messages, sums, update; around a step
    simulated again                               ->  step, bubble, range

What a trial did not show (a message that no rank waited for) stays as predicted. F, B, I and W of a stage's replicas
are each rank's own; sums and updates have one figure for all. `viz` loads when a plan is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from statistics import median, quantiles
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ...schedules.checks import check
from ...schedules.explain.prediction import PredictionCheck, check_prediction
from ...schedules.families.registry import build, canonical_name, family
from ...schedules.ir import COMPUTE_OPS, Action, Op, Schedule, ScheduleError
from ...schedules.timing.costs import Costs
from ...schedules.timing.inputs import calibrate
from ...schedules.timing.links import Links
from ...schedules.timing.measured_inputs import measured_inputs, typical
from ...schedules.timing.sampling import LEAST_SAMPLES, MOST_ACTIONS, StepSamples, simulate_spread
from ...schedules.timing.simulate import simulate
from ...schedules.timing.spread import Spread
from ...schedules.timing.timeline import Timeline
from ...schedules.transform import on_ranks, replicate, with_late_updates, with_offload, with_overlap
from ...schedules.wording import count, duration
from ..stage_cost import OFFLOAD
from .record import JOINT, ORDERED, OWN, PlanRecord, PlanStage

if TYPE_CHECKING:
    from ...viz.exhibit import Exhibit

P = TypeVar("P", bound=PlanRecord)

_LEAST_SPREAD = 8  # durations of a stage that show how they vary
_SHOWN = 0.01  # of the step, from which on a cause is named
MOST_SAMPLED = MOST_ACTIONS // LEAST_SAMPLES  # actions of a batch that is simulated many times
DEFAULT_SCHEDULE = "1f1b"


def schedule_of(plan: PlanRecord, *, num_microbatches: int | None = None) -> Schedule:
    """The plan's schedule; ranks that it leaves idle have an empty program. A rank of the schedule is a rank of the
    plan, or, of a plan that splits tensors, a group of its ranks that run it together (`tensor_groups`).
    `num_microbatches`: M of the whole batch, where the plan leaves it open. Raises ValueError where M is missing or
    contradicts the plan, for replicas that the schedule does not know, and for groups that are not in a row."""
    wanted = plan.num_microbatches
    if wanted is None:
        wanted = num_microbatches
    elif num_microbatches not in (None, wanted):
        raise ValueError(
            f"num_microbatches={num_microbatches} for a plan of {wanted}: expected {wanted}, or leave it out"
        )
    if wanted is None:
        raise ValueError("the plan leaves the number of microbatches open: expected num_microbatches= as well")
    first = [plan.stages[s] for s in plan.firsts]
    rank_of = {rank: number for number, group in enumerate(plan.tensor_groups) for rank in group}
    groups = [rank_of[rank] for stage in first for rank in sorted(stage.ranks[:: stage.tensor])]
    counts = tuple(stage.replicas for stage in first)
    if plan.order:
        schedule = replicate(one_pipeline(plan, num_microbatches=wanted), counts[0])
    else:
        name = canonical_name(plan.schedule or DEFAULT_SCHEDULE)
        schedule = _over_replicas(plan, name, counts, wanted)
    leaving = [number for number, stage in enumerate(plan.stages) if stage.recompute == OFFLOAD]
    if leaving:
        schedule = with_offload(schedule, stages=leaving, costs=plan.costs)
    if plan.overlaps:
        schedule = with_overlap(schedule)
    return on_ranks(schedule, groups, num_ranks=len(plan.tensor_groups))


def one_pipeline(plan: PlanRecord, *, num_microbatches: int) -> Schedule:
    """The schedule of one of a plan's equal replicas, its share of the microbatches, on ranks 0 to P - 1. Raises
    ValueError for replicas that are not equal, or do not divide M; ScheduleError for an order that is none."""
    each = plan.stages[0].replicas
    if any(count != each for count in plan.replicas):
        raise ValueError(f"replicas {plan.replicas} under an order of one pipeline: expected as many of each stage")
    name = OWN if plan.schedule == OWN else canonical_name(plan.schedule or DEFAULT_SCHEDULE)
    _check_share(num_microbatches, each, name)
    if plan.order:
        return _ordered(plan, num_microbatches // each)
    sizes = {"num_ranks": len(plan.firsts), "num_microbatches": num_microbatches // each, **_sizes(plan)}
    return build(name, **sizes)  # type: ignore[arg-type]


def _ordered(plan: PlanRecord, num_microbatches: int) -> Schedule:
    """The programs of the plan's order; ScheduleError for an order of other work."""
    try:
        programs = tuple(tuple(map(Action.parse, text.split())) for text in plan.order)
    except ValueError as error:
        raise ScheduleError(f"order of a plan: {error}") from None
    if len(programs) != (width := len(plan.firsts)):
        raise ScheduleError(f"order of a plan: {len(programs)} programs for {width} ranks of one pipeline")
    placed = tuple(tuple(s for s, p in enumerate(plan.positions) if p == place) for place in range(width))
    name = JOINT if plan.schedule == OWN else f"{plan.schedule}, {ORDERED}"
    made = Schedule(name=name, placement=placed, programs=programs, num_microbatches=num_microbatches)
    check(made)
    return made


def _check_share(num_microbatches: int, replicas: int, name: str) -> None:
    if num_microbatches % replicas:
        raise ValueError(
            f"{num_microbatches} microbatches on {replicas} replicas under schedule {name!r}: expected a multiple of "
            f"{replicas}"
        )


def _sizes(plan: PlanRecord) -> dict[str, object]:
    """V, and n where there are slices."""
    sizes: dict[str, object] = {"num_chunks": plan.num_chunks}
    return sizes | ({"num_slices": len(plan.slice_lengths)} if plan.slice_lengths else {})


def _over_replicas(plan: PlanRecord, name: str, counts: tuple[int, ...], num_microbatches: int) -> Schedule:
    """The named schedule on replicas, with ranks in the order of the stages."""
    if plan.num_chunks == 1 and max(counts) > 1 and family(name).takes_replicas:
        return build(name, num_ranks=sum(counts), num_microbatches=num_microbatches, replicas=counts)
    each = counts[0]
    if len(set(counts)) > 1:
        raise ValueError(
            f"stages on {'-'.join(map(str, counts))} ranks under schedule {name!r}: expected as many ranks for each "
            f"stage, or a schedule that takes unequal replicas, such as '1f1b'"
        )
    _check_share(num_microbatches, each, name)
    single = build(name, num_ranks=len(counts), num_microbatches=num_microbatches // each, **_sizes(plan))  # type: ignore[arg-type]
    return replicate(single, each)


class SimulatedPlan(NamedTuple):
    """A plan's timeline, and what it was simulated from; `links` is None where the plan does not keep them."""

    timeline: Timeline
    costs: Costs
    links: Links | None


def simulated(plan: PlanRecord, *, num_microbatches: int | None = None) -> SimulatedPlan:
    """All ranks of the plan over a whole batch: `timeline.batch_seconds` is the plan's `simulated_step_time`.

    To the last bit where the planner simulated the same; to rounding where a long batch was simulated by a short one.
    Messages of unequal replicas that are ready at the same moment go in the order of ranks: where the planner took
    other nodes first than the cluster lists, another one may go first here.

    Without links messages take no time, and the all-reduce of gradients is a part of each update. Arguments and errors
    are those of `schedule_of`.
    """
    schedule, links = _scheduled(plan, num_microbatches)
    return SimulatedPlan(simulate(schedule, plan.costs, links), plan.costs, links)


def sampled(plan: PlanRecord, *, num_microbatches: int | None = None) -> StepSamples | None:
    """Steps of the plan with durations that vary as they did in its profile, which knows of single actions alone. Fewer
    steps of larger batches: 200 of up to 10,000 actions, 19 of MOST_SAMPLED (105,263), so that 2 million actions are
    simulated at most. None for larger ones, and where the profile says nothing of that."""
    microbatches = (num_microbatches or plan.num_microbatches or 0) * (len(plan.slice_lengths) or 1)
    if not any(stage.spread for stage in plan.stages) or 2 * len(plan.stages) * microbatches > MOST_SAMPLED:
        return None
    schedule, links = _scheduled(plan, num_microbatches)
    return simulate_spread(schedule, plan.costs, Spread.of_half_ranges([stage.spread for stage in plan.stages]), links)


def expected(plan: PlanRecord) -> tuple[float, float] | None:
    """Expected seconds of a step of a plan [s], and its bubble.

    The middle of the steps in which actions vary; of a plan that knows nothing of that, its simulated step; None
    where it was not simulated.

    Ranks that wait for each other wait for the slowest, so that this is longer than a step of which each action takes
    what it usually does: most where replicas run few microbatches each.
    """
    if plan.simulated_step_time is None:
        return None
    drawn = sampled(plan)
    if drawn is None:
        return plan.simulated_step_time, plan.bubble
    return drawn.median, max(0.0, drawn.bubble)


def _scheduled(plan: PlanRecord, num_microbatches: int | None) -> tuple[Schedule, Links | None]:
    schedule, links = schedule_of(plan, num_microbatches=num_microbatches), plan.links
    if links is not None:
        links = links.on([schedule.owners[s] for s in plan.firsts])
    return with_late_updates(schedule, links), links


def exhibit_of_plan(plan: PlanRecord, *, name: str | None = None, num_microbatches: int | None = None) -> Exhibit:
    """The plan's schedule, simulated with its costs and links; with a note if the plan has no links: they are free.
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
        simulated=timeline,
        costs=costs,
        links=links,
        sampled=sampled(plan, num_microbatches=num_microbatches),
        memory=plan.stage_bytes,
        memory_limit=plan.by_group(plan.memory_limits),
        predicted_peak=plan.by_group(plan.memory_bytes),
        notes=tuple(notes),
    )


def with_measured(plan: P, steps: Sequence[Timeline], known: Costs) -> P:
    """The plan with what its own steps took, simulated again; a note says how far the prediction was off, and where.
    Bottlenecks, runners-up and bounds, which were not measured, are corrected by the ratio of the steps. `steps`:
    measured ones of the plan's own schedule. `known`: costs that the same run measured itself: what happens between
    actions, and whether there is a norm."""
    predicted, _, on_ranks = simulated(plan)
    seen = measured_inputs(steps, known, planned=plan.costs, many=typical)
    if not all(seconds for each, seconds in seen.items() if each.kind == "overhead"):
        seen = {
            each: seconds for each, seconds in seen.items() if each.kind != "overhead"
        }  # a process of several ranks
    costs, links = calibrate(predicted.schedule, plan.costs, on_ranks, seen, queueing=True)
    alone = [(place,) for place in range(len(plan.firsts))]
    measured = replace(plan, costs=costs, links=None if links is None else links.on(alone))
    after = simulated(measured).timeline
    took = median(step.batch_seconds for step in steps)
    check = check_prediction(predicted, steps, costs=plan.costs, links=on_ranks, known=known)
    return _scaled(
        replace(
            measured,
            stages=_stages(plan, measured, steps),
            simulated_step_time=after.batch_seconds,
            simulated_bubble=max(0.0, after.bubble),
            tried_seconds=took,
            notes=(*plan.notes, _note(check, took, len(steps))),
        ),
        after.batch_seconds / predicted.batch_seconds,
    )


def _note(check: PredictionCheck, took: float, num_steps: int) -> str:
    causes = [
        f"{each.name} {'-' if each.seconds < 0 else '+'}{duration(abs(each.seconds))}"
        for each in check.causes
        if abs(each.seconds) >= _SHOWN * took
    ]
    return (
        f"tried for {count(num_steps, 'step')}: {duration(took)} a batch, predicted from the profile "
        f"{duration(check.predicted)}{': ' if causes else ''}{', '.join(causes)}"
    )


def _stages(plan: PlanRecord, measured: PlanRecord, steps: Sequence[Timeline]) -> tuple[PlanStage, ...]:
    """Stages with how their actions varied, and a pace that is as far off as these."""
    spreads = _spreads(steps)
    before, after = (list(map(add, each.seconds(Op.F), each.seconds(Op.B))) for each in (plan, measured))
    return tuple(
        replace(
            stage,
            step_seconds=stage.step_seconds * (now / was if was > 0 else 1.0),
            spread=spreads.get(number, stage.spread),
        )
        for number, (stage, was, now) in enumerate(zip(plan.stages, before, after, strict=True))
    )


def _spreads(steps: Sequence[Timeline]) -> dict[int, float]:
    """By stage half the interquartile range of its actions over the median, weighted by their seconds."""
    durations: dict[tuple[int, object, int], list[float]] = defaultdict(list)
    for step in steps:
        for rank, trace in enumerate(step.ranks):
            for (stage, op, _), start, end in trace.compute:
                if op in COMPUTE_OPS:
                    durations[stage, op, rank].append(end - start)
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (stage, _, _), own in durations.items():
        if len(own) >= _LEAST_SPREAD and (middle := median(own)) > 0:
            low, _, high = quantiles(own, n=4, method="inclusive")
            found[stage].append((middle, (high - low) / 2 / middle))
    return {stage: sum(w * s for w, s in own) / sum(w for w, _ in own) for stage, own in found.items()}


def _scaled(plan: P, ratio: float) -> P:
    """The plan with bottlenecks, runners-up and bounds, which nothing measured, corrected by what the step was off."""
    searched = plan.searched
    return replace(
        plan,
        bottleneck=plan.bottleneck * ratio,
        bound=plan.bound * ratio,
        runners_up=tuple(
            replace(
                each,
                bottleneck=each.bottleneck * ratio,
                simulated_step_time=None if (s := each.simulated_step_time) is None else s * ratio,
            )
            for each in plan.runners_up
        ),
        searched=None
        if searched is None
        else replace(
            searched,
            least=searched.least * ratio,
            least_left=None if searched.least_left is None else searched.least_left * ratio,
        ),
    )

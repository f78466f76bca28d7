"""From a plan to the schedule that carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...schedules.checks import check
from ...schedules.families.registry import build, canonical_name, family
from ...schedules.ir import Action, Schedule, ScheduleError
from ...schedules.transform import on_ranks, replicate, with_offload
from ..stage_cost import OFFLOAD
from .record import PlanRecord

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
        raise ValueError("the plan leaves the number of microbatches open: expected num_microbatches= beside it")
    first = plan.stages[: len(plan.stages) // plan.num_chunks]
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
    return on_ranks(schedule, groups, num_ranks=len(plan.tensor_groups))


def one_pipeline(plan: PlanRecord, *, num_microbatches: int) -> Schedule:
    """The schedule of one of a plan's equal replicas, its share of the microbatches, on ranks 0 to P - 1. Raises
    ValueError for replicas that are not equal, or do not divide M; ScheduleError for an order that is none."""
    width = len(plan.stages) // plan.num_chunks
    each = plan.stages[0].replicas
    if any(count != each for count in plan.replicas):
        raise ValueError(f"replicas {plan.replicas} under an order of one pipeline: expected as many of each stage")
    name = canonical_name(plan.schedule or DEFAULT_SCHEDULE)
    _check_share(num_microbatches, each, name)
    own = build(name, num_ranks=width, num_microbatches=num_microbatches // each, **_sizes(plan))  # type: ignore[arg-type]
    return _ordered(own, plan.order) if plan.order else own


def _ordered(schedule: Schedule, order: Sequence[str]) -> Schedule:
    """The programs of `order` in place of a schedule's; ScheduleError for what is no order of the same work."""
    try:
        programs = tuple(tuple(map(Action.parse, text.split())) for text in order)
    except ValueError as error:
        raise ScheduleError(f"order of a plan: {error}") from None
    if len(programs) != schedule.num_ranks:
        raise ScheduleError(f"order of a plan: {len(programs)} programs for {schedule.num_ranks} ranks of one pipeline")
    made = replace(schedule, name="auto", programs=programs)
    check(made)
    return made


def _check_share(num_microbatches: int, replicas: int, name: str) -> None:
    if num_microbatches % replicas:
        raise ValueError(
            f"{num_microbatches} microbatches on {replicas} replicas under schedule {name!r}: expected a multiple of "
            f"{replicas}"
        )


def _sizes(plan: PlanRecord) -> dict[str, object]:
    """V and n, where there are several."""
    numbers = {"num_chunks": plan.num_chunks, "num_slices": len(plan.slice_lengths)}
    return {name: number for name, number in numbers.items() if number > 1}


def _over_replicas(plan: PlanRecord, name: str, counts: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Ranks in the order of the stages."""
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

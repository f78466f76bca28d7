"""From a plan to the schedule that carries it out."""

from __future__ import annotations

from ...schedules.builders.replicas import on_ranks, replicate
from ...schedules.ir import Schedule
from ...schedules.registry import build, canonical_name, family
from .record import PlanRecord

DEFAULT_SCHEDULE = "1f1b"


def schedule_of(plan: PlanRecord, *, num_microbatches: int | None = None) -> Schedule:
    """The plan's schedule on the plan's ranks; ranks that it leaves idle have an empty program.

    Arguments:
        num_microbatches: M of the whole batch, where the plan leaves it open.

    Raises ValueError where M is missing or contradicts the plan, and for replicas that the schedule does not know.
    """
    wanted = plan.num_microbatches
    if wanted is None:
        wanted = num_microbatches
    elif num_microbatches not in (None, wanted):
        raise ValueError(
            f"num_microbatches={num_microbatches} for a plan of {wanted}: expected {wanted}, or leave it out"
        )
    if wanted is None:
        raise ValueError("the plan leaves the number of microbatches open: expected num_microbatches= beside it")
    name = canonical_name(plan.schedule or DEFAULT_SCHEDULE)
    first = plan.stages[: len(plan.stages) // plan.num_chunks]
    if any(stage.tensor > 1 for stage in plan.stages):
        raise ValueError(
            f"the plan splits tensors over {max(stage.tensor for stage in plan.stages)} ranks: expected tensor=1; "
            f"tensor-parallel stages are planned and simulated, but not yet run"
        )
    ranks = [rank for stage in first for rank in sorted(stage.ranks)]
    counts = tuple(stage.replicas for stage in first)
    return on_ranks(_over_replicas(name, counts, plan.num_chunks, wanted), ranks, num_ranks=plan.num_devices)


def _over_replicas(name: str, counts: tuple[int, ...], num_chunks: int, num_microbatches: int) -> Schedule:
    """Ranks in the order of the stages."""
    if num_chunks == 1 and max(counts) > 1 and family(name).takes_replicas:
        return build(name, num_ranks=sum(counts), num_microbatches=num_microbatches, replicas=counts)
    each = counts[0]
    if len(set(counts)) > 1:
        raise ValueError(
            f"stages on {'-'.join(map(str, counts))} ranks under schedule {name!r}: expected as many ranks for each "
            f"stage, or a schedule that takes unequal replicas, such as '1f1b'"
        )
    if num_microbatches % each:
        raise ValueError(
            f"{num_microbatches} microbatches on {each} replicas under schedule {name!r}: expected a multiple of {each}"
        )
    chunks = num_chunks if num_chunks > 1 else None
    single = build(name, num_ranks=len(counts), num_microbatches=num_microbatches // each, num_chunks=chunks)
    return replicate(single, each)

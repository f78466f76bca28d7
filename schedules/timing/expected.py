"""Seconds of a step to hold a timeline against: of the family's closed form, and the least of any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from ..families import EqualStages, Family
from ..ir import COMPUTE_OPS, Action, Op, Schedule
from ..registry import FAMILIES, build
from .bounds import lower_bound
from .costs import Costs
from .links import Links
from .simulate import ideal_makespan
from .timeline import Timeline


def median_costs(timeline: Timeline) -> Costs:
    """Costs of a timeline's own actions: the median of each stage and op. Messages and norms cost nothing in it."""
    found: dict[tuple[Op, int], list[float]] = {}
    for trace in timeline.ranks:
        for (stage, op, _), start, end in trace.compute:
            found.setdefault((op, stage), []).append(end - start)
    stages = range(timeline.schedule.num_stages)
    present = {op for op, _ in found}

    def column(op: Op) -> list[float]:
        return [median(found.get((op, stage), (0.0,))) for stage in stages]

    split = bool(present & {Op.I, Op.W})
    return Costs(
        forward=column(Op.F),
        backward=column(Op.B) if Op.B in present or not split else None,
        input_grad=column(Op.I) if split else None,
        weight_grad=column(Op.W) if split else None,
        update=column(Op.U),
    )


def busy_seconds(schedule: Schedule, costs: Costs) -> float:
    """Seconds of F, B, I and W of all ranks together, a batch."""
    table = costs.table_for(schedule)
    own = sum(table.of(op, s, k) for program in schedule.programs for s, op, k in program if op in COMPUTE_OPS)
    return own / schedule.num_batches


def closed_form_seconds(schedule: Schedule, costs: Costs) -> float | None:
    """Seconds from batch to batch by the closed form of the schedule's family, for stages of the mean cost, and free
    links; None where it has none: another order, replicas, unequal microbatches, or sizes that it does not cover."""
    family = FAMILIES.get(schedule.name)
    held = {len(stages) for stages in schedule.placement}
    if family is None or family.batch_seconds is None or len(held) > 1:
        return None
    if {len(ranks) for ranks in schedule.owners} != {family.weight_copies}:
        return None
    num_chunks = held.pop() // family.weight_copies
    sizes = {
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": num_chunks,
        "num_slices": schedule.num_slices,
    }
    if num_chunks != family.num_chunks and not family.takes_chunks:
        return None
    if schedule.num_slices > 1 and not family.takes_slices:
        return None
    if not schedule.is_asynchronous and _programs(sizes, family) != schedule.programs:
        return None
    table = costs.table_for(schedule)
    if table.varies:
        return None
    whole = fmean(table.backward)
    input_grad = fmean(table.input_grad) if family.splits_backward else whole / 2
    weight_grad = fmean(table.weight_grad) if family.splits_backward else whole / 2
    equal = EqualStages(forward=fmean(table.forward), input_grad=input_grad, weight_grad=weight_grad, **sizes)
    return family.batch_seconds(equal)


def _programs(sizes: Mapping[str, int], family: Family) -> Sequence[Sequence[Action]] | None:
    """The order of the family itself; None for sizes that it has none for."""
    try:
        return build(family.name, **sizes).programs
    except ValueError:
        return None


def least_seconds(schedule: Schedule, costs: Costs, links: Links | None = None) -> float:
    """Seconds that no order of this work on this placement can beat: of a flush batch `lower_bound`, in a stream
    the largest own work of any rank, a batch."""
    if schedule.is_asynchronous or schedule.num_batches > 1:
        return ideal_makespan(schedule, costs) / schedule.num_batches
    return lower_bound(schedule, costs, links)

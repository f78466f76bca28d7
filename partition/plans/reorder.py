"""A better order for a plan's own work: the same stages on the same ranks, in no more memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from ...schedules.check import check
from ...schedules.ir import Schedule
from ...schedules.registry import canonical_name, family
from ...schedules.synthesis.synthesize import synthesize
from ...schedules.timing.costs import Costs
from ...schedules.wording import duration
from ..profile import Profile
from .record import PlanRecord, PlanStage
from .simulated import simulated
from .to_schedule import one_pipeline
from .traffic import links_of

P = TypeVar("P", bound=PlanRecord)

WORTH = 0.002  # of the step: less is within what a profile can tell
_LEAST_PART = 0.05  # of a backward, that either half takes at least


def reorder(
    plan: P, profile: Profile | None = None, *, seconds: float, evaluations: int | None = None, seed: int = 0
) -> P:
    """The plan with a synthesised order where that is faster; else as it is, with a note of how far from optimal.

    No rank holds more activations at once than under the plan's own schedule.

    Arguments:
        plan: of a flush schedule, over equal replicas; any other is returned as it is.
        profile: with seconds of I and W; without, or without those, each is half of a backward.
        seconds: of the search, at most.
        evaluations: orders that it tries, at most; None: as many as there is time for.
    """
    name = canonical_name(plan.schedule or "1f1b")
    M, width = plan.num_microbatches, len(plan.stages) // plan.num_chunks
    alike = len(set(plan.replicas)) == 1 and len({stage.tensor for stage in plan.stages}) == 1
    if M is None or width == 1 or not alike or family(name).rule.is_asynchronous or plan.order:
        return plan
    stages = tuple(replace(stage, input_grad_seconds=input_grad_seconds(stage, profile)) for stage in plan.stages)
    split = replace(plan, stages=stages)
    before = simulated(split).timeline.batch_seconds
    own = one_pipeline(split, num_microbatches=M)
    traffic, ranks = split.traffic, [(p,) for p in range(width)]
    found = synthesize(
        placement=own.placement,
        num_microbatches=own.num_microbatches,
        costs=_costs(split),
        memory_limit=[float(peak) for peak in check(own).peak_activations],
        links=links_of(traffic, ranks, positions=split.positions, rings=ranks) if traffic else None,
        start=own if _is_plain(own) else None,
        seconds=seconds,
        evaluations=evaluations,
        seed=seed,
    )
    better = replace(split, order=tuple(" ".join(map(str, program)) for program in found.schedule.programs))
    after = simulated(better).timeline
    if after.batch_seconds >= before * (1 - WORTH):
        note = (
            f"order: no better one than {name} was found in {duration(found.seconds)}; at most {found.gap:.1%} to gain"
        )
        return replace(plan, notes=(*plan.notes, note))
    note = (
        f"order: synthesised, {duration(after.batch_seconds)} a batch where {name} takes {duration(before)}; "
        f"at most {found.gap:.1%} above the best possible"
    )
    return replace(
        better,
        simulated_step_time=after.batch_seconds,
        simulated_bubble=max(0.0, after.bubble),
        notes=(*plan.notes, note),
    )


def input_grad_seconds(stage: PlanStage, profile: Profile | None) -> float:
    """Seconds of I of one microbatch: those of the stage's backward that its nodes' W do not take."""
    whole = stage.backward_seconds
    nodes = {} if profile is None else {node.name: node for node in profile.nodes}
    own = [nodes[name] for name in stage.nodes if name in nodes]
    measured = sum(node.backward_seconds for node in own if node.input_grad_seconds or node.weight_grad_seconds)
    if not own or measured <= 0 or stage.recompute == "full":
        return whole / 2
    halves = sum(node.input_grad_seconds + node.weight_grad_seconds for node in own)
    weight = whole * sum(node.weight_grad_seconds for node in own) / max(halves, 1e-30)
    return whole - min(max(weight, _LEAST_PART * whole), (1 - _LEAST_PART) * whole)


def _costs(plan: PlanRecord) -> Costs:
    input_grad = [stage.input_grad_seconds or 0.0 for stage in plan.stages]
    return Costs(
        forward=[stage.forward_seconds for stage in plan.stages],
        input_grad=input_grad,
        weight_grad=[stage.backward_seconds - i for stage, i in zip(plan.stages, input_grad, strict=True)],
        update=_updates(plan),
        overhead=plan.overheads,
        message_overhead=plan.message_overheads,
        norm=plan.norm_seconds,
    )


def _updates(plan: PlanRecord) -> list[float]:
    """[S] seconds behind the last backward of a stage until its ranks are through. The first of several that share
    weights is the last to begin their sum, behind which all of them update; the search knows no such sums."""
    own = [stage.update_seconds for stage in plan.stages]
    steps = [each.optimizer_seconds for each in plan.traffic] or own
    found = [*own]
    for stages, seconds in plan.tied:
        found[stages[0]] = max(found[stages[0]], seconds + max(steps[s] for s in stages))
    return found


def _is_plain(schedule: Schedule) -> bool:
    """Whether a search can begin with it."""
    return schedule.num_slices == 1 and all(len(ranks) == 1 for ranks in schedule.owners)

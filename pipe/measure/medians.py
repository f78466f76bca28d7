"""Costs for the simulator from the medians that ranks measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from ...schedules import Costs, Op, Schedule
from ...schedules.timing.costs import by_owner
from .recorder import Timed


def costs_from_medians(
    by_rank: Sequence[Mapping[Timed, float]],
    overheads: Mapping[int, float],
    *,
    schedule: Schedule,
    latency: float,
    norm: float | None,
    around: float,
) -> Costs:
    """The costs of a schedule whose ranks measured these medians; an op that no rank measured costs 0.

    F, B, I and W of a stage's replicas are each rank's own. Updates and moves are the mean of theirs; of a sum the
    least counts: the rank that comes last to it waits for nobody.

    Arguments:
        by_rank: [P] seconds by stages and op.
        overheads: seconds around an action, by stage.
    """
    together: dict[Timed, list[float]] = {}
    for own in by_rank:
        for key, seconds in own.items():
            together.setdefault(key, []).append(seconds)

    def of_rank(op: Op, stage: int, rank: int) -> float:
        """Seconds on one rank; where it showed nothing the mean of the others [s]."""
        seen = by_rank[rank].get(((stage,), op))
        return fmean(together.get(((stage,), op), (0.0,))) if seen is None else seen

    def half(op: Op, stage: int, rank: int) -> float:
        """Where I and W ran as one, or B did, half of that."""
        return of_rank(op, stage, rank) if ((stage,), op) in together else of_rank(Op.B, stage, rank) / 2

    def whole(stage: int, rank: int) -> float:
        if is_split and ((stage,), Op.B) not in together:
            return half(Op.I, stage, rank) + half(Op.W, stage, rank)
        return of_rank(Op.B, stage, rank)

    def columns(seconds: Callable[[int, int], float]) -> list[float | list[float]]:
        """[S] by the rank that runs them, from seconds by stage and rank."""
        return by_owner(schedule, [[seconds(s, rank) for rank in ranks] for s, ranks in enumerate(schedule.owners)])

    def column(op: Op) -> list[float]:
        return [fmean(together.get(((stage,), op), (0.0,))) for stage in range(schedule.num_stages)]

    is_split = any(op in (Op.I, Op.W) for _, op in together)
    sums = {stages: min(seconds) for (stages, op), seconds in together.items() if op is Op.REDUCE_GRAD}
    return Costs(
        forward=columns(partial(of_rank, Op.F)),
        backward=columns(whole),
        input_grad=columns(partial(half, Op.I)) if is_split else None,
        weight_grad=columns(partial(half, Op.W)) if is_split else None,
        reduce_grad=[sums.get((stage,), 0.0) for stage in range(schedule.num_stages)],
        tied=[(stages, seconds) for stages, seconds in sums.items() if len(stages) > 1],
        update=column(Op.U),
        overhead=[overheads.get(stage, 0.0) for stage in range(schedule.num_stages)],
        latency=latency,
        norm=norm,
        around=around,
        offload=column(Op.OFFLOAD),
        reload=column(Op.RELOAD),
    )

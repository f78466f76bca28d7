"""Replicated stages: how many ranks each stage has, and any schedule over equal replicas or on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import Action, Op, Schedule, ScheduleError


def replica_counts(replicas: Sequence[int] | None, num_ranks: int) -> list[int]:
    """The ranks of each stage, one each where nothing is given; ValueError unless they make `num_ranks` in all."""
    if replicas is None:
        return [1] * num_ranks
    counts = list(replicas)
    if not all(isinstance(count, int) and count >= 1 for count in counts) or sum(counts) != num_ranks:
        raise ValueError(
            f"replicas={tuple(counts)} on {num_ranks} ranks: expected a count of at least 1 for each stage, "
            f"{num_ranks} in all"
        )
    return counts


def replicate(schedule: Schedule, num_replicas: int) -> Schedule:
    """D pipelines side by side, each on a share of the batch: data parallelism as one schedule.

        replica 0: rank 0 | 0F0 0F2 ...     Rank r becomes the ranks rD .. rD+D-1, microbatch k of replica q becomes
        replica 1: rank 1 | 0F1 0F3 ...     kD + q: round-robin, as `Schedule.owner` has it. M becomes MD.

    The updates of a stage's replicas are one: their gradients are summed. A stage that has several owners has D times
    as many, each in the place of one.

    Raises ValueError for D below 1.

    >>> from stagewright.schedules import build
    >>> one = build("1f1b", num_ranks=2, num_microbatches=2)
    >>> replicate(one, 2).programs == build("1f1b", num_ranks=4, num_microbatches=4, replicas=(2, 2)).programs
    True
    """
    if isinstance(num_replicas, bool) or not isinstance(num_replicas, int) or num_replicas < 1:
        raise ValueError(f"num_replicas={num_replicas!r}: expected a whole number, at least 1")
    if num_replicas == 1:
        return schedule

    def of_replica(action: Action, q: int) -> Action:
        if action.op is Op.U:
            return action
        microbatch, part = divmod(action.index, schedule.num_slices)
        return action._replace(index=(microbatch * num_replicas + q) * schedule.num_slices + part)

    replicas = range(num_replicas)
    return replace(
        schedule,
        placement=tuple(stages for stages in schedule.placement for _ in replicas),
        owners=tuple(tuple(rank * num_replicas + q for rank in ranks for q in replicas) for ranks in schedule.owners),
        programs=tuple(tuple(of_replica(a, q) for a in program) for program in schedule.programs for q in replicas),
        num_microbatches=schedule.num_microbatches * num_replicas,
        update_every=None if schedule.update_every is None else schedule.update_every * num_replicas,
    )


def on_ranks(schedule: Schedule, ranks: Sequence[int], *, num_ranks: int) -> Schedule:
    """The same on other ranks of a larger world: rank r's program runs on `ranks[r]`, the others have nothing to do.

    Raises ScheduleError for ranks that stand twice, are too few, or are not below `num_ranks`.
    """
    if len(ranks) != schedule.num_ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(num_ranks)):
        raise ScheduleError(
            f"ranks {tuple(ranks)} of {num_ranks} for a schedule of {schedule.num_ranks}: expected as many different "
            f"ones from 0 to {num_ranks - 1}"
        )
    there = {new: old for old, new in enumerate(ranks)}
    return replace(
        schedule,
        placement=tuple(schedule.placement[there[r]] if r in there else () for r in range(num_ranks)),
        programs=tuple(schedule.programs[there[r]] if r in there else () for r in range(num_ranks)),
        owners=tuple(tuple(ranks[rank] for rank in owners) for owners in schedule.owners),
    )

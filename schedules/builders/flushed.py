"""An asynchronous schedule with a flush behind each of its updates."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Action, Op, Schedule, ScheduleError


def flushed(schedule: Schedule) -> Schedule:
    """The same work on the same ranks, each update group alone in the pipeline: no gradient is late.

        2bw, P=2, M=2    rank 0 | F0 F1 .  B0 .  B1 U F2 F3 .  B2 ...
                         rank 1 | .  F0 B0 F1 B1 U  . F2 B2 F3 ...

    The order within a group is that in which the schedule runs it when the pipeline is empty. A forward uses the newest
    version of its stage, which has the same number on all of them: index // group_size.

    Raises ScheduleError for a schedule that flushes by itself.

    >>> from stagewright.schedules import Costs, build, check, simulate
    >>> schedule = flushed(build("pipedream", num_ranks=4, num_microbatches=8, update_every=4))
    >>> check(schedule).peak_versions, round(simulate(schedule, Costs()).bubble, 3)
    ((1, 1, 1, 1), 0.429)
    """
    if not schedule.is_asynchronous:
        raise ScheduleError(f"schedule {schedule.name!r} flushes by itself: expected an asynchronous one such as '2bw'")
    size, per_batch = schedule.group_size, schedule.groups_per_batch

    def group(action: Action) -> int:
        return action.index if action.op is Op.U else action.index // size

    programs = []
    for program in schedule.programs:
        first = sorted((action for action in program if group(action) < per_batch), key=group)  # stable
        programs.append(
            tuple(
                action._replace(index=action.index + batch * (per_batch if action.op is Op.U else per_batch * size))
                for batch in range(schedule.num_batches)
                for action in first
            )
        )
    return replace(schedule, name=f"{schedule.name} with a flush", programs=tuple(programs), weight_rule="stashing")

"""Any schedule with its updates as late as its weight rule allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import Action, Op, Schedule, ScheduleError
from ..weight_rules import RULES, Seen


def defer_updates(schedule: Schedule) -> Schedule:
    """Each update right before the first forward that uses its version; 2BW: U(t) before the first of batch t + 2.

    What the update waits for (the global gradient norm, the gradients of tied weights and replicas) comes from ranks
    that end batch t later; so nobody stands still for it. A rank then holds two sets of gradients.

    Raises ScheduleError for a rule under which a forward takes the newest version there is.
    """
    rule = schedule.rule
    if not rule.updates_may_wait:
        raise ScheduleError(
            f"schedule {schedule.name!r} follows the rule {rule.name!r}: only the updates of "
            f"{' or '.join(repr(each.name) for each in RULES.values() if each.updates_may_wait)} can wait"
        )
    return replace(schedule, programs=tuple(_defer(schedule, program) for program in schedule.programs))


def _defer(schedule: Schedule, program: Sequence[Action]) -> tuple[Action, ...]:
    waiting = [action for action in program if action.op is Op.U]
    deferred: list[Action] = []
    for action in program:
        if action.op is Op.U:
            continue
        if action.op is Op.F:
            version = schedule.rule.version(action.index, schedule.num_microbatches, Seen(0, 0))
            due = [u for u in waiting if u.stage == action.stage and u.index < version]
            deferred += due
            waiting = [u for u in waiting if u not in due]
        deferred.append(action)
    return tuple(deferred + waiting)

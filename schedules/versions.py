"""Which weight version each forward uses: derived from the updates in the program, compared with the claim.

A version of a stage is made by its U; version 0 is there from the start. The backward of a microbatch
uses the version of its forward, so a version stays alive until it is neither the newest nor needed by a
backward to come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .ir import Action, Op, Schedule, ScheduleError

# Rule name -> the version that microbatch `index` (batch t = index // M) of any stage must use.
RULES: dict[str, Callable[[int, int], int]] = {
    "flush": lambda index, num_microbatches: index // num_microbatches,
    "2bw": lambda index, num_microbatches: max(index // num_microbatches - 1, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What the derivation found.

    used: the version of each forward, by (stage, index).
    peak_live: by rank, the largest number of weight versions of one stage alive at once.
    """

    used: dict[tuple[int, int], int]
    peak_live: tuple[int, ...]


def derive_versions(schedule: Schedule) -> Versions:
    """Walk each program and count the updates before each forward. O(actions)."""
    used: dict[tuple[int, int], int] = {}
    peaks = []
    for program in schedule.programs:
        if not any(a.op is Op.U for a in program):
            used.update({(a.stage, a.index): 0 for a in program if a.op is Op.F})
            peaks.append(1)
            continue
        peaks.append(_walk(program, used))
    return Versions(used=used, peak_live=tuple(peaks))


def _walk(program: tuple[Action, ...], used: dict[tuple[int, int], int]) -> int:
    newest: dict[int, int] = {}
    in_flight: dict[int, list[int]] = {}  # versions of the forwards whose backward is to come, by stage
    peak = 1
    for stage, op, index in program:
        live = in_flight.setdefault(stage, [])
        version = newest.setdefault(stage, 0)
        if op is Op.F:
            used[stage, index] = version
            live.append(version)
        elif op in (Op.B, Op.W):
            live.remove(used[stage, index])
        elif op is Op.U:
            newest[stage] = version + 1
        peak = max(peak, len({*live, newest[stage]}))
    return peak


def check_rule(schedule: Schedule, versions: Versions) -> None:
    """Raise ScheduleError where a forward's derived version is not the one that the schedule claims."""
    if schedule.weight_rule not in RULES:
        raise ScheduleError(
            f"weight_rule={schedule.weight_rule!r} of schedule {schedule.name!r}: expected one of {', '.join(RULES)}"
        )
    rule = RULES[schedule.weight_rule]
    for (stage, index), version in versions.used.items():
        claimed = rule(index, schedule.num_microbatches)
        if version != claimed:
            raise ScheduleError(
                f"{stage}F{index} uses weight version {version} of stage {stage} by the updates before it, "
                f"but the rule {schedule.weight_rule!r} asks for version {claimed}: move an update "
                f"(U) of stage {stage} on rank {schedule.owner(stage, index)}"
            )


def check_updates(schedule: Schedule) -> None:
    """Raise ScheduleError unless each rank updates each of its stages once a batch, behind its gradients.

        ... 0B2 0B3 [0U0] 0F8 0B4 ... 0B7 [0U1] ...      M=4: U of batch t behind all backwards of batch t

    A flush schedule of one batch holds no U: its update is its epilogue.
    """
    if not schedule.has_epilogue:
        for rank, program in enumerate(schedule.programs):
            _check_rank_updates(schedule, rank, program)
        return
    surplus = [action for program in schedule.programs for action in program if action.op is Op.U]
    if surplus:
        raise ScheduleError(
            f"{surplus[0]} on rank {schedule.owner(surplus[0].stage, 0)}: a flush schedule of one batch holds no U, "
            f"since its update comes behind it; expected F B I W alone"
        )


def _check_rank_updates(schedule: Schedule, rank: int, program: tuple[Action, ...]) -> None:
    count = dict.fromkeys(schedule.placement[rank], 0)  # stage -> updates so far
    for position, action in enumerate(program):
        stage, op, index = action
        batch = index // schedule.num_microbatches
        if op is Op.U:
            if index != count[stage] or index >= schedule.num_batches:
                raise ScheduleError(
                    f"{action} on rank {rank}, position {position}, is update {count[stage]} of the stage: expected "
                    f"one for each of the {schedule.num_batches} batches, in order, {stage}U0 first"
                )
            count[stage] += 1
        elif op is not Op.F and batch < count[stage]:
            raise ScheduleError(
                f"{action} on rank {rank}, position {position}, adds to the gradient that {stage}U{batch}, which "
                f"stands before it, has used: move that update behind it"
            )
    for stage, number in count.items():
        if number < schedule.num_batches:
            raise ScheduleError(f"missing: {stage}U{number} on rank {rank}; expected an update for each batch")

"""Which weight version each forward uses: derived from the updates in the program, then held against the claim.

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
                f"{stage}F{index} uses weight version {version} of stage {stage} by the updates before it, but "
                f"the rule {schedule.weight_rule!r} asks for version {claimed}: move an update "
                f"(U) of stage {stage} on rank {schedule.owner(stage, index)}"
            )

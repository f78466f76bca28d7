"""The weight version that each forward and backward uses, and the number of versions that a rank must keep.

A stage starts at version 0, and its update u makes version u + 1. Where the backward of a microbatch uses the version
of its forward, that version must be kept until then:

    stashing, warm-up 2:  F0 F1 F2 B0 U0 F3 B1 U1 F4 ...       F3 uses version 1 while B1, B2 still need version 0
    2bw, M=2:             F0 B0 F1 B1 U0 F2 B2 F3 B3 U1 F4     F2 and F3 use version 0, though U0 has made 1
    one version:          F0 F1 F2 B0 U0 F3 B1 U1 F4 ...       B1 uses version 1, whose forward used version 0
"""

from __future__ import annotations

from dataclasses import dataclass

from .ir import Action, Op, Schedule, ScheduleError
from .liveness import activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Weight versions of a schedule, as derived from its updates."""

    used: dict[tuple[int, int], int]  # the version of each forward under the rule, by (stage, index)
    newest: dict[tuple[int, int], int]  # the newest version before each forward in its program
    in_backward: dict[tuple[int, int], int]  # the version of each backward that may differ from that of its forward
    peak_live: tuple[int, ...]  # per rank, the most consecutive versions of one stage that must be kept at once
    # per rank, the most updates of a stage between the version that a gradient was computed at (in the forward) and the
    # version that it is applied to
    staleness: tuple[int, ...]
    drift: tuple[int, ...]  # per rank, the most updates of a stage between the versions of a forward and its backward

    def read_by(self, action: Action) -> int:
        stage, op, index = action
        before = self.used.get((stage, index), 0)
        return before if op is Op.F else self.in_backward.get((stage, index), before)


def derive_versions(schedule: Schedule) -> Versions:
    """Count the updates before each forward, apply the rule, and follow each version to its last use. O(actions)."""
    rule = schedule.rule
    newest: dict[tuple[int, int], int] = {}
    newest_in_backward: dict[tuple[int, int], int] = {}
    for program in schedule.programs:
        made: dict[int, int] = {}
        for stage, op, index in program:
            if op is Op.U:
                made[stage] = made.get(stage, 0) + 1
            elif op is Op.F:
                newest[stage, index] = made.get(stage, 0)
            elif rule.changes_in_flight and op in (Op.B, Op.I):  # W reads no weights
                newest_in_backward[stage, index] = made.get(stage, 0)
    if schedule.is_asynchronous or schedule.num_batches > 1:
        used = {
            (stage, index): rule.version(index, schedule.num_microbatches, version, newest.get((0, index), 0))
            for (stage, index), version in newest.items()
        }
    else:
        used = dict.fromkeys(newest, 0)
    in_backward = {key: rule.version_in_backward(used[key], version) for key, version in newest_in_backward.items()}
    walks = [_walk(schedule, program, used, in_backward) for program in schedule.compute_programs]
    drift = [0] * schedule.num_ranks
    for (stage, index), version in in_backward.items():
        rank = schedule.owner(stage, index)
        drift[rank] = max(drift[rank], version - used[stage, index])
    return Versions(
        used=used,
        newest=newest,
        in_backward=in_backward,
        peak_live=tuple(peak for peak, _ in walks),
        staleness=tuple(staleness for _, staleness in walks),
        drift=tuple(drift),
    )


def _walk(
    schedule: Schedule,
    program: tuple[Action, ...],
    used: dict[tuple[int, int], int],
    in_backward: dict[tuple[int, int], int],
) -> tuple[int, int]:
    """(most versions kept of any one stage, largest staleness), from the end of the program to its beginning."""
    made: dict[int, int] = {}
    for stage, op, _ in program:
        made[stage] = made.get(stage, 0) + (op is Op.U)
    oldest = dict(made)  # the oldest version that is used from here on
    peak, staleness = 1, 0
    for stage, op, index in reversed(program):
        if op is Op.U:
            peak = max(peak, made[stage] - oldest[stage] + 1)
            made[stage] -= 1
            oldest[stage] = min(oldest[stage], made[stage])
        else:
            version = used.get((stage, index), 0)
            if op is Op.F or not schedule.rule.changes_in_flight:
                oldest[stage] = min(oldest[stage], version)
            elif op is not Op.W:
                oldest[stage] = min(oldest[stage], in_backward[stage, index])
            if op is not Op.F and schedule.num_batches > 1:
                staleness = max(staleness, index // schedule.group_size - version)
    for stage, version in made.items():
        peak = max(peak, version - oldest[stage] + 1)
    return peak, staleness


def check_rule(schedule: Schedule, versions: Versions) -> None:
    """Raise ScheduleError where a forward's version does not exist yet, or no longer, by the updates in its program."""
    rule = schedule.rule
    most = rule.most_versions
    for (stage, index), version in versions.used.items():
        newest = versions.newest[stage, index]
        if version > newest:
            raise ScheduleError(
                f"{stage}F{index} comes after {newest} updates of stage {stage}, so its newest weight version is "
                f"{newest}, but the rule {rule.name!r} asks for version {version}: move an update (U) of stage "
                f"{stage} on rank {schedule.owner(stage, index)}"
            )
    for rank, peak in enumerate(versions.peak_live):
        if most is not None and peak > most:
            raise ScheduleError(
                f"rank {rank} must keep {peak} weight versions of a stage at once, and the rule {rule.name!r} allows "
                f"{most}: move an update (U) after the last forward and backward that use the version it replaces"
            )
    if rule.changes_in_flight:
        _check_drift(schedule, versions)


def _check_drift(schedule: Schedule, versions: Versions) -> None:
    """Raise ScheduleError where there are more updates between a forward and its backward than necessary.

    Of n microbatches in flight at a stage, n - 1 backwards run in between; with an update after each k of a rank's own,
    at most ceil((n - 1)/k) updates.
    """
    for rank, program in enumerate(schedule.programs):
        if not versions.drift[rank]:
            continue
        in_flight: dict[int, int] = {}
        for _, alive in activations(program):
            for stage, number in alive.items():
                in_flight[stage] = max(in_flight.get(stage, 0), number)
        for stage, op, index in program:
            if (stage, index) not in versions.in_backward or op is not Op.F:
                continue
            own = schedule.group_size // len(schedule.owners[stage])
            before, after = versions.used[stage, index], versions.in_backward[stage, index]
            allowed = -(-(in_flight[stage] - 1) // own)
            if after - before > allowed:
                raise ScheduleError(
                    f"{after - before} updates are between {stage}F{index} and its backward on rank {rank}, and the "
                    f"rule {schedule.rule.name!r} allows {allowed}: with {in_flight[stage]} in flight, an update "
                    f"after each {own} of the others. Move updates (U) of stage {stage} after their last backward"
                )


def check_updates(schedule: Schedule) -> None:
    """Raise ScheduleError unless each rank updates each of its stages once per update group, after its gradients.

        ... 0B2 0B3 [0U0] 0F8 0B4 ... 0B7 [0U1] ...      groups of 4: U0 after all backwards of microbatches 0..3

    A flush schedule of one batch has no U: its update is its epilogue. Neither has one without a backward.
    """
    if schedule.has_backward and not schedule.has_epilogue:
        for rank, program in enumerate(schedule.programs):
            _check_rank_updates(schedule, rank, program)
        return
    surplus = [action for program in schedule.programs for action in program if action.op is Op.U]
    if surplus:
        why = "since its update comes after it" if schedule.has_backward else "since it has no gradient"
        raise ScheduleError(
            f"{surplus[0]} on rank {schedule.owner(surplus[0].stage, 0)}: a flush schedule of one batch holds no U, "
            f"{why}; expected F B I W alone"
        )


def _check_rank_updates(schedule: Schedule, rank: int, program: tuple[Action, ...]) -> None:
    count = dict.fromkeys(schedule.placement[rank], 0)  # stage -> updates so far
    num_updates = schedule.num_batches * schedule.groups_per_batch
    one, many = ("batch", "batches") if schedule.groups_per_batch == 1 else ("update group", "update groups")
    for position, action in enumerate(program):
        stage, op, index = action
        group = index // schedule.group_size
        if op is Op.U:
            if index != count[stage] or index >= num_updates:
                raise ScheduleError(
                    f"{action} on rank {rank}, position {position}, is update {count[stage]} of the stage: expected "
                    f"one for each of the {num_updates} {many}, in order, {stage}U0 first"
                )
            count[stage] += 1
        elif op is not Op.F and group < count[stage]:
            raise ScheduleError(
                f"{action} on rank {rank}, position {position}, adds to the gradient that {stage}U{group}, which "
                f"comes before it, has used: move that update after it"
            )
    for stage, number in count.items():
        if number < num_updates:
            raise ScheduleError(f"missing: {stage}U{number} on rank {rank}; expected an update for each {one}")

"""Schedules made from schedules: replicated, without dead ranks, on other ranks, with late updates, with offloading,
with pairs of actions that run together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from numbers import Real

from .ir import BACKWARD_OPS, Action, Op, Schedule, ScheduleError
from .kinds import at_least, option
from .overlap import pairs_in
from .timing.costs import Costs
from .timing.links import Links
from .timing.simulate import simulate
from .weight_rules import RULES


def replicate(schedule: Schedule, num_replicas: int) -> Schedule:
    """Data parallelism as one schedule: D copies of the pipeline, each on a share of the batch.

        replica 0: rank 0 | 0F0 0F2 ...     Rank r becomes the ranks rD .. rD+D-1, microbatch k of replica q becomes
        replica 1: rank 1 | 0F1 0F3 ...     kD + q: round-robin, as in `Schedule.owner`. M becomes MD.

    The replicas of a stage share each update: their gradients are summed. A stage that has several owners has D times
    as many, each of them replaced by its D copies.

    Raises ValueError for D below 1.

    >>> from stagewright.schedules import build
    >>> one = build("1f1b", num_ranks=2, num_microbatches=2)
    >>> replicate(one, 2).programs == build("1f1b", num_ranks=4, num_microbatches=4, replicas=(2, 2)).programs
    True
    """
    if option("num_replicas", num_replicas, at_least(1)) == 1:
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
        overlapped=tuple(of_replica(a, q) for a in schedule.overlapped for q in replicas),
        update_every=None if schedule.update_every is None else schedule.update_every * num_replicas,
    )


def schedule_without(schedule: Schedule, dead: Collection[int]) -> Schedule:
    """The same work without these ranks: their microbatches go to the other owners of the same stages, round-robin.

        1f1b, P=2, D=2    rank 0 | 0F0 0F2 0B0 0B2    without rank 1    rank 0 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
                          rank 1 | 0F1 0F3 0B1 0B3                      rank 1 |
                          rank 2 | 1F0 1B0 1F2 1B2                      rank 2 | 1F0 1B0 1F2 1B2
                          rank 3 | 1F1 1B1 1F3 1B3                      rank 3 | 1F1 1B1 1F3 1B3

    A dead rank has an empty program. Each other rank runs its own actions and those it took over in the order of their
    previous start times: a topological order of all actions, hence no deadlock. After ReCycle (SOSP 2024, section 3).
    No two of them run together.

    Raises ScheduleError for ranks that do not exist, for a stage whose ranks are all dead, and for a schedule that does
    not flush, or that offloads activations.
    """
    gone = sorted({*dead})
    if not gone:
        return schedule
    if not set(gone) <= set(range(schedule.num_ranks)):
        raise ScheduleError(f"dead ranks {gone}: expected some of 0 to {schedule.num_ranks - 1}")
    if schedule.is_asynchronous or schedule.num_batches > 1 or schedule.moves_activations:
        raise ScheduleError(
            f"schedule {schedule.name!r} without the ranks {gone}: batches overlap, or activations move, in it; "
            f"expected one that flushes, such as '1f1b'"
        )
    idle = replace(
        schedule,
        name=f"{schedule.name} without {', '.join(map(str, gone))}",
        placement=tuple(() if r in gone else stages for r, stages in enumerate(schedule.placement)),
        owners=tuple(_living_owners(stage, ranks, gone) for stage, ranks in enumerate(schedule.owners)),
        programs=((),) * schedule.num_ranks,
        overlapped=(),
    )
    traces = simulate(schedule, Costs(forward=1.0, backward=2.0)).ranks
    programs: list[list[Action]] = [[] for _ in traces]
    for span in sorted((span for trace in traces for span in trace.compute), key=lambda span: span.start):
        programs[idle.owner(span.what.stage, span.what.index)].append(span.what)
    return replace(idle, programs=tuple(map(tuple, programs)))


def _living_owners(stage: int, ranks: Sequence[int], gone: Collection[int]) -> tuple[int, ...]:
    """Owners of a stage without the dead: their microbatches go round the others, so some owners occur several times.

    >>> _living_owners(0, (0, 1, 2), [1])
    (0, 2, 2, 0, 0, 2)
    """
    living = [rank for rank in ranks if rank not in gone]
    if not living:
        raise ScheduleError(
            f"stage {stage} is on rank {', '.join(map(str, ranks))} only, and none is left: expected a living one"
        )
    if len(living) in (1, len(ranks)):
        return tuple(living)
    laps = range(len(living))
    return tuple(
        living[(lap + place) % len(living)] if rank in gone else rank
        for lap in laps
        for place, rank in enumerate(ranks)
    )


def on_rows(schedule: Schedule, ranks: Sequence[int]) -> Schedule:
    """The rows of these ranks only, renumbered: for a schedule whose other ranks have empty programs."""
    number = {rank: new for new, rank in enumerate(ranks)}
    return replace(
        schedule,
        placement=tuple(schedule.placement[rank] for rank in ranks),
        programs=tuple(schedule.programs[rank] for rank in ranks),
        owners=tuple(tuple(number[rank] for rank in owners) for owners in schedule.owners),
    )


def on_ranks(schedule: Schedule, ranks: Sequence[int], *, num_ranks: int) -> Schedule:
    """The same on other ranks of a larger world: rank r's program runs on `ranks[r]`, the others have empty programs.

    Raises ScheduleError for ranks that repeat, are too few, or are not below `num_ranks`.
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


def defer_updates(schedule: Schedule) -> Schedule:
    """Each update moved right before the first forward that uses its version; 2BW: U(t) before the first of batch t +
    2.

    An update waits for the global gradient norm, or for gradients of tied weights and replicas, from ranks that end
    batch t later; deferred, it delays no rank. A rank then holds two sets of gradients.

    Raises ScheduleError for a rule under which a forward takes the newest version.
    """
    rule = schedule.rule
    if not rule.updates_may_wait:
        raise ScheduleError(
            f"schedule {schedule.name!r} follows the rule {rule.name!r}: only the updates of "
            f"{' or '.join(repr(each.name) for each in RULES.values() if each.updates_may_wait)} can wait"
        )
    return replace(schedule, programs=tuple(_defer(schedule, program) for program in schedule.programs))


def with_late_updates(schedule: Schedule, links: Links | None) -> Schedule:
    """The schedule as the runtime runs it over these links: updates that wait for sums come as late as possible, so
    that the sums overlap with actions."""
    waits = links is not None and links.sums and schedule.rule.updates_may_wait
    return defer_updates(schedule) if waits else schedule


def _defer(schedule: Schedule, program: Sequence[Action]) -> tuple[Action, ...]:
    waiting = [action for action in program if action.op is Op.U]
    deferred: list[Action] = []
    for action in program:
        if action.op is Op.U:
            continue
        if action.op is Op.F:
            version = schedule.rule.version(action.index, schedule.num_microbatches, 0, 0)
            due = [u for u in waiting if u.stage == action.stage and u.index < version]
            deferred += due
            waiting = [u for u in waiting if u not in due]
        deferred.append(action)
    return tuple(deferred + waiting)


def with_offload(
    schedule: Schedule, *, share: float = 0.5, stages: Collection[int] | None = None, costs: Costs | None = None
) -> Schedule:
    """The same order with a share of each rank's activations offloaded to its host: those that live longest.

        rank 0 | 0F0 0F1  2F0  2F1 . 2B0  . 2B1  0B0  0B1      interleaved, P=2, V=2, M=2: half of the stages,
               |     0>0  0>1                0<0  0<1          which is stage 0 on rank 0

    Whole stages are offloaded, those first whose activations live longest between forward and backward; of the last
    such stage only every so many microbatches. An activation leaves directly after its forward, and its reload overlaps
    with as many actions before its backward as take as long (`costs.reload`; a forward, where that is 0). Activations
    with fewer actions in between stay.

    Moves therefore delay no rank as long as they take no longer than that and each direction of the link keeps up: one
    forward, in a steady state of alternating forwards and backwards. With V chunks whose lifetimes form an arithmetic
    progression (`gis`, `interleaved`), offloading half of them leaves a quarter of the memory, averaged over time. The
    peak falls to a quarter with groups of P/2 (`gis` with group_size=P/2): of the P V activations of 1F1B, P V / 4
    stay, and two are being moved. With groups of P the remaining chunks peak together, and it falls to a half. With V =
    1 there are no stages to choose from, and every other microbatch is offloaded.

    Arguments:
        share: of the stages of each rank, from 0 to 1.
        stages: these instead, whole.
        costs: for comparing lifetimes and hiding moves; F 1, B 2 by default.

    Raises ValueError for another share, ScheduleError for a schedule whose activations cannot move (see `find_moves`).
    """
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share <= 1:
        raise ValueError(f"share={share!r}: expected a number from 0 to 1")
    costs = Costs(forward=1.0, backward=2.0) if costs is None else costs
    table, timeline = costs.table_for(schedule), simulate(schedule, costs)
    reload = [back or min(forward) for back, forward in zip(table.reload, table.rows[Op.F], strict=True)]
    programs = []
    for program, trace in zip(schedule.programs, timeline.ranks, strict=True):
        starts = {what: start for what, start, _ in trace.compute}
        ends = {what: end for what, _, end in trace.compute}
        lives = {(a.stage, a.index): starts[a] - ends[a._replace(op=Op.F)] for a in program if a.op in BACKWARD_OPS}
        chosen = _longest(lives, share) if stages is None else {each for each in lives if each[0] in stages}
        programs.append(_with_moves(program, chosen, [span.end - span.start for span in trace.compute], reload))
    return replace(schedule, programs=tuple(programs))


def _longest(lives: dict[tuple[int, int], float], share: float) -> set[tuple[int, int]]:
    by_stage: dict[int, list[int]] = {}
    for stage, index in sorted(lives):
        by_stage.setdefault(stage, []).append(index)
    mean = {stage: sum(lives[stage, k] for k in own) / len(own) for stage, own in by_stage.items()}
    left = share * len(by_stage)
    chosen: set[tuple[int, int]] = set()
    for stage in sorted(by_stage, key=lambda s: (-mean[s], s)):
        part = min(1.0, max(0.0, left))
        left -= part
        # Evenly spread: a microbatch is offloaded where the rounded count grows by one.
        chosen |= {(stage, k) for at, k in enumerate(by_stage[stage]) if int((at + 1) * part) > int(at * part)}
    return chosen


def _with_moves(
    program: Sequence[Action], chosen: set[tuple[int, int]], seconds: Sequence[float], reload: Sequence[float]
) -> tuple[Action, ...]:
    """The program with the chosen pairs offloaded if they are far enough from their backward, by the `seconds` of each
    action and of the `reload` of each stage."""
    backward = {(a.stage, a.index): at for at, a in enumerate(program) if a.op in BACKWARD_OPS}
    before: dict[int, list[Action]] = {}
    for at, (stage, op, index) in enumerate(program):
        if op is not Op.F or (stage, index) not in chosen:
            continue
        back = backward[stage, index] - 1
        while sum(seconds[back : backward[stage, index]]) < reload[stage] - 1e-9 and back > at:
            back -= 1
        if back > at + 1:
            before.setdefault(at + 1, []).insert(0, Action(stage, Op.OFFLOAD, index))  # room for what comes
            before.setdefault(back, []).append(Action(stage, Op.RELOAD, index))
    return tuple(step for at, action in enumerate(program) for step in (*before.get(at, ()), action))


def with_overlap(schedule: Schedule) -> Schedule:
    """The same order, in which each forward runs together with the backward directly after it, of another stage.

    Made for `dualpipe` and `dualpipe-v`, whose steady state consists of such pairs. A pair waits for the inputs of
    both; `check` finds orders that deadlock then.

    Raises ScheduleError for a schedule that has no such pair, that does not flush, has slices, or moves activations.

    >>> from stagewright.schedules import build
    >>> with_overlap(build("dualpipe-v", num_ranks=2, num_microbatches=4)).together[Op.F(0, 3)]
    3B1
    """
    forwards = tuple(a for program in schedule.programs for a in program if a.op is Op.F)
    pairs = pairs_in(schedule.programs, forwards)
    if not pairs:
        raise ScheduleError(
            f"schedule {schedule.name!r} has no forward directly before the backward of another stage: expected one "
            f"that has, such as 'dualpipe-v'"
        )
    return replace(schedule, overlapped=tuple(pairs))

"""Offloading: activations that live long wait on the host (PipeOffload: Wan et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import BACKWARD_OPS, Action, Op, Schedule
from ..timing.costs import Costs
from ..timing.simulate import simulate


def with_offload(schedule: Schedule, *, share: float = 0.5, costs: Costs | None = None) -> Schedule:
    """The same order, in which a share of each rank's activations waits on its host: those that live longest.

        rank 0 | 0F0 0F1  2F0  2F1 . 2B0  . 2B1  0B0  0B1      interleaved, P=2, V=2, M=2: half of the stages,
               |     0>0  0>1                0<0  0<1          which is stage 0 on rank 0

    Whole stages are taken, those first whose activations live longest between forward and backward; of the one at the
    border every so many microbatches. Each leaves right behind its forward and comes back beside the actions in front
    of its backward: as many as take as long as that way (`costs.reload`; a forward, where that is 0). What has fewer
    stays there.

    So nobody waits while ways take no longer than that and each direction of the link keeps up: a forward, in a steady
    state of forwards and backwards by turns. Of V chunks whose lives are in arithmetic progression (`gis`,
    `interleaved`), the half that stays is a quarter of what there was, as a mean over time. The peak falls to a quarter
    where groups are half as large as P (`gis` with group_size=P/2): of the P V activations of 1F1B, P V / 4 stay, and
    two move. In groups of P the chunks that stay are there all at once, and it falls to a half; V = 1 has no stages to
    choose from, and every other microbatch leaves.

    Arguments:
        share: of the stages of each rank, from 0 to 1.
        costs: by which lifetimes are compared and ways hidden; F 1, B 2 where not given.

    Raises ValueError for another share, ScheduleError for a schedule whose activations cannot move (see `moves`).
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"share={share!r}: expected a number from 0 to 1")
    costs = Costs(forward=1.0, backward=2.0) if costs is None else costs
    table, timeline = costs.table_for(schedule), simulate(schedule, costs)
    reload = [back or min(forward) for back, forward in zip(table.reload, table.rows[Op.F], strict=True)]
    programs = []
    for program, trace in zip(schedule.programs, timeline.ranks, strict=True):
        starts = {what: start for what, start, _ in trace.compute}
        ends = {what: end for what, _, end in trace.compute}
        lives = {(a.stage, a.index): starts[a] - ends[a._replace(op=Op.F)] for a in program if a.op in BACKWARD_OPS}
        programs.append(
            _with_moves(program, _longest(lives, share), [span.end - span.start for span in trace.compute], reload)
        )
    return replace(schedule, programs=tuple(programs))


def _longest(lives: dict[tuple[int, int], float], share: float) -> set[tuple[int, int]]:
    """The (stage, microbatch) pairs that leave."""
    by_stage: dict[int, list[int]] = {}
    for stage, index in sorted(lives):
        by_stage.setdefault(stage, []).append(index)
    mean = {stage: sum(lives[stage, k] for k in own) / len(own) for stage, own in by_stage.items()}
    left = share * len(by_stage)
    chosen: set[tuple[int, int]] = set()
    for stage in sorted(by_stage, key=lambda s: (-mean[s], s)):
        part = min(1.0, max(0.0, left))
        left -= part
        # Evenly spread: a microbatch leaves where their number, so far, grows by one.
        chosen |= {(stage, k) for at, k in enumerate(by_stage[stage]) if int((at + 1) * part) > int(at * part)}
    return chosen


def _with_moves(
    program: Sequence[Action], chosen: set[tuple[int, int]], seconds: Sequence[float], reload: Sequence[float]
) -> tuple[Action, ...]:
    """The program with what is chosen and far enough from its backward leaving and coming back.

    Arguments:
        seconds: of each action of the program [s].
        reload: of the way back, by stage [s].
    """
    backward = {(a.stage, a.index): at for at, a in enumerate(program) if a.op in BACKWARD_OPS}
    before: dict[int, list[Action]] = {}
    for at, (stage, op, index) in enumerate(program):
        if op is not Op.F or (stage, index) not in chosen:
            continue
        back = backward[stage, index] - 1
        while sum(seconds[back : backward[stage, index]]) < reload[stage] - 1e-9 and back > at:
            back -= 1
        if back > at + 1:
            before.setdefault(at + 1, []).append(Action(stage, Op.OFFLOAD, index))
            before.setdefault(back, []).append(Action(stage, Op.RELOAD, index))
    return tuple(step for at, action in enumerate(program) for step in (*before.get(at, ()), action))

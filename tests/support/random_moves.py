"""Flush schedules from which activations leave their rank while they wait, at random."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from stagewright.schedules import Action, Costs, Op, Schedule, simulate
from support.inside import BACKWARD_OPS


def with_random_moves(random: Random, schedule: Schedule, *, share: float = 0.6) -> Schedule:
    """Some activations go to the host or to another rank, begun at random moments of a run: nobody waits in a circle.

    They are held as they are lent, so that no message behind them is used before. One that has moves stays as it is.
    """
    if schedule.moves_activations:
        return schedule
    timeline = simulate(schedule, Costs(latency=0.1))
    spans = {(rank, s.what): s for rank, trace in enumerate(timeline.ranks) for s in trace.compute}
    placed: list[list[tuple[float, Action]]] = [[] for _ in schedule.programs]
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if action.op not in BACKWARD_OPS or random.random() > share:
                continue
            made = spans[rank, action._replace(op=Op.F)].end
            moments = sorted(random.uniform(made, spans[rank, action].start) for _ in range(3))
            if len({made, *moments}) < 4:
                continue  # the backward follows at once
            others = [other for other in range(schedule.num_ranks) if other != rank]
            partner = random.choice([*others, *[None] * max(1, len(others))])
            out = Op.OFFLOAD if partner is None else Op.LEND
            placed[rank] += [(moments[0], action._replace(op=out)), (moments[2], action._replace(op=Op.RELOAD))]
            if partner is not None:
                held = [(moments[0], Op.HOLD), (moments[1], Op.RETURN)]
                placed[partner] += [(moment, action._replace(op=op)) for moment, op in held]
    programs = []
    for rank, program in enumerate(schedule.programs):
        begun = [(spans[rank, action].start, action) for action in program]
        programs.append(tuple(action for _, action in sorted([*begun, *placed[rank]], key=lambda each: each[0])))
    return replace(schedule, programs=tuple(programs))

"""Flush schedules from which activations leave their rank while they wait, at random."""

from dataclasses import replace
from random import Random

from stagewright.schedules import Action, Costs, Op, Schedule, simulate
from support.inside import BACKWARD_OPS


def with_random_moves(random: Random, schedule: Schedule, *, share: float = 0.6) -> Schedule:
    """Some activations go to the host, begun at random moments of a run. A schedule that has moves stays as it is."""
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
            moments = sorted(random.uniform(made, spans[rank, action].start) for _ in range(2))
            if len({made, *moments}) < 3:
                continue  # the backward follows at once
            ways = zip(moments, (Op.OFFLOAD, Op.RELOAD), strict=True)
            placed[rank] += [(moment, action._replace(op=op)) for moment, op in ways]
    programs = []
    for rank, program in enumerate(schedule.programs):
        begun = [(spans[rank, action].start, action) for action in program]
        programs.append(tuple(action for _, action in sorted([*begun, *placed[rank]], key=lambda each: each[0])))
    return replace(schedule, programs=tuple(programs))

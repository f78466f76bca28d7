"""A random valid schedule: any placement of stages, any order that the data allow."""

import random

from stagewright.schedules import Action, Op, Schedule


def random_schedule(P: int, V: int, M: int, *, seed: int) -> Schedule:
    """A linear order of all actions, drawn step by step from what may run next."""
    draw = random.Random(seed)
    S = P * V
    places = [s % P for s in range(S)]
    if draw.random() < 0.5:
        draw.shuffle(places)
    splits = [draw.random() < 0.3 for _ in range(S)]
    done: set[Action] = set()
    programs: list[list[Action]] = [[] for _ in range(P)]

    def first_half(s: int) -> Op:
        return Op.I if splits[s] else Op.B

    def needs(action: Action) -> list[Action]:
        s, op, k = action
        if op is Op.F:
            return [Action(s - 1, Op.F, k)] if s else []
        if op is Op.W:
            return [Action(s, Op.I, k)]
        behind = [Action(s + 1, first_half(s + 1), k)] if s + 1 < S else []
        return [Action(s, Op.F, k), *behind]

    left = [
        Action(s, op, k)
        for s in range(S)
        for k in range(M)
        for op in ((Op.F, Op.I, Op.W) if splits[s] else (Op.F, Op.B))
    ]
    while left:
        action = draw.choice([one for one in left if all(need in done for need in needs(one))])
        left.remove(action)
        done.add(action)
        programs[places[action.stage]].append(action)
    return Schedule(
        name="custom",
        placement=tuple(tuple(s for s in range(S) if places[s] == rank) for rank in range(P)),
        programs=tuple(map(tuple, programs)),
        num_microbatches=M,
    )

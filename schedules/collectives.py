"""Where collectives stand in the programs of ranks. Nobody else says so: lowering and the simulator ask here.

    rank 0 | 2F0 0F0 2B0 [2REDUCE_GRAD0] 0B0 [0REDUCE_GRAD0]      each behind the last backward of its stages

All ranks begin those that they have in common in one order, so that no two wait for each other. It is the order in
which they are ready; where ranks disagree (weights tied crosswise), one is begun later than it could be:

    ready     rank 0: a b    rank 1: b a    (a, b: sums of both ranks)
    begun     rank 0: a b    rank 1: . a b

In a program with updates each is begun when it is ready: an update may wait for it before the next, and it is made of
messages between two ranks each, which need no order (see `lowering`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from .ir import LAST_USES, MOVE_OPS, Collective, Op, Schedule


def ready_positions(schedule: Schedule, rank: int, collectives: Collection[Collective]) -> dict[Collective, int]:
    """The collectives that `rank` takes part in, by the position of the action before which each may begin."""
    behind_backward, first_use, behind_use = _landmarks(schedule, rank)

    def ready(each: Collective) -> int:
        first, *_ = each.stages
        if each.op is Op.REDUCE_GRAD:  # behind the last backward of all its stages; at once where the rank has none
            return max(behind_backward.get((stage, each.index), 0) for stage in each.stages)
        if each.op is Op.RESHARD:
            return behind_use.get(first, 0)
        # UNSHARD: in front of the first use of the stage that the rank uses first before it, one stage ahead.
        return max((other for other in first_use.values() if other < first_use.get(first, 0)), default=0)

    own = frozenset(schedule.placement[rank])
    return {each: ready(each) for each in collectives if not own.isdisjoint(each.stages)}


def latest_positions(schedule: Schedule, rank: int, collectives: Collection[Collective]) -> dict[Collective, int]:
    """Position of the first action on `rank` that waits for each collective, where one does."""
    _, first, _ = _landmarks(schedule, rank)
    return {each: first[s] for each in collectives for s in each.stages if each.op is Op.UNSHARD and s in first}


def _landmarks(schedule: Schedule, rank: int) -> tuple[dict[tuple[int, int], int], dict[int, int], dict[int, int]]:
    """Positions in a program: behind the last B or W, by (stage, update group); by stage, its first action, and behind
    its last one. Nothing where the rank has no such action."""
    # Microbatches whose gradients are added up before they are shared: all of them where a flush follows.
    size = schedule.total_indices if schedule.has_epilogue else schedule.group_size
    backward: dict[tuple[int, int], int] = {}
    first: dict[int, int] = {}
    behind: dict[int, int] = {}
    for position, (stage, op, index) in enumerate(schedule.programs[rank]):
        if op in MOVE_OPS:
            continue
        first.setdefault(stage, position)
        behind[stage] = position + 1
        if op in LAST_USES:
            backward[stage, index // size] = position + 1
    return backward, first, behind


def place_collectives(
    schedule: Schedule, collectives: Collection[Collective]
) -> tuple[tuple[tuple[int, Collective], ...], ...]:
    """Per rank, its collectives in the order in which it begins them, each with the position in its program in front
    of which it stands (ascending; the length of the program: at its end).

    O(actions + members of all collectives).
    """
    ready = [ready_positions(schedule, rank, collectives) for rank in range(schedule.num_ranks)]
    # Of those that are ready at once (on a replica without a microbatch all are), weights that others need come first,
    # and ties last: what holds them up does not hold up the others.
    orders = [
        sorted(own, key=lambda each: (own[each], each.op is not Op.UNSHARD, len(each.stages), each)) for own in ready
    ]
    if schedule.has_backward and not schedule.has_epilogue:
        return tuple(tuple((at[each], each) for each in own) for at, own in zip(ready, orders, strict=True))
    order, _ = _take(orders, until_stuck=False)
    placed: list[list[tuple[int, Collective]]] = [[] for _ in ready]
    for each in order:
        for rank in each.ranks(schedule.owners):
            before = placed[rank][-1][0] if placed[rank] else 0
            placed[rank].append((max(before, ready[rank][each]), each))
    return tuple(map(tuple, placed))


def find_cycle(orders: Sequence[Sequence[Collective]]) -> list[tuple[int, Collective, Collective]]:
    """A circle of ranks that wait for each other when they begin collectives in these orders: (rank, what it begins
    first, what it begins later and the next rank of the circle first). Empty where all orders agree."""
    _, left = _take(orders, until_stuck=True)
    before = {own[at]: (rank, own[0]) for rank, own in enumerate(left) for at in range(1, len(own))}
    each = next((own[0] for own in left if own), None)
    path: dict[Collective, tuple[int, Collective, Collective]] = {}
    while each is not None and each not in path:
        rank, first = before[each]
        path[each] = (rank, first, each)
        each = first
    steps = list(path)
    return [path[step] for step in steps[steps.index(each) :]] if each is not None else []


def _take(
    orders: Sequence[Sequence[Collective]], *, until_stuck: bool
) -> tuple[list[Collective], list[list[Collective]]]:
    """All in one order, that of every rank where they agree; and by rank those that are left, which stand in a circle.

    Taken is what comes first on all its ranks, again and again; of a circle, what comes first on most of them.
    """
    members = Counter(each for own in orders for each in own)
    position = [0] * len(orders)
    first_on: dict[Collective, list[int]] = {}  # those that come first on some rank now
    agreed: list[Collective] = []  # those that do on all their ranks (a heap)
    taken: dict[Collective, None] = {}
    moved = list(range(len(orders)))
    while True:
        for rank in moved:
            own = orders[rank]
            while position[rank] < len(own) and own[position[rank]] in taken:
                position[rank] += 1
            if position[rank] < len(own):
                each = own[position[rank]]
                first_on.setdefault(each, []).append(rank)
                if len(first_on[each]) == members[each]:
                    heappush(agreed, each)
        if agreed:
            each = heappop(agreed)
        elif first_on and not until_stuck:
            each = min(first_on, key=lambda one: (-len(first_on[one]), one))
        else:
            break
        taken[each] = None
        moved = first_on.pop(each)
    left = [[each for each in own[at:] if each not in taken] for own, at in zip(orders, position, strict=True)]
    return list(taken), left

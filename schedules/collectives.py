"""Positions of collectives in the programs of ranks, for lowering and the simulator alike.

    rank 0 | 2F0 0F0 2B0 [2REDUCE_GRAD0] 0B0 [0REDUCE_GRAD0]      each after the last backward of its stages

All ranks begin the collectives that they share in one order, so that no two wait for each other: the order in which
they become ready. Where ranks disagree (weights tied crosswise), one begins later than it could:

    ready     rank 0: a b    rank 1: b a    (a, b: sums over both ranks)
    begun     rank 0: a b    rank 1: . a b

In a program with updates each begins when it is ready, since an update may wait for it before the next one begins;
there it consists of messages between pairs of ranks, which need no common order (see `lowering`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from .ir import LAST_USES, MOVE_OPS, Collective, Op, Schedule


def ready_positions(schedule: Schedule, rank: int, collectives: Collection[Collective]) -> dict[Collective, int]:
    """The collectives of `rank`, each with the position of the action before which it may begin."""
    after_backward, first_use, after_use = _landmarks(schedule, rank)

    def ready(each: Collective) -> int:
        first, *_ = each.stages
        if each.op is Op.REDUCE_GRAD:  # after the last backward of all its stages; at once where the rank has none
            return max(after_backward.get((stage, each.index), 0) for stage in each.stages)
        if each.op is Op.RESHARD:
            return after_use.get(first, 0)
        # UNSHARD: one stage ahead, before the first use of the stage that the rank uses before this one.
        return max((other for other in first_use.values() if other < first_use.get(first, 0)), default=0)

    own = frozenset(schedule.placement[rank])
    return {each: ready(each) for each in collectives if not own.isdisjoint(each.stages)}


def latest_positions(schedule: Schedule, rank: int, collectives: Collection[Collective]) -> dict[Collective, int]:
    """Position of the first action on `rank` that waits for each collective, where one does."""
    _, first, _ = _landmarks(schedule, rank)
    return {each: first[s] for each in collectives for s in each.stages if each.op is Op.UNSHARD and s in first}


def _landmarks(schedule: Schedule, rank: int) -> tuple[dict[tuple[int, int], int], dict[int, int], dict[int, int]]:
    """Positions in a program: after the last B or W, by (stage, update group); by stage, of its first action, and
    after its last."""
    # Microbatches whose gradients are added up before they are shared: all of them where a flush follows.
    size = schedule.total_indices if schedule.has_epilogue else schedule.group_size
    backward: dict[tuple[int, int], int] = {}
    first: dict[int, int] = {}
    after: dict[int, int] = {}
    for position, (stage, op, index) in enumerate(schedule.programs[rank]):
        if op in MOVE_OPS:
            continue
        first.setdefault(stage, position)
        after[stage] = position + 1
        if op in LAST_USES:
            backward[stage, index // size] = position + 1
    return backward, first, after


def place_collectives(
    schedule: Schedule, collectives: Collection[Collective]
) -> tuple[tuple[tuple[int, Collective], ...], ...]:
    """Per rank, its collectives in the order in which it begins them, each with the position in its program before
    which it begins (ascending; the length of the program: at its end).

    O(actions + members of all collectives).
    """
    ready = [ready_positions(schedule, rank, collectives) for rank in range(schedule.num_ranks)]
    # Of those that become ready together (on a replica without a microbatch all do), weights come first, since others
    # need them, and ties last, since they would delay the others.
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
    """A circle of ranks that wait for each other when they begin collectives in these orders: (rank, the collective it
    begins first, the one it begins later and the next rank of the circle begins first). Empty where all orders agree.
    """
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
    """One order of all collectives that agrees with the order of every rank if they agree; and by rank those left in a
    circle.

    Repeatedly takes the one that is next on all its ranks; of a circle, the one that is next on most of them.
    """
    members = Counter(each for own in orders for each in own)
    position = [0] * len(orders)
    first_on: dict[Collective, list[int]] = {}  # those that come first on some rank now
    agreed: list[Collective] = []  # those that come first on all their ranks (a heap)
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

"""W put into orders of F and I: where there is time, and where a rank would otherwise idle most."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product

from ..ir import Action, Op
from ..placement import Placement
from ..timing.costs import CostTable
from .greedy import Listed


def with_weights(
    order: Sequence[Action], placement: Placement, table: CostTable, *, memory_limit: float, kept: float
) -> Iterator[Listed]:
    """Orders that the rules for W of ZB's authors lead to, from F and I of all ranks in the order of their placing.

    A W goes into each gap that is long enough, for memory, and into a short gap in which its rank would become the one
    that has idled most so far: before the I of a rank's first stage in any case, before its other I and before F in one
    try each with and without. A try is made again with the idle time that it led to, as long as that helps: then a rank
    may idle until it is as far below the most as it was at the end. Nothing comes where memory does not suffice.
    """
    for before_i, before_f in product((True, False) if len(placement[0]) > 1 else (True,), (True, False)):
        allowed, least = [0.0] * len(placement), float("inf")
        while True:
            weights = _Weights(placement, table, memory_limit, kept, allowed)
            if not weights.place(order, before_i=before_i, before_f=before_f) or max(weights.idle) >= least:
                break
            yield weights.listed()
            least = max(weights.idle)
            allowed = [least - idle for idle in weights.idle]


class _Weights:
    """Programs that take the F and I in a given order, and W by the rules above.

    Arguments:
        allowed: [P] seconds that a rank may idle without a W in a short gap, though no other rank did so yet.
    """

    def __init__(
        self, placement: Placement, table: CostTable, memory_limit: float, kept: float, allowed: list[float]
    ) -> None:
        num_ranks = len(placement)
        self.table, self.kept, self.allowed = table, kept, allowed
        self.limit = memory_limit + 1e-9
        self.rank_of = {stage: rank for rank, own in enumerate(placement) for stage in own}
        self.first_stages = {min(own) for own in placement}
        self.programs: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.owed: list[deque[Action]] = [deque() for _ in range(num_ranks)]
        self.first, self.free, self.held, self.idle = ([0.0] * num_ranks for _ in range(4))
        self.arrived: dict[Action, float] = {}

    def place(self, order: Sequence[Action], *, before_i: bool, before_f: bool) -> bool:
        """Whether memory lets all be placed."""
        rank_of, last = self.rank_of, len(self.rank_of) - 1
        for action in order:
            stage, op, k = action
            rank = rank_of[stage]
            owed = self.owed[rank]
            more = 1.0 if op is Op.F else self.kept - 1.0
            while self.held[rank] + more > self.limit:
                if not owed:
                    return False
                self.weight(rank)
            arrival = self.arrived.get(action, 0.0)
            while owed and arrival >= self.free[rank] + self.seconds(owed[0]):
                self.weight(rank)
            gap = arrival - self.free[rank]
            short = before_f if op is Op.F else before_i or stage in self.first_stages
            if owed and short and gap > 0 and self.idle[rank] + gap > max(*self.idle, self.allowed[rank]):
                self.weight(rank)
            start = max(self.free[rank], arrival)
            if self.programs[rank]:
                self.idle[rank] += start - self.free[rank]
            else:
                self.first[rank] = start
            self.programs[rank].append(action)
            self.held[rank] += more
            self.free[rank] = end = start + self.seconds(action)
            if op is Op.I:
                owed.append(Action(stage, Op.W, k))
            if op is Op.F and stage < last:
                user = Action(stage + 1, Op.F, k)
            else:
                user = Action(stage if op is Op.F else stage - 1, Op.I, k)
            to_self = rank_of.get(user.stage, rank) == rank
            self.arrived[user] = end if to_self else end + self.table.latency[stage]
        for rank, owed in enumerate(self.owed):
            while owed:
                self.weight(rank)
        return True

    def weight(self, rank: int) -> None:
        action = self.owed[rank].popleft()
        self.free[rank] += self.seconds(action)
        self.held[rank] -= self.kept
        self.programs[rank].append(action)

    def seconds(self, action: Action) -> float:
        return self.table.of(action.op, action.stage, action.index)

    def listed(self) -> Listed:
        return Listed(
            programs=tuple(map(tuple, self.programs)),
            span=max(free - first for free, first in zip(self.free, self.first, strict=True)),
            makespan=max(self.free),
        )

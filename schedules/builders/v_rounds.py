"""ZB-V's orders for costs and a memory limit: F and I in rounds, W in the gaps and where a rank would idle most."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product

from ..ir import Action, Op
from ..timing.costs import CostTable
from .greedy import Listed


def v_rounds(
    num_ranks: int, num_microbatches: int, table: CostTable, memory_limit: float, kept: float
) -> Iterator[Listed]:
    """The orders that the authors of ZB-V search among, for a V of two chunks (Qi et al., section 6, and their code).

    The first microbatch goes down and back. Before it comes back a rank admits further ones as long as they end in time
    and leave memory for the way back; then the ranks even out what they have, and run rounds: each an I, of the earlier
    stage where that may run, then an F, of the later stage where that may run. A W goes into each gap that is long
    enough, for memory, and into a short gap in which its rank would become the one that has idled most: always before
    an I of the earlier stage, before other I and before F in one try each with and without. Each try is made again
    with the idle time it led to, while that helps: then a rank may idle as long as it stays below the most of before.

    Nothing comes where sizes, costs or memory do not fit the rounds. O(M P^2) each.
    """
    rounds = _Rounds(num_ranks, num_microbatches, table)
    try:
        rounds.warm_up(memory_limit)
        for _ in range(2 * num_microbatches):
            rounds.gradients()
            rounds.forwards()
    except _OutOfTurnError:
        return
    for before_i, before_f in product((True, False), repeat=2):
        allowed, least = [0.0] * num_ranks, float("inf")
        while True:
            weights = _Weights(num_ranks, table, memory_limit, kept, allowed)
            if not weights.place(rounds.placed, before_i=before_i, before_f=before_f):
                break
            if max(weights.idle) >= least:
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
        self, num_ranks: int, table: CostTable, memory_limit: float, kept: float, allowed: list[float]
    ) -> None:
        self.table, self.kept, self.allowed = table, kept, allowed
        self.limit = memory_limit + 1e-9
        self.last = 2 * num_ranks - 1
        self.programs: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.owed: list[deque[Action]] = [deque() for _ in range(num_ranks)]
        self.first, self.free, self.held, self.idle = ([0.0] * num_ranks for _ in range(4))
        self.arrived: dict[Action, float] = {}

    def place(self, placed: list[Action], *, before_i: bool, before_f: bool) -> bool:
        """Whether memory lets all be placed."""
        P, last = len(self.programs), self.last
        for action in placed:
            stage, op, k = action.stage, action.op, action.index
            rank = min(stage, last - stage)
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
            short = before_f if op is Op.F else before_i or stage < P
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
            same_rank = rank == min(user.stage, last - user.stage)
            self.arrived[user] = end if same_rank else end + self.table.latency[stage]
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


class _OutOfTurnError(Exception):
    """A rank whose turn it is has nothing to run, so that the rounds do not fit these sizes."""


class _Rounds:
    """F and I in the order in which they are placed; times are those of a warm-up without backwards."""

    def __init__(self, num_ranks: int, num_microbatches: int, table: CostTable) -> None:
        self.P, self.M, self.table = num_ranks, num_microbatches, table
        self.last = 2 * num_ranks - 1
        self.ends: list[list[float]] = [[] for _ in range(2 * num_ranks)]  # of the forwards of a stage
        self.gradients_done = [0] * (2 * num_ranks)
        self.free = [0.0] * num_ranks
        self.placed: list[Action] = []

    def count(self, stage: int) -> int:
        return len(self.ends[stage])

    def back(self, rank: int) -> int:
        """The later stage of a rank."""
        return self.last - rank

    def may_forward(self, stage: int) -> bool:
        k = self.count(stage)
        return k < self.M and (stage == 0 or k < self.count(stage - 1))

    def forward(self, stage: int) -> None:
        if not self.may_forward(stage):
            raise _OutOfTurnError
        rank, k = min(stage, self.last - stage), self.count(stage)
        start = self.free[rank]
        if stage:
            before = stage - 1
            latency = 0.0 if stage == self.P else self.table.latency[before]
            start = max(start, self.ends[before][k] + latency)
        self.free[rank] = start + self.table.of(Op.F, stage, k)
        self.ends[stage].append(self.free[rank])
        self.placed.append(Action(stage, Op.F, k))

    def gradient(self, stage: int) -> None:
        k = self.gradients_done[stage]
        if k >= self.count(stage) or (stage < self.last and k >= self.gradients_done[stage + 1]):
            raise _OutOfTurnError
        self.gradients_done[stage] += 1
        self.placed.append(Action(stage, Op.I, k))

    def warm_up(self, memory_limit: float) -> None:
        P, M = self.P, self.M
        for rank in range(P):
            self.forward(rank)
        for rank in reversed(range(P)):
            while rank < P - 1 and self.count(rank) < M:
                arrival = self.ends[self.back(rank) - 1][0] + self.table.latency[self.back(rank) - 1]
                room = self.count(rank) + 2 + 2 * rank <= memory_limit + 1e-9
                if not room or self.free[rank] + self.table.of(Op.F, rank, self.count(rank)) > arrival:
                    break
                for each in range(rank + 1):
                    self.forward(each)
            self.forward(self.back(rank))
        on_the_way_back = False
        for rank in range(1, P):
            above = rank - 1
            while (
                self.count(rank) + self.count(self.back(rank)) < self.count(above) + self.count(self.back(above))
                or self.count(self.back(rank)) <= self.count(self.back(above)) < M
            ):
                for each in reversed(range(rank, P)):
                    stage = self.back(each) if on_the_way_back else each
                    if self.count(stage) < M:
                        self.forward(stage)
                on_the_way_back = not on_the_way_back

    def gradients(self) -> None:
        """One input gradient of each rank: those that go up to the first rank are chosen before any is placed."""
        done = self.gradients_done
        up = [
            rank
            for rank in range(self.P)
            if done[rank] < done[self.back(rank)]
            and (rank == self.P - 1 or done[rank] < done[rank + 1] or done[self.back(rank)] == self.M)
        ]
        for rank in reversed(up):
            self.gradient(rank)
        for rank in range(self.P):
            if rank not in up:
                self.gradient(self.back(rank))

    def forwards(self) -> None:
        for rank in range(self.P):
            back = self.back(rank)
            if self.count(back) == self.M:
                continue
            if self.may_forward(back):
                self.forward(back)
            elif self.may_forward(rank):
                self.forward(rank)

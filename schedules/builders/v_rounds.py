"""ZB-V's orders for costs and a memory limit: F and I in rounds."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Action, Op
from ..timing.costs import CostTable
from .greedy import Listed
from .placements import snake_placement
from .weights import with_weights


def v_rounds(
    num_ranks: int, num_microbatches: int, table: CostTable, memory_limit: float, kept: float
) -> Iterator[Listed]:
    """The orders that the authors of ZB-V search among, for a V of two chunks (Qi et al., section 6, and their code).

    The first microbatch goes down and back. Before it comes back a rank admits further ones as long as they end in time
    and leave memory for the way back; then the ranks even out what they have, and run rounds: each an I, of the earlier
    stage where that may run, then an F, of the later stage where that may run. W: see `with_weights`.

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
    placement = snake_placement(num_ranks=num_ranks, num_chunks=2)
    yield from with_weights(rounds.placed, placement, table, memory_limit=memory_limit, kept=kept)


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

"""ZB-V (Qi et al., 2024, section 6): zero bubble at the memory of 1F1B, with two chunks per rank in a V."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from ..ir import Action, Op, Schedule, ScheduleError
from ..orders.evaluate import OrderEvaluator, Orders
from ..placement import StagePlacement
from ..timing.costs import Costs
from .automatic import best_order, lists, named, pose, read_costs, read_memory, refills, reordered, with_weights
from .family import Family
from .v_blocks import fitting_blocks, v_half, v_min
from .warmup import put_off_weights


def v_rounds(evaluator: OrderEvaluator, memory_limit: float) -> Iterator[Orders]:
    """The orders that the authors of ZB-V search among, for a V of two chunks (Qi et al., section 6, and their code).

    Until the first microbatch returns, a rank admits further ones as long as they end in time and leave memory for the
    way back; then the ranks equalise their counts, and run rounds: each an I, of the earlier stage if it may run, then
    an F, of the later stage if it may run. For the W see `with_weights`. Beyond the authors' search, the last of the
    further microbatches may also end up to half of its forward late, and each order is `reordered`. Empty if sizes,
    costs or memory do not fit the rounds. O(M P^2) each.
    """
    for late in (0.0, 0.5):
        rounds = _Rounds(evaluator)
        try:
            rounds.warm_up(memory_limit, late)
            for _ in range(2 * rounds.M):
                rounds.gradients()
                rounds.forwards()
        except ScheduleError:
            continue
        yield from with_weights(evaluator, rounds.placed)
        yield from reordered(evaluator, rounds.programs)


class _Rounds:
    """F and I in the order in which they are placed; times are those of a warm-up without backwards."""

    def __init__(self, evaluator: OrderEvaluator) -> None:
        self.evaluator = evaluator
        self.P, self.M = evaluator.problem.num_ranks, evaluator.num_microbatches
        self.last = 2 * self.P - 1
        self.ends: list[list[float]] = [[] for _ in range(2 * self.P)]  # of the forwards of a stage
        self.gradients_done = [0] * (2 * self.P)
        self.free = [0.0] * self.P
        self.placed: list[Action] = []

    def count(self, stage: int) -> int:
        return len(self.ends[stage])

    def back(self, rank: int) -> int:
        return self.last - rank

    def arrival(self, stage: int, k: int) -> float:
        return self.ends[stage - 1][k] + self.evaluator.problem.forward_delay[stage - 1]

    def seconds(self, stage: int, k: int) -> float:
        return self.evaluator.problem.seconds[Op.F][stage][k]

    def may_forward(self, stage: int) -> bool:
        k = self.count(stage)
        return k < self.M and (stage == 0 or k < self.count(stage - 1))

    def forward(self, stage: int) -> None:
        if not self.may_forward(stage):
            raise ScheduleError(f"stage {stage} has no forward to run in its turn")
        rank, k = self.evaluator.problem.rank_of[stage], self.count(stage)
        start = max(self.free[rank], self.arrival(stage, k)) if stage else self.free[rank]
        self.free[rank] = start + self.seconds(stage, k)
        self.ends[stage].append(self.free[rank])
        self.placed.append(Action(stage, Op.F, k))

    def gradient(self, stage: int) -> None:
        k = self.gradients_done[stage]
        if k >= self.count(stage) or (stage < self.last and k >= self.gradients_done[stage + 1]):
            raise ScheduleError(f"stage {stage} has no gradient to make in its turn")
        self.gradients_done[stage] += 1
        self.placed.append(Action(stage, Op.I, k))

    @property
    def programs(self) -> list[list[Action]]:
        rank_of = self.evaluator.problem.rank_of
        return [[action for action in self.placed if rank_of[action.stage] == rank] for rank in range(self.P)]

    def warm_up(self, memory_limit: float, late: float) -> None:
        P, M = self.P, self.M
        for rank in range(P):
            self.forward(rank)
        for rank in reversed(range(P)):
            while rank < P - 1 and self.count(rank) < M:
                arrival = self.arrival(self.back(rank), 0)
                room = self.count(rank) + 2 + 2 * rank <= memory_limit + 1e-9
                if not room or self.free[rank] + (1.0 - late) * self.seconds(rank, self.count(rank)) > arrival:
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
        """One input gradient per rank; those of first chunks are all chosen before any is placed."""
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


def zb_v(
    *,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | None = None,
    costs: Costs | None = None,
    kept: float = 1.0,
    seconds: float = math.inf,
) -> Schedule:
    """Two chunks per rank in a V: no bubble in a rank's span where F = I = W, at the memory of 1F1B's first rank.

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .       P=2, M=3, unit time
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Without costs and limit it is the handcrafted order of the paper (and of torch's ScheduleZBVZeroBubble), and each
    rank holds 2P chunk activations when M >= 2P-1. Its makespan is then M 2 (F+I+W) + (P-1) F for F = I = W, of one
    chunk each, and free links; with other costs the span has a bubble, 8(P-1) for F, I, W = 10, 11, 7. With costs, that
    order of F and I with W where they fit is one of several candidates, those of the authors' search among them
    (`v_rounds`), below 2P also repeated blocks (`fitting_blocks`), and the least span is taken. First and last stage
    are on rank 0: tied embeddings need no message.

    Arguments:
        memory_limit: most chunk activations of a rank at once, at least 2; 2P by default.
        costs: of one chunk's action each.
        kept, seconds: see `zb_automatic`.

    Raises ValueError for a limit below 2 and costs that are not above 0.
    """
    limit = read_memory(memory_limit, kept, default=2 * num_ranks, least=2)
    table = read_costs(costs, num_stages=2 * num_ranks)
    placement = StagePlacement.snake(num_ranks=num_ranks)
    programs = handcrafted(num_ranks, num_microbatches)
    paper = Schedule(name="zb-v", placement=placement, programs=programs, num_microbatches=num_microbatches)
    if costs is None and limit == 2 * num_ranks:
        return paper
    evaluator = pose(placement, num_microbatches, table, memory_limit=limit, kept=kept)
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    made = (paper, *(build(**sizes, costs=costs) for build in (v_half, v_min)))
    candidates = chain(_candidates(evaluator, limit), named(evaluator, made))
    return best_order("zb-v", evaluator, candidates, seconds=seconds)


def handcrafted(num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The paper's order, made for at least 2P-1 microbatches and cut to the given number."""
    return tuple(
        tuple(
            Action(rank if chunk == 0 else 2 * num_ranks - 1 - rank, op, k)
            for op, chunk, k in _steps(num_ranks, rank, max(num_microbatches, 2 * num_ranks - 1))
            if k < num_microbatches
        )
        for rank in range(num_ranks)
    )


def _steps(P: int, rank: int, M: int) -> list[tuple[Op, int, int]]:
    F, I, W = Op.F, Op.I, Op.W
    steps: list[tuple[Op, int, int]] = []
    done = {(op, chunk): 0 for op in (F, I, W) for chunk in (0, 1)}

    def add(*actions: tuple[Op, int], times: int = 1) -> None:
        for _ in range(times):
            for action in actions:
                steps.append((*action, done[action]))
                done[action] += 1

    add((F, 0), times=2 * (P - rank) - 1)
    add((F, 1), (F, 0), times=rank)
    add((F, 1), (I, 1), (W, 1), times=P - rank)
    while done[F, 1] < done[F, 0] or done[F, 0] < M:
        if done[F, 0] < M:
            add((F, 0))
        add((I, 0), (W, 0), (F, 1), (I, 1), (W, 1))
    add((I, 0), (I, 1), times=rank)
    add((I, 0), (W, 0), times=P - rank)
    add((W, 1), times=done[I, 1] - done[W, 1])
    add((W, 0), times=done[I, 0] - done[W, 0])
    return steps


def _candidates(evaluator: OrderEvaluator, limit: float) -> Iterator[Orders]:
    """The paper's order with W anew, the authors' search, fitting blocks, then lists where rank r starts r microbatches
    fewer."""
    P, M = evaluator.problem.num_ranks, evaluator.num_microbatches
    if limit >= 2 * P:
        yield from refills(evaluator, handcrafted(P, M))
        yield from reordered(evaluator, handcrafted(P, M))
    yield from v_rounds(evaluator, limit)
    if limit < 2 * P:
        for block in fitting_blocks(P, M, limit):
            yield from reordered(evaluator, (put_off_weights(program, delay=0) for program in block.programs))
    room = int(limit + 1e-9)
    yield from lists(evaluator, (*(max(1, room - 1 - rank) for rank in range(P)), *(room for _ in range(P))))


ZB_V = Family(
    name="zb-v",
    build=zb_v,
    placement="snake",
    aliases=("zbv", "zbvzerobubble", "zbv-zero-bubble", "schedulezbvzerobubble"),
    num_chunks=2,
    splits_backward=True,
    full_after=2,
)

"""Stages that go down the ranks and up again.

Hanayo (Liu et al., 2023, wave-like pipeline parallelism): several times. V-Half and V-Min (Qi et al., 2024,
controllable memory): once, a V, as one repeated building block:

    rank 0 | F0 .  .  .  .  F1 I1 .  .  .  .  I0          a block: one microbatch, down, up, down and up
    rank 1 | .  F0 .  .  F1 .  .  I1 .  .  I0 .           (of 3 ranks; F0, I0 of the first chunk, F1, I1 of the second)
    rank 2 | .  .  F0 F1 .  .  .  .  I1 I0 .  .

A microbatch follows every six slots, as long as F, I and W of two chunks; two W fit into the remaining slots. The
number of slots per step determines how long an activation is held, hence how many are alive at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise, product

from ..ir import Action, Op, Schedule
from ..placement import StagePlacement
from ..timing.costs import Costs
from .automatic import best_order, pose, read_costs, refills
from .family import Family

_PERIOD = 6
Steps = tuple[int, int, int, int]
Block = Callable[[int, int], Steps]  # P, rank -> slots of F0, F1, I1, I0


def repeat_block(
    name: str, block: Block, num_microbatches: int, *, num_ranks: int, memory_limit: int, costs: Costs | None
) -> Schedule:
    """The block once per microbatch, compressed: each F and I in its order as soon as it can run, and W in the gaps.

    Where two steps of a block coincide modulo the period, the block of one rank more is taken without its last rank:
    the last two stages on the way down and the first two on the way up are left out.
    """
    table = read_costs(costs, num_stages=2 * num_ranks)
    ranks = range(num_ranks)
    fitting = all(len({slot % _PERIOD for slot in block(num_ranks, rank)}) == 4 for rank in ranks)
    size = num_ranks if fitting else num_ranks + 1
    programs = _repeated([block(size, rank) for rank in ranks], num_microbatches, Op.I)
    placement = StagePlacement.snake(num_ranks=num_ranks)
    evaluator = pose(placement, num_microbatches, table, memory_limit=memory_limit)
    return best_order(name, evaluator, refills(evaluator, programs))


def _repeated(slots: Sequence[Steps], num_microbatches: int, backward: Op) -> tuple[tuple[Action, ...], ...]:
    programs = []
    for rank, own in enumerate(slots):
        down, up = rank, 2 * len(slots) - 1 - rank
        steps = zip(own, ((down, Op.F), (up, Op.F), (up, backward), (down, backward)), strict=True)
        actions = [(at + _PERIOD * k, Action(s, op, k)) for at, (s, op) in steps for k in range(num_microbatches)]
        programs.append(tuple(action for _, action in sorted(actions)))
    return tuple(programs)


def v_half(*, num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Two chunks per rank in a V; a step of the first chunk takes two slots, one of the second chunk one.

    All ranks hold at most 2 floor((P+2)/2) chunk activations, of 2P under 1F1B, and wait less than under `v-min`. Where
    F = I = W, makespan and longest span are (6M + 3P - 4) F for odd P, (6M + 3P - 5) F for even P, of one chunk, for P
    > 2, M >= P and free links. (The paper's further search over warm-up and drain has 2 F less where P is even.) With
    other costs the bubble does not grow with M as long as W + 2I >= 2F and W + 2F >= 2I.

    Arguments:
        costs: of one chunk's action each, for placing the W; F, I and W of 1 by default.

    Raises ValueError for costs that are not above 0.
    """

    def block(P: int, rank: int) -> tuple[int, int, int, int]:
        return 2 * rank, 3 * P - 2 - rank, 3 * P - 1 + 2 * rank, 6 * P - 2 - rank

    most = 2 * ((num_ranks + 2) // 2)
    return repeat_block("v-half", block, num_microbatches, num_ranks=num_ranks, memory_limit=most, costs=costs)


def v_min(*, num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Two chunks per rank in a V, each step of a microbatch right after the one before: activations live shortest.

    All ranks hold at most 2 floor((P+4)/3) chunk activations, of 2P under 1F1B; no steady order needs much less. Where
    F = I = W, makespan and longest span are (6M + 4P - 5) F, of one chunk, for P > 1 and free links. (The paper's
    further search over warm-up and drain has 2 F less where 3 divides P.) With other costs ranks wait for each other in
    each round, so that the bubble grows with M: then take `v-half` or `zb-v`.

    Arguments:
        costs: of one chunk's action each, for placing the W; F, I and W of 1 by default.

    Raises ValueError for costs that are not above 0.
    """

    def block(P: int, rank: int) -> tuple[int, int, int, int]:
        return rank, 2 * P - 1 - rank, 2 * P + rank, 4 * P - 1 - rank

    most = 2 * ((num_ranks + 4) // 3)
    return repeat_block("v-min", block, num_microbatches, num_ranks=num_ranks, memory_limit=most, costs=costs)


V_HALF, V_MIN = (
    Family(name=name, build=build, placement="snake", num_chunks=2, splits_backward=True)
    for name, build in (("v-half", v_half), ("v-min", v_min))
)


_UP = (1, 2, 5)  # slots from rank to rank on the way up: V-Min, V-Half with chunks exchanged, ZB-V; 1 on the way down
# Slots from the end of a leg of a block to the start of the next one, those with which it holds the least first.
_PAUSES = sorted(product(range(1, 6), repeat=3), key=lambda pauses: sum(pauses) + pauses[1])
_FULLEST = 6  # blocks that are tried under a limit


def fitting_blocks(num_ranks: int, num_microbatches: int, memory_limit: float) -> Iterator[Schedule]:
    """Schedules of F and B for a limit between the memory of `v-min` and that of `zb-v`: first blocks in which no slots
    of a rank coincide, of these the fullest first.

    The first ranks take fewer slots per step up than the others (as the adaptive schedules of controllable memory): the
    same number of ranks for F and for B, or one more for B. The pauses between the four legs are the shortest of those
    with which the fewest slots coincide. `memory_limit`: chunk activations that the fullest rank may hold, on average.
    """
    P = num_ranks
    ups = dict.fromkeys(
        tuple(tuple(fast if rank < n else slow for rank in range(P - 1)) for n in (turn, turn + more))
        for (fast, slow), turn, more in product(pairwise(_UP), range(P), (0, 1))
    )
    blocks = [block for up in ups for block in _with_pauses(_without_pauses(P, *up), memory_limit)]
    blocks.sort(key=lambda block: (block[0], -block[1]))
    placement = StagePlacement.snake(num_ranks=P)
    for _, _, slots in blocks[:_FULLEST]:
        programs = _repeated(slots, num_microbatches, Op.B)
        yield Schedule(name="auto", placement=placement, programs=programs, num_microbatches=num_microbatches)


def _without_pauses(P: int, forward_up: Sequence[int], backward_up: Sequence[int]) -> list[Steps]:
    down = [1] * (P - 1)
    legs: list[list[int]] = []
    for steps in (down, forward_up[::-1], down, backward_up[::-1]):
        legs.append([*accumulate(steps, initial=legs[-1][-1] if legs else 0)])
    return [*zip(legs[0], reversed(legs[1]), legs[2], reversed(legs[3]), strict=True)]


def _with_pauses(block: list[Steps], memory_limit: float) -> list[tuple[int, float, list[Steps]]]:
    """How many slots coincide, chunk activations of the fullest rank on average, and the block, with its best pauses;
    nothing if all exceed the limit."""
    rows = Counter(tuple((slot - own[0]) % _PERIOD for slot in own) for own in block)
    held = max(i0 - f0 + i1 - f1 + 2 for f0, f1, i1, i0 in block)
    best = 4 * len(block), math.inf, block
    for pauses in _PAUSES:
        alive = (held + sum(pauses) + pauses[1]) / _PERIOD
        if alive > memory_limit or best[0] == 0:
            break
        a, b, c = accumulate(pauses)
        same = sum(
            n * (4 - len({f0, (f1 + a) % _PERIOD, (i1 + b) % _PERIOD, (i0 + c) % _PERIOD}))
            for (f0, f1, i1, i0), n in rows.items()
        )
        if same < best[0]:
            best = same, alive, [(f0, f1 + a, i1 + b, i0 + c) for f0, f1, i1, i0 in block]
    return [best] if best[1] < math.inf else []


def hanayo(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Each rank prefers a backward, and of several the one nearest to its end.

        rank 0 | 0F0 0F1 .   3F0 3B0 3F1 3B1 0B0 .   0B1       P=2, V=2, M=2, unit time
        rank 1 | .   1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 .

    A wave is two chunks: V = 2w of the paper. At each turn two consecutive stages are on one rank, without a message.
    The order is a list schedule for B = 2F with at most 2P microbatches in flight. The paper's bubble for M = P and B =
    2F, (2P-2)/(3Pw+P-1), is not that of this order: one wave takes 2P (F+B) + 2(P-1) B, where B is at least 2F (a third
    of idle time for P=4, not 0.4); of more waves neither form holds (0.213 for P=4, w=2, 0.222 by the paper's). With
    more microbatches than P it waits more than interleaved 1F1B does.
    """
    placement = StagePlacement.snake(num_ranks=num_ranks, num_chunks=num_chunks)
    programs = _waves(placement, num_microbatches, most=2 * num_ranks)
    return Schedule(name="hanayo", placement=placement, programs=programs, num_microbatches=num_microbatches)


def _waves(placement: StagePlacement, num_microbatches: int, *, most: int) -> tuple[tuple[Action, ...], ...]:
    """List scheduling: the action that can start first; of those that start together a backward, then the one nearest
    its end. `most`: microbatches of a stage that are in flight at once."""
    rank_of, P, S = placement.rank_of, len(placement), len(placement.rank_of)
    seconds = {Op.F: 1.0, Op.B: 2.0}
    arrived: dict[Op, list[list[float]]] = {op: [[] for _ in range(S)] for op in seconds}
    arrived[Op.F][0] = [0.0] * num_microbatches
    done = {op: [0] * S for op in seconds}
    free = [0.0] * P
    programs: list[list[Action]] = [[] for _ in range(P)]
    candidates = [[*((Op.B, s) for s in sorted(own)), *((Op.F, s) for s in sorted(own)[::-1])] for own in placement]

    def choose(rank: int) -> tuple[float, Op, int]:
        best = math.inf, Op.F, -1
        for op, stage in candidates[rank]:
            k = done[op][stage]
            if k < len(arrived[op][stage]) and (op is Op.B or k - done[Op.B][stage] < most):
                start = max(free[rank], arrived[op][stage][k])
                best = (start, op, stage) if start < best[0] else best
        return best

    choices = [choose(rank) for rank in range(P)]
    for _ in range(2 * S * num_microbatches):
        rank = min(range(P), key=lambda rank: choices[rank][0])
        start, op, stage = choices[rank]
        programs[rank].append(Action(stage, op, done[op][stage]))
        done[op][stage] += 1
        free[rank] = start + seconds[op]
        then, user = (Op.B, stage - 1) if op is Op.B else (Op.B, stage) if stage == S - 1 else (Op.F, stage + 1)
        if user >= 0:
            arrived[then][user].append(free[rank])
            choices[rank_of[user]] = choose(rank_of[user])
        choices[rank] = choose(rank)
    return tuple(map(tuple, programs))


HANAYO = Family(name="hanayo", build=hanayo, placement="snake")

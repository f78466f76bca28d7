"""Schedules over a V of stages as one repeated building block (Qi et al., 2024, controllable memory).

    rank 0 | F0 .  .  .  .  F1 I1 .  .  .  .  I0          a block: the way of one microbatch, down, up, down and up
    rank 1 | .  F0 .  .  F1 .  .  I1 .  .  I0 .           (of 3 ranks; F0, I0 of the first chunk, F1, I1 of the second)
    rank 2 | .  .  F0 F1 .  .  .  .  I1 I0 .  .

A microbatch follows every six slots, as long as F, I and W of two chunks; two W fit in what is left. How many slots
each step of the way takes decides how long an activation is held, hence how many are alive at once.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ir import Action, Op, Schedule
from ..timing.costs import CostTable
from .greedy import Rules, list_order
from .placements import snake_placement

_PERIOD = 6
Block = Callable[[int, int], tuple[int, int, int, int]]  # P, rank -> slots of F0, F1, I1, I0


def repeat_block(
    name: str, block: Block, *, num_ranks: int, num_microbatches: int, memory_limit: int, table: CostTable
) -> Schedule:
    """The block once a microbatch, squeezed: each F and I in its order as soon as it can, and W in the gaps.

    Where two steps of a block fall into one slot of the period, the block of one rank more is taken without its last
    rank: the last two stages of the way down and the first two of the way up are left out.
    """
    ranks = range(num_ranks)
    fitting = all(len({slot % _PERIOD for slot in block(num_ranks, rank)}) == 4 for rank in ranks)
    size = num_ranks if fitting else num_ranks + 1
    programs = []
    for rank in ranks:
        down, up = rank, 2 * num_ranks - 1 - rank
        steps = zip(block(size, rank), ((down, Op.F), (up, Op.F), (up, Op.I), (down, Op.I)), strict=True)
        slots = [
            (slot + _PERIOD * k, Action(stage, op, k)) for slot, (stage, op) in steps for k in range(num_microbatches)
        ]
        programs.append([action for _, action in sorted(slots)])
    placement = snake_placement(num_ranks=num_ranks, num_chunks=2)
    caps = (num_microbatches,) * (2 * num_ranks)
    rules = Rules(caps=caps, memory_limit=memory_limit, order=programs)
    listed = list_order(placement, num_microbatches, table, rules)
    return Schedule(name=name, placement=placement, programs=listed.programs, num_microbatches=num_microbatches)

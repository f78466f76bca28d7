"""BPipe: 1F1B whose activations are spread evenly over pairs of ranks (Kim et al., 2023)."""

from __future__ import annotations

from bisect import bisect_right

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule
from ..timing.costs import Costs
from ..timing.simulate import simulate
from .one_f_one_b import one_f_one_b


def most_held(num_ranks: int) -> int:
    """Stage activations that no rank exceeds: ceil((P + 2) / 2), half of what a pair of ranks has, and one that moves.

    >>> [most_held(ranks) for ranks in (2, 4, 7, 8)]
    [2, 3, 5, 5]
    """
    return (num_ranks + 3) // 2


def bpipe(*, num_ranks: int, num_microbatches: int, backward: float = 2.0) -> Schedule:
    """1F1B in which rank r of the first half lends activations to rank P-1-r, which has fewer of its own.

         owner | F0  F1  F2  F3  .   .   .   B0  F4  B1  F5  B2  .   B3  .   B4  .   B5       ranks 0 and 3 of P=4,
               |         >1                  >3  <1      >4  <3      <4                       M=6, unit time: 1, 3, 4
       partner | .   .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5                   wait on rank 3
               |             0+1 0+3                 0-1     0+4 0-3 0-4

    Wherever a rank would come to hold more than ceil((P+2)/2), what it needs last leaves beside the action before; it
    comes back beside the action in front of its backward. In the order of the programs no rank exceeds that; where ways
    take time, the partner may hold one or two more, since its actions do not begin when the other rank's do. The
    makespan is that of 1F1B while no way takes longer than the action beside which it goes.

    Arguments:
        backward: how many times as long a backward takes as a forward: by that the partner's moves are placed. Where
            it is far off, ranks wait for moves that stand too late (P=8, M=32, B = F: 84 for 78).

    Raises ValueError for a `backward` that is no positive number.
    """
    if isinstance(backward, bool) or not isinstance(backward, int | float) or not 0 < backward < float("inf"):
        raise ValueError(f"backward={backward!r}: expected how many times as long as a forward it takes, such as 2")
    plain = one_f_one_b(num_ranks=num_ranks, num_microbatches=num_microbatches)
    limit = most_held(num_ranks)
    timeline = simulate(plain, Costs(forward=1.0, backward=backward))
    starts = [[span.start for span in rank.compute] for rank in timeline.ranks]
    ends = [[0.0, *(span.end for span in rank.compute)] for rank in timeline.ranks]
    before: list[dict[int, list[Action]]] = [{} for _ in range(num_ranks)]  # moves in front of each action
    for rank in range(num_ranks // 2):
        partner = num_ranks - 1 - rank
        for index, (out, back) in _lent(plain.programs[rank], limit).items():
            ways = ((Op.LEND, Op.HOLD, out), (Op.RELOAD, Op.RETURN, back))
            for own, other, at in ways:
                before[rank].setdefault(at, []).append(Action(rank, own, index))
                # The last action of the partner that has begun by then.
                beside = max(0, bisect_right(starts[partner], ends[rank][at]) - 1)
                before[partner].setdefault(beside, []).append(Action(rank, other, index))
    programs = [
        tuple(step for at, action in enumerate(program) for step in (*moves.get(at, ()), action))
        for program, moves in zip(plain.programs, before, strict=True)
    ]
    return Schedule(
        name="bpipe", placement=plain.placement, programs=tuple(programs), num_microbatches=num_microbatches
    )


def _lent(program: tuple[Action, ...], limit: int) -> dict[int, tuple[int, int]]:
    """By microbatch that leaves: the positions of the actions beside which it goes and comes back."""
    position = {action: at for at, action in enumerate(program)}
    here: set[int] = set()
    away: dict[int, int] = {}
    lent: dict[int, tuple[int, int]] = {}
    for at, (stage, op, index) in enumerate(program):
        comes = {index} if op is Op.F else set()
        following = program[at + 1] if at + 1 < len(program) else None
        if following is not None and following.op is Op.B and following.index in away:
            comes.add(following.index)
            lent[following.index] = (away.pop(following.index), at)
        while len(here) + len(comes) > limit:
            # What is made by then, and needed last.
            made = [k for k in here if position[Action(stage, Op.F, k)] < at - 1]
            gone = max(made, key=lambda k: position[Action(stage, Op.B, k)])
            here.remove(gone)
            away[gone] = at - 1
        here |= comes
        if op is Op.B:
            here.remove(index)
    return lent


def _seconds(equal: EqualStages) -> float | None:
    """The order of 1F1B, where the moves stand right."""
    if equal.latency or equal.input_grad + equal.weight_grad != 2 * equal.forward:
        return None
    return (equal.num_microbatches + equal.num_ranks - 1) * equal.both


BPIPE = Family(
    name="bpipe",
    build=bpipe,
    options=("backward",),
    lends=True,
    full_after=1,
    batch_seconds=_seconds,
)

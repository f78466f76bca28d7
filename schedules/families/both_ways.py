"""Microbatches in both directions along the ranks.

Chimera (Li and Hoefler, 2021): even ones down, odd ones up, so that each stage is on two ranks. DualPipe (DeepSeek-AI,
2024): likewise, with forwards paired with backwards. DualPipeV (DeepSeek-AI, 2025): half of it, with stages that go
down the ranks and up again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..ir import Action, Op, Schedule
from ..placement import StagePlacement, two_way
from .family import Family


def chimera(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Even microbatches go down the ranks, odd ones up: each stage is on two ranks, r and P-1-r.

        rank 0 | 0F0 0F2 .   3F1 3B1 3F3 3B3 0B0 .   0B2       P=4, M=4, unit time: stage s is on rank s for
        rank 1 | .   1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2 .         microbatches 0 and 2, on rank 3-s for 1 and 3
        rank 2 | .   1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3 .
        rank 3 | 0F1 0F3 .   3F0 3B0 3F2 3B2 0B1 .   0B3

    In units of P microbatches, P/2 in each direction. In slots of F = B, stage s runs the j-th forward of its direction
    in slot s + 2j and the backward in P + 2j + (P-1-s): the two directions never share a slot. Units follow each other
    every 2P slots. Fewer than P microbatches, or a remainder, leave slots empty.

    Makespan of K = M/P units, with equal stages and free links: M (F+B) + (P-2)(min(F,B) + K |B-F|). The paper's bubble
    of P-2 slots holds for F = B and any K, and for K = 1 with the longer of the two as the slot; otherwise it grows
    with each unit. Rank r holds P/2 + 1 + min(r, P-1-r) activations, and the weights of two stages, whose gradients are
    summed over the ranks r and P-1-r after the last backward of each.

    Raises ValueError for an odd number of ranks.
    """
    placement, owners = two_way(num_ranks, "chimera")
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(num_ranks)]
    for k in range(num_microbatches):
        unit, within = divmod(k, num_ranks)
        first = 2 * num_ranks * unit + 2 * (within // 2)
        for stage, ranks in enumerate(owners):
            own = slots[ranks[k % 2]]
            own.append((first + stage, Action(stage, Op.F, k)))
            own.append((first + 2 * num_ranks - 1 - stage, Action(stage, Op.B, k)))
    return Schedule(
        name="chimera",
        placement=placement,
        owners=owners,
        programs=tuple(tuple(action for _, action in sorted(own)) for own in slots),
        num_microbatches=num_microbatches,
    )


CHIMERA = Family(name="chimera", build=chimera, placement="two-way", weight_copies=2, full_after=1)


def dualpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Even microbatches go down the ranks, odd ones up; a rank pairs forwards of one direction with backwards of the
    other.

        rank 0 | 0F0 0F2 0F4 3F1 3I1 3W1 3F3 0F6 3B3 3F5 0B0 3B5 3F7 0B2 3B7 0I4 0W4 0I6 0W6       P=4, M=8
        rank 1 | .   1F0 2F1 1F2 2F3 1F4 2B1 2F5 1B0 1F6 2B3 2F7 1B2 2B5 1B4 2I7 1I6 2W7 1W6
        rank 2 | .   1F1 2F0 1F3 2F2 1F5 2B0 2F4 1B1 1F7 2B2 2F6 1B3 2B4 1B5 2I6 1I7 2W6 1W7
        rank 3 | 0F1 0F3 0F5 3F0 3I0 3W0 3F2 0F7 3B2 3F4 0B1 3B4 3F6 0B3 3B6 0I5 0W5 0I7 0W7

    The paper runs such a pair concurrently, so that compute hides messages and exchanges of experts. Here each rank has
    one compute lane: the forward comes first, and its output leaves before the backward, which hides it as well. With
    `with_overlap` exchanges within stages are hidden, too.

    With equal stages, free links and W at most F and I the bubble of every rank does not depend on M. It is the largest
    of n (F+I-W), 2n (F-W) and n (2I-W) - F, with n = P/2 - 1. The published n (F&B + B - 3W), with F&B of a pair and B
    whole, is that of pairs that begin when both inputs are there and give both outputs at their end; it holds for F =
    I. Each rank holds P + 1 activations, from F to the end of B or W, and the weights of two stages, whose gradients
    are summed over the ranks r and P-1-r.

    Raises ValueError for an odd number of ranks or of microbatches, and for fewer than 2P microbatches.
    """
    placement, owners = two_way(num_ranks, "dualpipe")
    if num_microbatches % 2 or num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"num_microbatches={num_microbatches} for schedule 'dualpipe' on {num_ranks} ranks: half of them take each "
            f"way; expected an even number, at least {2 * num_ranks} (2P)"
        )
    even, odd = range(0, num_microbatches, 2), range(1, num_microbatches, 2)
    programs = []
    for rank in range(num_ranks):
        position = min(rank, num_ranks - 1 - rank)
        ways = [(rank, even), (num_ranks - 1 - rank, odd)]
        nearer_first = ways if position == rank else ways[::-1]
        programs.append(eight_steps(nearer_first, position=position, length=num_ranks // 2))
    return Schedule(
        name="dualpipe", placement=placement, owners=owners, programs=tuple(programs), num_microbatches=num_microbatches
    )


def eight_steps(ways: Sequence[tuple[int, range]], *, position: int, length: int) -> tuple[Action, ...]:
    """Program of a rank at `position` (h) between the end where way 0 begins and the middle, `length` (H) ranks away.

    1   2(H-1-h) x  F0                   warm-up of the nearer end's way
    2   (h+1)    x  F0 F1
    3   (H-1-h)  x  I1 W1 F1             the first gradients leave at once
    4   the rest x  F0 B1 F1 B0          in pairs of forward and backward
    5   (H-1-h)  x  B1 F1 B0
    6   (h+1)    x  B1 B0                the second half of these split,
    7   (H-1-h)  x  W I0                 so that gradients leave early, and W remain
    8   (h+1)    x  W                    for the end

    Arguments:
        ways: of each direction the rank's stage and the microbatches, at least 2H.
    """
    F, B, I, W = Op.F, Op.B, Op.I, Op.W
    program: list[Action] = []
    coming = {(is_forward, way): iter(ways[way][1]) for is_forward in (True, False) for way in (0, 1)}
    put_off: deque[Action] = deque()

    def add(*steps: tuple[Op, int], times: int = 1) -> None:
        for _ in range(times):
            for op, way in steps:
                if op is W:  # the oldest one of either direction
                    program.append(put_off.popleft())
                    continue
                program.append(Action(ways[way][0], op, next(coming[op is F, way])))
                if op is I:
                    put_off.append(program[-1]._replace(op=W))

    inner, outer = position + 1, length - 1 - position
    add((F, 0), times=2 * outer)
    add((F, 0), (F, 1), times=inner)
    add((I, 1), (W, 1), (F, 1), times=outer)
    add((F, 0), (B, 1), (F, 1), (B, 0), times=len(ways[0][1]) - 2 * length + inner)
    add((B, 1), (F, 1), (B, 0), times=outer)
    for number in range(2 * inner):
        add((B if number < inner else I, 1 - number % 2))
    add((W, 0), (I, 0), times=outer)
    add((W, 0), times=inner)
    return tuple(program)


DUALPIPE = Family(
    name="dualpipe", build=dualpipe, placement="two-way", weight_copies=2, splits_backward=True, full_after=2
)


def dualpipe_v(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe's order over a V of 2P stages: rank r holds stage r on the way down and stage 2P-1-r on the way up.

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3       P=2, M=4
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    Each stage is on one rank. The first and the last stage share rank 0, stages P-1 and P the last rank: no messages
    pass between them. As in `dualpipe`, the two halves of a pair of forward and backward run one after the other.

    With equal stages, free links and W at most F and I the bubble of every rank is the largest of n (F+I-W), 2n (F-W)
    and n (2I-W) - F, with n = P-1 and the costs of ONE chunk, for any M. The published (P-1)(F&B + B - 3W) is that of
    pairs run concurrently, see `dualpipe`. Each rank holds 2P + 1 chunk activations, from F to the end of B or W.

    Raises ValueError for fewer than 2P microbatches.
    """
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"num_microbatches={num_microbatches} for schedule 'dualpipe-v' on {num_ranks} ranks: expected at least "
            f"{2 * num_ranks} (2P), which its warm-up needs"
        )
    placement = StagePlacement.snake(num_ranks=num_ranks)
    programs = []
    for rank, stages in enumerate(placement):
        ways = [(stage, range(num_microbatches)) for stage in stages]
        programs.append(eight_steps(ways, position=rank, length=num_ranks))
    return Schedule(name="dualpipe-v", placement=placement, programs=tuple(programs), num_microbatches=num_microbatches)


DUALPIPE_V = Family(
    name="dualpipe-v",
    build=dualpipe_v,
    placement="snake",
    aliases=("dualpipev", "scheduledualpipev"),
    num_chunks=2,
    splits_backward=True,
    full_after=2,
)

"""1F1B, also called PipeDream-Flush or DAPPLE (Narayanan et al., 2021; Fan et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence

from .ir import Action, Op, Schedule


def pair_up(forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the rest of the backwards.

    forwards   F0 F1 F2 F3     warmup=2:  F0 F1 | F2 B0 F3 B1 | B2 B3
    backwards  B0 B1 B2 B3
    """
    warmup = min(warmup, len(forwards))
    program = list(forwards[:warmup])
    steady = len(forwards) - warmup
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        program += (forward, backward)
    program += backwards[steady:]
    return tuple(program)


def one_f_one_b(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Each rank starts a backward as soon as it can: P-1-r forwards ahead, then one and one.

        rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3       P=3, M=4, unit time
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Makespan (M+P-1)(F+B) with equal stages and free links; rank r holds min(M, P-r) activations.
    """
    forwards_backwards = [
        tuple([Action(rank, op, k) for k in range(num_microbatches)] for op in (Op.F, Op.B))
        for rank in range(num_ranks)
    ]
    return Schedule(
        name="1f1b",
        placement=tuple((rank,) for rank in range(num_ranks)),
        programs=tuple(
            pair_up(forwards, backwards, warmup=num_ranks - 1 - rank)
            for rank, (forwards, backwards) in enumerate(forwards_backwards)
        ),
        num_microbatches=num_microbatches,
    )

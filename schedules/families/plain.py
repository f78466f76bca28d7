"""One stage a rank, with a flush.

GPipe (Huang et al., 2019): all forwards, then all backwards. 1F1B, also called PipeDream-Flush (Narayanan et al., 2021)
or DAPPLE (Fan et al., 2021). Eager 1F1B: twice the warm-up, so that messages travel while ranks compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Schedule
from .recognise import Family
from .warmup import Turns, in_turn, one_by_one, plain_warmup, replica_counts


def gpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in microbatch order.

        rank 0 | F0 F1 F2 F3 .  .  B0 B1 B2 B3       P=2, M=4, unit time
        rank 1 | .  F0 F1 F2 F3 B0 B1 B2 B3 .

    Makespan (M+P-1)(F+B) with equal stages and free links; every rank holds M activations.
    """
    whole = range(num_microbatches)
    programs = (one_by_one(rank, whole, warmup=num_microbatches) for rank in range(num_ranks))
    return in_turn("gpipe", programs, num_microbatches=num_microbatches)


GPIPE = Family(
    name="gpipe",
    build=gpipe,
    aliases=("schedulegpipe",),
)


def one_f_one_b(*, num_ranks: int, num_microbatches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """Each rank starts a backward as soon as it can: P-1-r forwards ahead, then one and one.

        rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3       P=3, M=4, unit time
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Makespan (M+P-1)(F+B) with equal stages and free links; rank r holds min(M, P-r) activations. A latency c adds
    2c(P-1 + floor((M-1)(P-1)/P)).

    Arguments:
        replicas: ranks of each stage, `sum(replicas) == num_ranks`; one each by default. Replica q of R takes the
            microbatches q, q + R, q + 2R, ...; M need not be a multiple, and a replica may have none.

    Raises ValueError for replicas that do not fit the ranks.
    """
    counts = replica_counts(replicas, num_ranks)
    placement, programs = [], []
    for stage, count in enumerate(counts):
        warmup = plain_warmup(counts, stage)
        for replica in range(count):
            placement.append((stage,))
            programs.append(one_by_one(stage, range(replica, num_microbatches, count), warmup=warmup))
    return Schedule(
        name="1f1b", placement=tuple(placement), programs=tuple(programs), num_microbatches=num_microbatches
    )


def _1f1b_turns(num_ranks: int, num_microbatches: int, num_chunks: int) -> Turns:
    every = [(chunk, k) for chunk in range(num_chunks) for k in range(num_microbatches)]  # of the one chunk
    return Turns(every, every, range(num_ranks - 1, -1, -1))


ONE_F_ONE_B = Family(
    name="1f1b",
    build=one_f_one_b,
    aliases=("schedule1f1b", "pipedream-flush", "dapple"),
    full_after=1,
    turns=_1f1b_turns,
)


def eager_1f1b(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with 2(P-1-r) forwards ahead: behind a slow link there is always one more microbatch to work on.

        rank 0 | F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3       P=3, M=4, unit time
        rank 1 | .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Makespan (M+P-1)(F+B) + 2(P-1)c with equal stages and a latency c of at most F and B: 1F1B waits 2c(P-1)/P more for
    each microbatch. Rank r holds min(M, 2(P-1-r) + 1) activations.
    """
    whole = range(num_microbatches)
    programs = (one_by_one(rank, whole, warmup=2 * (num_ranks - 1 - rank)) for rank in range(num_ranks))
    return in_turn("eager-1f1b", programs, num_microbatches=num_microbatches)


EAGER_1F1B = Family(
    name="eager-1f1b",
    build=eager_1f1b,
    aliases=("1f1b-eager",),
    full_after=2,
)

"""1F1B, also called PipeDream-Flush or DAPPLE (Narayanan et al., 2021; Fan et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule
from .replicas import replica_counts
from .warmup import Turns, pair_up, plain_warmup


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
            own = range(replica, num_microbatches, count)
            forwards, backwards = ([Action(stage, op, k) for k in own] for op in (Op.F, Op.B))
            placement.append((stage,))
            programs.append(pair_up(forwards, backwards, warmup=warmup))
    return Schedule(
        name="1f1b", placement=tuple(placement), programs=tuple(programs), num_microbatches=num_microbatches
    )


def _turns(num_ranks: int, num_microbatches: int, num_chunks: int) -> Turns:
    every = [(chunk, k) for chunk in range(num_chunks) for k in range(num_microbatches)]  # of the one chunk
    return Turns(every, every, range(num_ranks - 1, -1, -1))


def _batch_seconds(equal: EqualStages) -> float:
    """(M + P - 1)(F + B); each message is waited for when the pipeline fills and drains, and in most rounds between."""
    P, M = equal.num_ranks, equal.num_microbatches
    return (M + P - 1) * equal.both + 2 * equal.latency * ((P - 1) + (M - 1) * (P - 1) // P)


def _peak_activations(equal: EqualStages) -> tuple[int, ...]:
    return tuple(min(equal.num_microbatches, equal.num_ranks - rank) for rank in range(equal.num_ranks))


ONE_F_ONE_B = Family(
    name="1f1b",
    build=one_f_one_b,
    options=("replicas",),
    aliases=("schedule1f1b", "pipedream-flush", "dapple"),
    full_after=1,
    turns=_turns,
    batch_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

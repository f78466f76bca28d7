"""Eager 1F1B: twice the warm-up of 1F1B, so that messages travel while ranks compute."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule
from .placements import cyclic_placement
from .warmup import pair_up


def eager_1f1b(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with 2(P-1-r) forwards ahead: behind a slow link there is always one more microbatch to work on.

        rank 0 | F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3       P=3, M=4, unit time
        rank 1 | .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Makespan (M+P-1)(F+B) + 2(P-1)c with equal stages and a latency c of at most F and B: 1F1B waits 2c(P-1)/P more for
    each microbatch. Rank r holds min(M, 2(P-1-r) + 1) activations.
    """
    programs = []
    for rank in range(num_ranks):
        forwards, backwards = ([Action(rank, op, k) for k in range(num_microbatches)] for op in (Op.F, Op.B))
        programs.append(pair_up(forwards, backwards, warmup=2 * (num_ranks - 1 - rank)))
    return Schedule(
        name="eager-1f1b",
        placement=cyclic_placement(num_ranks=num_ranks, num_chunks=1),
        programs=tuple(programs),
        num_microbatches=num_microbatches,
    )


def _batch_seconds(equal: EqualStages) -> float | None:
    if equal.latency > min(equal.forward, equal.input_grad + equal.weight_grad):
        return None
    steps = equal.num_ranks - 1
    return (equal.num_microbatches + steps) * equal.both + 2 * steps * equal.latency


EAGER_1F1B = Family(
    name="eager-1f1b",
    build=eager_1f1b,
    aliases=("1f1b-eager",),
    full_after=2,
    batch_seconds=_batch_seconds,
    peak_activations=lambda equal: tuple(
        min(equal.num_microbatches, 2 * (equal.num_ranks - 1 - rank) + 1) for rank in range(equal.num_ranks)
    ),
)

"""GPipe (Huang et al., 2019): all forwards, then all backwards."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule


def gpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in microbatch order.

        rank 0 | F0 F1 F2 F3 .  .  B0 B1 B2 B3       P=2, M=4, unit time
        rank 1 | .  F0 F1 F2 F3 B0 B1 B2 B3 .

    Makespan (M+P-1)(F+B) with equal stages and free links; every rank holds M activations.
    """
    programs = tuple(
        tuple(Action(rank, op, k) for op in (Op.F, Op.B) for k in range(num_microbatches)) for rank in range(num_ranks)
    )
    return Schedule(
        name="gpipe",
        placement=tuple((rank,) for rank in range(num_ranks)),
        programs=programs,
        num_microbatches=num_microbatches,
    )


def _batch_seconds(equal: EqualStages) -> float:
    steps = equal.num_ranks - 1
    return (equal.num_microbatches + steps) * equal.both + 2 * steps * equal.latency


GPIPE = Family(
    name="gpipe",
    build=gpipe,
    aliases=("schedulegpipe",),
    batch_seconds=_batch_seconds,
    peak_activations=lambda equal: (equal.num_microbatches,) * equal.num_ranks,
)

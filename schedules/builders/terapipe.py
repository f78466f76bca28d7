"""TeraPipe (Li et al., 2021): GPipe whose microbatches are cut along the sequence."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule
from .slices import backward_order, forward_order


def terapipe(*, num_ranks: int, num_microbatches: int, num_slices: int = 2) -> Schedule:
    """The forwards of all slices, then all backwards, those of a microbatch from its last slice to its first.

        rank 0 | F0 F1 F2 F3 .  .  B1 B0 B3 B2       P=2, M=2, n=2, unit time: microbatch 1 is
        rank 1 | .  F0 F1 F2 F3 B1 B0 B3 B2 .        slices 2 and 3

    Makespan (M n + P-1)(F+B) with equal stages, equal slices and free links, F and B of one slice: the bubble of GPipe
    over n. A latency of c adds 2c(P-1).

    Every rank holds M n slices, as much as GPipe's M microbatches. Of a causal model slices of equal length
    do not cost the same, since later ones attend to more: `shortest_lengths` chooses theirs.

    Arguments:
        num_slices: n, of a microbatch.
    """
    sizes = {"num_microbatches": num_microbatches, "num_slices": num_slices}
    programs = tuple(
        tuple(
            [Action(rank, Op.F, index) for index in forward_order(**sizes)]
            + [Action(rank, Op.B, index) for index in backward_order(**sizes)]
        )
        for rank in range(num_ranks)
    )
    return Schedule(
        name="terapipe",
        placement=tuple((rank,) for rank in range(num_ranks)),
        programs=programs,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )


def _batch_seconds(equal: EqualStages) -> float:
    return equal.work + (equal.num_ranks - 1) * (equal.both + 2 * equal.latency)


TERAPIPE = Family(
    name="terapipe",
    build=terapipe,
    options=("num_slices",),
    batch_seconds=_batch_seconds,
    peak_activations=lambda equal: (equal.num_microbatches * equal.num_slices,) * equal.num_ranks,
)

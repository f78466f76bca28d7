"""SlimPipe (Li et al., 2025): one microbatch at a time over many slices and V chunks a rank."""

from __future__ import annotations

from dataclasses import replace

from ..families import EqualStages, Family
from ..ir import Schedule
from .seq1f1b import SEQ1F1B, seq1f1b


def slimpipe(*, num_ranks: int, num_microbatches: int, num_slices: int | None = None, num_chunks: int = 2) -> Schedule:
    """Interleaved Seq1F1B with at least P slices, so that a microbatch alone fills all ranks.

        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0       P=2, V=2, M=1, n=2, unit time:
        rank 1 | .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 .         rank 0 holds stages 0 and 2

    With equal stages, equal slices and free links: makespan (M n V + P-1)(F+B), F and B of one slice on one chunk;
    rank r holds min(M n V, n V + 2(P-1-r)) of them, little more than one microbatch on all its chunks. The paper also
    evens out what slices of a causal model cost, by an exchange of queries, keys and values between ranks; that is
    not done here.

    Arguments:
        num_slices: n, at least P; P by default.
        num_chunks: V.

    Raises ValueError for fewer slices than ranks.
    """
    slices = num_ranks if num_slices is None else num_slices
    if slices < num_ranks:
        raise ValueError(
            f"num_slices={slices} for schedule 'slimpipe' on {num_ranks} ranks: expected at least {num_ranks}, so that "
            f"one microbatch fills all ranks; seq1f1b takes fewer"
        )
    schedule = seq1f1b(num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=slices, num_chunks=num_chunks)
    return replace(schedule, name="slimpipe")


def _peak_activations(equal: EqualStages) -> tuple[int, ...]:
    P, whole = equal.num_ranks, equal.num_slices * equal.num_chunks
    # A rank with one chunk need not run twice as far ahead as the next one: it waits for its backwards alone.
    ahead = 1 if equal.num_chunks == 1 else 2
    return tuple(min(equal.num_microbatches * whole, whole + ahead * (P - 1 - rank)) for rank in range(P))


SLIMPIPE = Family(
    name="slimpipe",
    build=slimpipe,
    options=("num_chunks", "num_slices"),
    batch_seconds=SEQ1F1B.batch_seconds,
    peak_activations=_peak_activations,
)

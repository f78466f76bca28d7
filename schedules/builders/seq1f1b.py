"""Seq1F1B (Sun et al., 2024): 1F1B whose microbatches are cut along the sequence; interleaved, too."""

from __future__ import annotations

from collections.abc import Sequence

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule
from .interleaved import microbatch_groups
from .placements import cyclic_placement
from .slices import backward_order, forward_order
from .warmup import pair_up


def seq1f1b(*, num_ranks: int, num_microbatches: int, num_slices: int = 2, num_chunks: int = 1) -> Schedule:
    """Each rank starts a backward as soon as it can: behind the last slice of the first microbatch.

        rank 0 | F0 F1 F2 .  B1 F3 B0 .  B3 B2       P=2, M=2, n=2, unit time: microbatch 1 is
        rank 1 | .  F0 F1 B1 F2 B0 F3 B3 B2 .        slices 2 and 3

    The warm-up of 1F1B and n - 1 slices more. Makespan (M n + P-1)(F+B) with equal stages, equal slices and free links,
    F and B of one slice: the bubble of 1F1B over n. Rank r holds min(M n, P-1-r + n) slices, where 1F1B holds
    min(M, P-r) microbatches of n each.

    With V chunks a rank microbatches pass through a chunk in groups of at least P slices: makespan (M n V + P-1)(F+B)
    where M n >= P, and rank r holds (V-1) g + 2(P-1-r) + n slices where M allows, g of them in the first group. A group
    is one microbatch where n >= P; that is SlimPipe's order.

    Arguments:
        num_slices: n, of a microbatch.
        num_chunks: V.
    """
    together = _groups(num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=num_slices)
    programs = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        warmup = num_ranks - 1 - rank + num_slices - 1
        if num_chunks > 1:
            warmup += (num_chunks - 1) * together[0] * num_slices + num_ranks - 1 - rank
        forwards: list[Action] = []
        backwards: list[Action] = []
        first = 0
        for size in together:
            begin = first * num_slices
            ascending = forward_order(num_microbatches=size, num_slices=num_slices)
            descending = backward_order(num_microbatches=size, num_slices=num_slices)
            forwards += [Action(stage, Op.F, begin + k) for stage in stages for k in ascending]
            backwards += [Action(stage, Op.B, begin + k) for stage in reversed(stages) for k in descending]
            first += size
        programs.append(pair_up(forwards, backwards, warmup=warmup))
    return Schedule(
        name="seq1f1b",
        placement=cyclic_placement(num_ranks=num_ranks, num_chunks=num_chunks),
        programs=tuple(programs),
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )


def _groups(*, num_ranks: int, num_microbatches: int, num_slices: int) -> Sequence[int]:
    """Microbatches that pass through one chunk before the next chunk's turn, at least P slices where there are so many.

    Whole microbatches: backwards begin with the last slice of one.
    """
    return microbatch_groups(at_least=-(-num_ranks // num_slices), num_microbatches=num_microbatches)


def _batch_seconds(equal: EqualStages) -> float | None:
    few = equal.num_microbatches * equal.num_slices < equal.num_ranks
    if equal.latency > 0 or (few and equal.num_chunks > 1):
        return None
    return equal.work + (equal.num_ranks - 1) * equal.both


def _peak_activations(equal: EqualStages) -> tuple[int, ...]:
    P, n, V = equal.num_ranks, equal.num_slices, equal.num_chunks
    ahead, group = 1, 0
    if V > 1:
        ahead, group = 2, n * _groups(num_ranks=P, num_microbatches=equal.num_microbatches, num_slices=n)[0]
    most = equal.num_microbatches * n * V
    return tuple(min(most, (V - 1) * group + ahead * (P - 1 - rank) + n) for rank in range(P))


SEQ1F1B = Family(
    name="seq1f1b",
    build=seq1f1b,
    options=("num_chunks", "num_slices"),
    aliases=("seq-1f1b",),
    batch_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

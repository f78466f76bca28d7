"""Microbatches cut along the sequence, where each slice attends to earlier ones.

TeraPipe (Li et al., 2021): GPipe over slices. Seq1F1B (Sun et al., 2024): 1F1B over slices, also interleaved, and with
the split backward of ZB-H1. SlimPipe (Li et al., 2025): one microbatch at a time over many slices and V chunks per
rank.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import Action, Op, Schedule
from .family import Family
from .warmup import microbatch_groups, on_cyclic_ranks, one_by_one, pair_up, put_off_weights


def backward_order(*, num_microbatches: int, num_slices: int) -> list[int]:
    """Indices of all slices in the order of backwards: microbatch by microbatch, from the last slice to the first.

    >>> backward_order(num_microbatches=2, num_slices=3)
    [2, 1, 0, 5, 4, 3]
    """
    return [k * num_slices + q for k in range(num_microbatches) for q in reversed(range(num_slices))]


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
    last = backward_order(num_microbatches=num_microbatches, num_slices=num_slices)
    programs = (one_by_one(rank, range(len(last)), backwards=last, warmup=len(last)) for rank in range(num_ranks))
    return on_cyclic_ranks("terapipe", programs, num_microbatches=num_microbatches, num_slices=num_slices)


TERAPIPE = Family(name="terapipe", build=terapipe)


def seq1f1b(*, num_ranks: int, num_microbatches: int, num_slices: int = 2, num_chunks: int = 1) -> Schedule:
    """Each rank starts a backward as soon as it can: after the last slice of the first microbatch.

        rank 0 | F0 F1 F2 .  B1 F3 B0 .  B3 B2       P=2, M=2, n=2, unit time: microbatch 1 is
        rank 1 | .  F0 F1 B1 F2 B0 F3 B3 B2 .        slices 2 and 3

    The warm-up of 1F1B and n - 1 slices more. Makespan (M n + P-1)(F+B) with equal stages, equal slices and free links,
    F and B of one slice: the bubble of 1F1B over n. Rank r holds min(M n, P-1-r + n) slices, where 1F1B holds
    min(M, P-r) microbatches of n each.

    With V chunks per rank microbatches pass through a chunk in groups of at least P slices: makespan (M n V + P-1)(F+B)
    where M n >= P, and rank r holds (V-1) g + 2(P-1-r) + n slices where M allows, g of them in the first group. A group
    is one microbatch where n >= P; that is SlimPipe's order.

    Arguments:
        num_slices: n, of a microbatch.
        num_chunks: V.
    """
    # Whole microbatches, since backwards begin with the last slice of one.
    together = microbatch_groups(at_least=-(-num_ranks // num_slices), num_microbatches=num_microbatches)
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
            descending = backward_order(num_microbatches=size, num_slices=num_slices)
            forwards += [Action(stage, Op.F, begin + k) for stage in stages for k in range(size * num_slices)]
            backwards += [Action(stage, Op.B, begin + k) for stage in reversed(stages) for k in descending]
            first += size
        programs.append(pair_up(forwards, backwards, warmup=warmup))
    sizes = {"num_microbatches": num_microbatches, "num_chunks": num_chunks, "num_slices": num_slices}
    return on_cyclic_ranks("seq1f1b", programs, **sizes)


SEQ1F1B = Family(name="seq1f1b", build=seq1f1b, aliases=("seq-1f1b",))


def seq_zb_h1(*, num_ranks: int, num_microbatches: int, num_slices: int = 2) -> Schedule:
    """Seq1F1B with a split backward: rank r delays r W, as in ZB-H1.

        rank 0 | F0 F1 F2 F3 .  .  I1 W1 I0 W0 I3 W3 I2 W2       P=3, M=2, n=2, unit time: microbatch 1 is
        rank 1 | .  F0 F1 F2 .  I1 F3 I0 W1 I3 W0 I2 W3 W2       slices 2 and 3
        rank 2 | .  .  F0 F1 I1 F2 I0 F3 I3 W1 I2 W0 W3 W2

    With equal stages, equal slices, free links, (M-1) n >= P-1 and W at most F and I, all of one slice: makespan
    M n (F+I+W) + (P-1)(F+I-W). Each rank holds min(M n, P-1 + n) slices, from F to W.

    Arguments:
        num_slices: n, of a microbatch.
    """
    last = backward_order(num_microbatches=num_microbatches, num_slices=num_slices)
    programs = []
    for rank in range(num_ranks):
        warmup = num_ranks - 1 - rank + num_slices - 1
        whole = one_by_one(rank, range(len(last)), backwards=last, warmup=warmup)
        programs.append(put_off_weights(whole, delay=rank))
    return on_cyclic_ranks("seq-zb-h1", programs, num_microbatches=num_microbatches, num_slices=num_slices)


SEQ_ZB_H1 = Family(name="seq-zb-h1", build=seq_zb_h1, splits_backward=True)


def slimpipe(*, num_ranks: int, num_microbatches: int, num_slices: int | None = None, num_chunks: int = 2) -> Schedule:
    """Interleaved Seq1F1B with at least P slices, so that a microbatch alone fills all ranks.

        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0       P=2, V=2, M=1, n=2, unit time:
        rank 1 | .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 .         rank 0 holds stages 0 and 2

    With equal stages, equal slices and free links: makespan (M n V + P-1)(F+B), F and B of one slice on one chunk;
    rank r holds min(M n V, n V + 2(P-1-r)) of them, little more than one microbatch on all its chunks. The paper also
    balances the costs of slices of a causal model, by exchanging queries, keys and values between ranks; that is not
    done here.

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


SLIMPIPE = Family(name="slimpipe", build=slimpipe)

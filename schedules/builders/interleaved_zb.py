"""Interleaved zero bubble (torch.distributed.pipelining's form of ZB-H1 over V chunks a rank)."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Schedule
from .interleaved import looping_turns, microbatch_groups
from .placements import cyclic_placement
from .warmup import put_off_weights


def interleaved_zb(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """ZB-H1 over V chunks a rank: half the warm-up of interleaved 1F1B, and rank r puts off r W into its drain.

        rank 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1       P=2, V=2, M=2, unit time
        rank 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    With equal stages, free links, M >= P and W at most F and I, of one chunk: makespan M V (F+I+W) + (P-1)(F+I-W). It
    holds V P chunk activations on every rank where P divides M, as many as ZB-H1 of whole stages. The orders are those
    of torch's ScheduleInterleavedZeroBubble, which takes fewer numbers of microbatches.
    """
    sizes = microbatch_groups(at_least=num_ranks, num_microbatches=num_microbatches)
    warmups = [(num_chunks - 1) * sizes[0] + num_ranks - 1 - rank for rank in range(num_ranks)]
    order = looping_turns(sizes, num_chunks=num_chunks, warmups=warmups)
    return Schedule(
        name="interleaved-zb",
        placement=cyclic_placement(num_ranks=num_ranks, num_chunks=num_chunks),
        programs=tuple(put_off_weights(order.program(rank), delay=rank) for rank in range(num_ranks)),
        num_microbatches=num_microbatches,
    )


def _batch_seconds(equal: EqualStages) -> float | None:
    few = equal.num_microbatches < equal.num_ranks
    if few or equal.latency or equal.weight_grad > min(equal.forward, equal.input_grad):
        return None
    return equal.work + (equal.num_ranks - 1) * (equal.both - 2 * equal.weight_grad)


def _peak_activations(equal: EqualStages) -> tuple[int, ...] | None:
    P, M, V = equal.num_ranks, equal.num_microbatches, equal.num_chunks
    return None if V > 1 and M % P else (min(M * V, V * P),) * P


INTERLEAVED_ZB = Family(
    name="interleaved-zb",
    build=interleaved_zb,
    options=("num_chunks",),
    aliases=("interleavedzerobubble", "interleaved-zero-bubble", "scheduleinterleavedzerobubble"),
    splits_backward=True,
    full_after=3,
    batch_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

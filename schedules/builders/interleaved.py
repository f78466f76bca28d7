"""Interleaved 1F1B (Narayanan et al., 2021, Megatron-LM PTD-P): V chunks per rank, stage s on rank s mod P."""

from __future__ import annotations

from collections.abc import Sequence

from ..families import EqualStages, Family
from ..ir import Schedule
from .placements import cyclic_placement
from .warmup import Turns


def microbatch_groups(*, at_least: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of the groups that pass through one chunk before the next chunk's turn.

    A group smaller than P leaves ranks idle at each change of chunk, and one larger than P holds
    more activations. So: as many groups as fit with at least that many in each, the sizes as
    even as possible, larger ones first (a later group may not be larger than the first: the
    warm-up is made for the first).

    >>> microbatch_groups(at_least=4, num_microbatches=11)
    (6, 5)
    >>> microbatch_groups(at_least=4, num_microbatches=3)
    (3,)
    """
    num_groups = max(1, num_microbatches // at_least)
    size, larger = divmod(num_microbatches, num_groups)
    return (size + 1,) * larger + (size,) * (num_groups - larger)


def interleaved(
    *, num_ranks: int, num_microbatches: int, num_chunks: int = 2, groups: Sequence[int] | None = None
) -> Schedule:
    """1F1B over V chunks per rank: the bubble shrinks by V, and messages multiply by V.

        rank 0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1       P=2, V=2, M=2, unit time:
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .         rank 0 holds stages 0 and 2

    Makespan (M*V+P-1)(F+B) when P divides M (F, B of one chunk, equal stages, free links); rank r
    then holds (V-1)P + 2(P-1-r) + 1 chunk activations, where M allows.

    Arguments:
        groups: sizes of the microbatch groups, the largest first, together M, each at least P (smaller ones may
            deadlock) unless there is one alone; `microbatch_groups` by default.
    """
    if groups is None:
        groups = microbatch_groups(at_least=num_ranks, num_microbatches=num_microbatches)
    sizes = tuple(groups)
    smallest = min(num_ranks, num_microbatches)
    if sum(sizes) != num_microbatches or min(sizes) < smallest or max(sizes) > sizes[0]:
        raise ValueError(
            f"groups={sizes} for num_ranks={num_ranks}, num_microbatches={num_microbatches}: expected sizes of at "
            f"least {smallest} that add up to {num_microbatches}, none larger than the first"
        )
    order = _turns(sizes, num_ranks=num_ranks, num_chunks=num_chunks)
    return Schedule(
        name="interleaved",
        placement=cyclic_placement(num_ranks=num_ranks, num_chunks=num_chunks),
        programs=tuple(map(order.program, range(num_ranks))),
        num_microbatches=num_microbatches,
    )


def looping_turns(sizes: Sequence[int], *, num_chunks: int, warmups: Sequence[int]) -> Turns:
    """Group by group, in it chunk by chunk, in it by microbatch; backwards from the last chunk.

    Arguments:
        sizes: of the groups.
        warmups: [P] forwards of a rank ahead of its backwards.
    """

    def turns(chunks: range) -> list[tuple[int, int]]:
        found, first = [], 0
        for size in sizes:
            for chunk in chunks:
                found += [(chunk, k) for k in range(first, first + size)]
            first += size
        return found

    return Turns(turns(range(num_chunks)), turns(range(num_chunks - 1, -1, -1)), warmups)


def _turns(sizes: Sequence[int], *, num_ranks: int, num_chunks: int) -> Turns:
    warmups = [(num_chunks - 1) * sizes[0] + 2 * (num_ranks - 1 - rank) for rank in range(num_ranks)]
    return looping_turns(sizes, num_chunks=num_chunks, warmups=warmups)


def _default_turns(num_ranks: int, num_microbatches: int, num_chunks: int) -> Turns:
    sizes = microbatch_groups(at_least=num_ranks, num_microbatches=num_microbatches)
    return _turns(sizes, num_ranks=num_ranks, num_chunks=num_chunks)


def looped_seconds(equal: EqualStages) -> float | None:
    """(M V + P - 1)(F + B), where M is at least P and links are free."""
    if equal.num_microbatches < equal.num_ranks or equal.latency:
        return None
    return equal.work + (equal.num_ranks - 1) * equal.both


def _batch_seconds(equal: EqualStages) -> float | None:
    """The same, and 2c(PV - 1) for a latency c of at most F and B, where P divides M."""
    P, V, c = equal.num_ranks, equal.num_chunks, equal.latency
    if not c:
        return looped_seconds(equal)
    if V == 1 or equal.num_microbatches % P or c > min(equal.forward, equal.both - equal.forward):
        return None
    return equal.work + (P - 1) * equal.both + (2 * c * (P * V - 1) if P > 1 else 0.0)


def _peak_activations(equal: EqualStages) -> tuple[int, ...] | None:
    if equal.num_microbatches % equal.num_ranks:
        return None
    P, all_of_them = equal.num_ranks, equal.num_microbatches * equal.num_chunks
    return tuple(min(all_of_them, (equal.num_chunks - 1) * P + 2 * (P - 1 - rank) + 1) for rank in range(P))


INTERLEAVED = Family(
    name="interleaved",
    build=interleaved,
    options=("groups", "num_chunks"),
    aliases=("interleaved1f1b", "interleaved-1f1b", "scheduleinterleaved1f1b"),
    full_after=3,
    turns=_default_turns,
    batch_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

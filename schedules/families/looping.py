"""Stage s on rank s mod P, with a flush: one stage per rank, or V chunks.

GPipe (Huang et al., 2019): all forwards, then all backwards. 1F1B, also called PipeDream-Flush (Narayanan et al., 2021)
or DAPPLE (Fan et al., 2021). Eager 1F1B: twice the warm-up, so that messages overlap with compute.

Interleaved 1F1B (Narayanan et al., 2021, Megatron-LM PTD-P). GIS, the generalised interleaved schedule (Wan et al.,
2025, PipeOffload): half its warm-up. Interleaved zero bubble, torch.distributed.pipelining's form of ZB-H1. Looped BFS
(Lamy-Poirier, 2023, breadth-first pipeline parallelism): GPipe over V chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from ..ir import Action, Op, Schedule
from .family import Family
from .warmup import (
    ChunkOrder,
    microbatch_groups,
    on_cyclic_ranks,
    one_by_one,
    plain_warmup,
    put_off_weights,
    replica_counts,
)


def gpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in microbatch order.

        rank 0 | F0 F1 F2 F3 .  .  B0 B1 B2 B3       P=2, M=4, unit time
        rank 1 | .  F0 F1 F2 F3 B0 B1 B2 B3 .

    Makespan (M+P-1)(F+B) with equal stages and free links; every rank holds M activations.
    """
    whole = range(num_microbatches)
    programs = (one_by_one(rank, whole, warmup=num_microbatches) for rank in range(num_ranks))
    return on_cyclic_ranks("gpipe", programs, num_microbatches=num_microbatches)


GPIPE = Family(name="gpipe", build=gpipe, aliases=("schedulegpipe",))


def one_f_one_b(*, num_ranks: int, num_microbatches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """Each rank starts a backward as soon as it can: P-1-r forwards ahead, then alternating.

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


def _order_of_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> ChunkOrder:
    every = [(chunk, k) for chunk in range(num_chunks) for k in range(num_microbatches)]  # with one chunk
    return ChunkOrder(every, every, range(num_ranks - 1, -1, -1))


ONE_F_ONE_B = Family(
    name="1f1b",
    build=one_f_one_b,
    aliases=("schedule1f1b", "pipedream-flush", "dapple"),
    full_after=1,
    chunk_order=_order_of_1f1b,
)


def eager_1f1b(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with 2(P-1-r) forwards ahead: after a slow link there is always one more microbatch to work on.

        rank 0 | F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3       P=3, M=4, unit time
        rank 1 | .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Makespan (M+P-1)(F+B) + 2(P-1)c with equal stages and a latency c of at most F and B: 1F1B waits 2c(P-1)/P more for
    each microbatch. Rank r holds min(M, 2(P-1-r) + 1) activations.
    """
    whole = range(num_microbatches)
    programs = (one_by_one(rank, whole, warmup=2 * (num_ranks - 1 - rank)) for rank in range(num_ranks))
    return on_cyclic_ranks("eager-1f1b", programs, num_microbatches=num_microbatches)


EAGER_1F1B = Family(name="eager-1f1b", build=eager_1f1b, aliases=("1f1b-eager",), full_after=2)


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
    order = _interleaved_order(sizes, num_ranks=num_ranks, num_chunks=num_chunks, ahead=2)
    programs = map(order.program, range(num_ranks))
    return on_cyclic_ranks("interleaved", programs, num_microbatches=num_microbatches, num_chunks=num_chunks)


def _interleaved_order(sizes: Sequence[int], *, num_ranks: int, num_chunks: int, ahead: int) -> ChunkOrder:
    """Group by group, within it chunk by chunk, within it by microbatch; backwards from the last chunk. `sizes`: of the
    groups. `ahead`: forwards by which each rank is further ahead of its backwards than the next one."""
    warmups = [(num_chunks - 1) * sizes[0] + ahead * (num_ranks - 1 - rank) for rank in range(num_ranks)]

    def turns(chunks: range) -> list[tuple[int, int]]:
        found, first = [], 0
        for size in sizes:
            for chunk in chunks:
                found += [(chunk, k) for k in range(first, first + size)]
            first += size
        return found

    return ChunkOrder(turns(range(num_chunks)), turns(range(num_chunks - 1, -1, -1)), warmups)


def _default_order(num_ranks: int, num_microbatches: int, num_chunks: int) -> ChunkOrder:
    sizes = microbatch_groups(at_least=num_ranks, num_microbatches=num_microbatches)
    return _interleaved_order(sizes, num_ranks=num_ranks, num_chunks=num_chunks, ahead=2)


INTERLEAVED = Family(
    name="interleaved",
    build=interleaved,
    aliases=("interleaved1f1b", "interleaved-1f1b", "scheduleinterleaved1f1b"),
    full_after=3,
    chunk_order=_default_order,
)


def gis(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B whose input gradients leave before the weight gradients are computed.

        rank 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 .   2I1 2W1 0I0 0W0 0I1 0W1       P=2, V=2, M=2, unit time
        rank 1 | .   1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1 .

    A gradient returns earlier by the W, so that P-1-r forwards ahead suffice where interleaved 1F1B needs twice as
    many. With equal stages, free links and M >= P: makespan M V (F+I+W) + (P-1)(F+I), of one chunk each. Where P
    divides M rank r holds V P - r chunk activations.

    Groups of fewer than P microbatches hold less and wait: V P - r becomes (V-1) g + P - r, at the cost of
    (P-g)(V-1)(F+I-W) when F = I = W. With other costs only the half-memory form GIS-H, g = P/2, costs exactly that,
    where W is at least the difference of F and I and at most the smaller of them; between the two it costs less where I
    > F.

    Arguments:
        group_size: g, least number of microbatches that pass a chunk before the next chunk, P by default and at least
            P/2: with fewer, ranks would deadlock.
    """
    smallest = (num_ranks + 1) // 2
    size = num_ranks if group_size is None else group_size
    if not isinstance(size, Integral) or isinstance(size, bool) or size < smallest:
        raise ValueError(
            f"group_size={group_size!r} for num_ranks={num_ranks}: expected a whole number, at least {smallest} (half "
            f"of the ranks, GIS-H; with fewer, ranks would wait for each other for ever)"
        )
    sizes = microbatch_groups(at_least=size, num_microbatches=num_microbatches)
    order = _interleaved_order(sizes, num_ranks=num_ranks, num_chunks=num_chunks, ahead=1)
    programs = (put_off_weights(order.program(rank), delay=0) for rank in range(num_ranks))
    return on_cyclic_ranks("gis", programs, num_microbatches=num_microbatches, num_chunks=num_chunks)


GIS = Family(name="gis", build=gis, splits_backward=True, full_after=3)


def interleaved_zb(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """ZB-H1 over V chunks per rank: half the warm-up of interleaved 1F1B, and rank r delays r W into its drain.

        rank 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1       P=2, V=2, M=2, unit time
        rank 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    With equal stages, free links, M >= P and W at most F and I, of one chunk: makespan M V (F+I+W) + (P-1)(F+I-W). It
    holds V P chunk activations on every rank where P divides M, as many as ZB-H1 of whole stages. The orders are those
    of torch's ScheduleInterleavedZeroBubble, which takes fewer numbers of microbatches.
    """
    sizes = microbatch_groups(at_least=num_ranks, num_microbatches=num_microbatches)
    order = _interleaved_order(sizes, num_ranks=num_ranks, num_chunks=num_chunks, ahead=1)
    programs = (put_off_weights(order.program(rank), delay=rank) for rank in range(num_ranks))
    return on_cyclic_ranks("interleaved-zb", programs, num_microbatches=num_microbatches, num_chunks=num_chunks)


INTERLEAVED_ZB = Family(
    name="interleaved-zb",
    build=interleaved_zb,
    aliases=("interleavedzerobubble", "interleaved-zero-bubble", "scheduleinterleavedzerobubble"),
    splits_backward=True,
    full_after=3,
)


def looped_bfs(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """All microbatches through a chunk before the next chunk; then backward, the last chunk first.

        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1       P=2, V=2, M=2, unit time
        rank 1 | .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .

    One gather and one reduction of a chunk's weights per batch; every rank holds M*V chunk activations.
    """
    programs = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        program = [Action(stage, Op.F, k) for stage in stages for k in range(num_microbatches)]
        program += [Action(stage, Op.B, k) for stage in reversed(stages) for k in range(num_microbatches)]
        programs.append(tuple(program))
    return on_cyclic_ranks("looped-bfs", programs, num_microbatches=num_microbatches, num_chunks=num_chunks)


LOOPED_BFS = Family(name="looped-bfs", build=looped_bfs, aliases=("loopedbfs", "scheduleloopedbfs"))

"""GIS, the generalised interleaved schedule (Wan et al., 2025, PipeOffload): half the warm-up of interleaved 1F1B."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Schedule
from .interleaved import looping_turns, microbatch_groups
from .placements import cyclic_placement
from .warmup import put_off_weights


def gis(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B whose gradient of the inputs leaves before that of the weights is made.

        rank 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 .   2I1 2W1 0I0 0W0 0I1 0W1       P=2, V=2, M=2, unit time
        rank 1 | .   1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1 .

    The way back of a gradient is shorter by the W, so that P-1-r forwards ahead are enough where interleaved 1F1B needs
    twice as many. With equal stages, free links and M >= P: makespan M V (F+I+W) + (P-1)(F+I), of one chunk each. Where
    P divides M rank r holds V P - r chunk activations.

    Groups of fewer than P microbatches hold less and wait: V P - r becomes (V-1) g + P - r, at the cost of
    (P-g)(V-1)(F+I-W) when F = I = W. With other costs only the half-memory form GIS-H, g = P/2, costs just that, where
    W is at least the difference of F and I and at most the smaller of them; between the two it costs less where I > F.

    Arguments:
        group_size: g, least number of microbatches that pass a chunk before the next chunk's turn, P by default and at
            least P/2: with fewer, ranks wait for each other for ever.
    """
    smallest = (num_ranks + 1) // 2
    size = num_ranks if group_size is None else group_size
    if not isinstance(size, int) or isinstance(size, bool) or size < smallest:
        raise ValueError(
            f"group_size={group_size!r} for num_ranks={num_ranks}: expected a whole number, at least {smallest} (half "
            f"of the ranks, GIS-H; with fewer, ranks would wait for each other for ever)"
        )
    sizes = microbatch_groups(at_least=size, num_microbatches=num_microbatches)
    warmups = [(num_chunks - 1) * sizes[0] + num_ranks - 1 - rank for rank in range(num_ranks)]
    order = looping_turns(sizes, num_chunks=num_chunks, warmups=warmups)
    return Schedule(
        name="gis",
        placement=cyclic_placement(num_ranks=num_ranks, num_chunks=num_chunks),
        programs=tuple(put_off_weights(order.program(rank), delay=0) for rank in range(num_ranks)),
        num_microbatches=num_microbatches,
    )


def _batch_seconds(equal: EqualStages) -> float | None:
    if equal.num_microbatches < equal.num_ranks or equal.latency:
        return None
    return equal.work + (equal.num_ranks - 1) * (equal.forward + equal.input_grad)


def _peak_activations(equal: EqualStages) -> tuple[int, ...] | None:
    P, M, V = equal.num_ranks, equal.num_microbatches, equal.num_chunks
    if V > 1 and M % P:
        return None
    return tuple(min(M * V, V * P - rank) for rank in range(P))


GIS = Family(
    name="gis",
    build=gis,
    options=("group_size", "num_chunks"),
    splits_backward=True,
    full_after=3,
    batch_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

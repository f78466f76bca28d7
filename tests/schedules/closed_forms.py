"""Spans and activations as papers give them, by family: [P] peaks and seconds of the longest span; None where a form
does not hold."""

from __future__ import annotations

from collections.abc import Callable

from support.inside import EqualStages, microbatch_groups

from stagewright.schedules import FAMILIES

Peaks = tuple[int, ...] | None


def falling(equal: EqualStages, most: int, first: int, step: int) -> Peaks:
    """Each rank `step` fewer than the one before it, and no more than there are."""
    return tuple(min(most, first - step * rank) for rank in range(equal.num_ranks))


def alike(equal: EqualStages, peak: int) -> Peaks:
    return (peak,) * equal.num_ranks


def interleaved(equal: EqualStages) -> Peaks:
    P, M, V = equal.num_ranks, equal.num_microbatches, equal.num_chunks
    return None if M % P else falling(equal, M * V, (V - 1) * P + 2 * (P - 1) + 1, 2)


def of_rounds(equal: EqualStages, *, step: int) -> Peaks:
    P, M, V = equal.num_ranks, equal.num_microbatches, equal.num_chunks
    return None if V > 1 and M % P else falling(equal, M * V, V * P, step)


def seq1f1b(equal: EqualStages) -> Peaks:
    P, M, n, V = equal.num_ranks, equal.num_microbatches, equal.num_slices, equal.num_chunks
    if V == 1:
        return falling(equal, M * n, P - 1 + n, 1)
    group = n * microbatch_groups(at_least=-(-P // n), num_microbatches=M)[0]
    return falling(equal, M * n * V, (V - 1) * group + 2 * (P - 1) + n, 2)


def slimpipe(equal: EqualStages) -> Peaks:
    P, whole = equal.num_ranks, equal.num_slices * equal.num_chunks
    # A rank with one chunk need not run twice as far ahead as the next one: it waits for its backwards alone.
    ahead = 1 if equal.num_chunks == 1 else 2
    return falling(equal, equal.num_microbatches * whole, whole + ahead * (P - 1), ahead)


def chimera(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    return None if equal.num_microbatches % P else tuple(P // 2 + 1 + min(rank, P - 1 - rank) for rank in range(P))


def hanayo(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    is_one_wave = equal.num_chunks == 2 and equal.num_microbatches == P
    return tuple(min(2 * P, P + 1 + 3 * rank // 2) for rank in range(P)) if is_one_wave else None


def zb_v(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    return alike(equal, 2 * P) if equal.num_microbatches >= 2 * P - 1 else None


def v_half(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    return None if equal.num_microbatches < 2 * P else alike(equal, 2 * ((P + 2) // 2))


def v_min(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    return None if equal.num_microbatches < P or P % 3 == 2 else alike(equal, 2 * ((P + 4) // 3))


PEAKS: dict[str, Callable[[EqualStages], Peaks]] = {
    "gpipe": lambda e: alike(e, e.num_microbatches),
    "1f1b": lambda e: falling(e, e.num_microbatches, e.num_ranks, 1),
    "eager-1f1b": lambda e: falling(e, e.num_microbatches, 2 * (e.num_ranks - 1) + 1, 2),
    **dict.fromkeys(("pipedream", "2bw", "paci"), lambda e: falling(e, e.num_ranks, e.num_ranks, 1)),
    "zb-h1": lambda e: alike(e, min(e.num_microbatches, e.num_ranks)),
    "zb-h2": lambda e: alike(e, min(e.num_microbatches, 2 * e.num_ranks - 1)),
    "interleaved": interleaved,
    "gis": lambda e: of_rounds(e, step=1),
    "interleaved-zb": lambda e: of_rounds(e, step=0),
    "looped-bfs": lambda e: alike(e, e.num_microbatches * e.num_chunks),
    "terapipe": lambda e: alike(e, e.num_microbatches * e.num_slices),
    "seq1f1b": seq1f1b,
    "seq-zb-h1": lambda e: alike(e, min(e.num_microbatches * e.num_slices, e.num_ranks - 1 + e.num_slices)),
    "slimpipe": slimpipe,
    "chimera": chimera,
    "dualpipe": lambda e: alike(e, e.num_ranks + 1),
    "dualpipe-v": lambda e: alike(e, 2 * e.num_ranks + 1),
    "hanayo": hanayo,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
}


def zb_h2_span(equal: EqualStages) -> float | None:
    P, M, W = equal.num_ranks, equal.num_microbatches, equal.weight_grad
    if not 2 * equal.latency <= W <= min(equal.forward, equal.input_grad):
        return None
    both = (M + P - 1) * (equal.forward + equal.input_grad)
    return both + max(1, M - 2 * P + 2) * W + 2 * (P - 1) * equal.latency


def zb_v_span(equal: EqualStages) -> float | None:
    is_even = equal.forward == equal.input_grad == equal.weight_grad and not equal.latency
    return equal.work if is_even and equal.num_microbatches >= 2 * equal.num_ranks - 1 else None


# V-half and V-min: as long as the makespan.
SPANS = {"zb-h2": zb_h2_span, "zb-v": zb_v_span} | {name: FAMILIES[name].batch_seconds for name in ("v-half", "v-min")}

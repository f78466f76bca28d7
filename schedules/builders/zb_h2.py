"""ZB-H2 (Qi et al., 2024): twice the warm-up of ZB-H1, and no bubble in a rank's own span."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Schedule
from .zb_h1 import well_filled, zb_handcrafted


def zb_h2(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Forwards fill the warm-up, W the drain: with F = I = W each rank works without a pause from first to last.

        rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .       P=3, M=6, unit time
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    With equal stages, W at most F and I and a latency c of at most W/2, the longest span of a rank is
    M (F+I+W) + (P-1)(F+I-2W+2c) when M >= 2P-1, and (M+P-1)(F+I) + W + 2c(P-1) below. The makespan is no less than
    M (F+I+W) + (P-1)(F+c), as with any order: the zero bubble is one of the span, real only where a step begins on
    a rank before the last one has ended on the others. Each rank holds min(M, 2P-1) activations, from F to W.
    """
    return zb_handcrafted("zb-h2", num_ranks=num_ranks, num_microbatches=num_microbatches, steps=2)


def _span_seconds(equal: EqualStages) -> float | None:
    P, M = equal.num_ranks, equal.num_microbatches
    if not well_filled(equal):
        return None
    both = (M + P - 1) * (equal.forward + equal.input_grad)
    return both + max(1, M - 2 * P + 2) * equal.weight_grad + 2 * (P - 1) * equal.latency


def _batch_seconds(equal: EqualStages) -> float | None:
    P, M, span = equal.num_ranks, equal.num_microbatches, _span_seconds(equal)
    if span is None or P < M < 2 * P - 1:
        return None
    return max(span, equal.work + (P - 1) * (equal.forward + equal.latency))


ZB_H2 = Family(
    name="zb-h2",
    build=zb_h2,
    splits_backward=True,
    full_after=2,
    batch_seconds=_batch_seconds,
    span_seconds=_span_seconds,
    peak_activations=lambda equal: (min(equal.num_microbatches, 2 * equal.num_ranks - 1),) * equal.num_ranks,
)

"""ZB-H1 and ZB-H2 (Qi et al., 2024, zero bubble pipeline parallelism): 1F1B whose weight gradients fill the drain."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Schedule
from .warmup import in_turn, one_by_one, put_off_weights


def zb_h1(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with a split backward: the W that rank r has put off fill the time in which 1F1B would drain.

        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3       P=3, M=4, unit time
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r puts off r W, so that it holds as many activations as rank 0: min(M, P), from F to W. With equal stages, free
    links and W at most F and I: makespan M (F+I+W) + (P-1)(F+I-W) when M >= P, and (M+P-1)(F+I) + W below, the best
    there is. A latency c of at most W/2 adds 2c(P-1 + min(M-2, P-1)), the 4c(P-1) of the paper when M > P.
    Below P microbatches W come as soon as the drain begins: by the literal rule of the paper they would all stand at
    the end, 119 s for 112 with P=4, M=2, F=10, I=11, W=7.
    """
    return zb_handcrafted("zb-h1", num_ranks=num_ranks, num_microbatches=num_microbatches, steps=1)


def zb_handcrafted(name: str, *, num_ranks: int, num_microbatches: int, steps: int) -> Schedule:
    """1F1B with `steps` forwards more ahead a rank than the next one has, and as many W put off as it has fewer."""
    most = min(steps * (num_ranks - 1), num_microbatches)
    programs = []
    for rank in range(num_ranks):
        warmup = min(steps * (num_ranks - 1 - rank), num_microbatches)
        program = one_by_one(rank, range(num_microbatches), warmup=warmup)
        programs.append(put_off_weights(program, delay=most - warmup))
    return in_turn(name, programs, num_microbatches=num_microbatches)


def _h1_seconds(equal: EqualStages) -> float | None:
    P, M, W, c = equal.num_ranks, equal.num_microbatches, equal.weight_grad, equal.latency
    if not well_filled(equal):
        return None
    waits = 2 * c * (P - 1 + max(0, min(M - 2, P - 1)))
    return (M + P - 1) * (equal.forward + equal.input_grad) + W + max(0, M - P) * W + waits


def well_filled(equal: EqualStages) -> bool:
    """Whether a W fits into the gap of an F or I, and hides a message there and back."""
    return 2 * equal.latency <= equal.weight_grad <= min(equal.forward, equal.input_grad)


ZB_H1 = Family(
    name="zb-h1",
    build=zb_h1,
    splits_backward=True,
    full_after=1,
    batch_seconds=_h1_seconds,
    peak_activations=lambda equal: (min(equal.num_microbatches, equal.num_ranks),) * equal.num_ranks,
)


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


def _h2_span(equal: EqualStages) -> float | None:
    P, M = equal.num_ranks, equal.num_microbatches
    if not well_filled(equal):
        return None
    both = (M + P - 1) * (equal.forward + equal.input_grad)
    return both + max(1, M - 2 * P + 2) * equal.weight_grad + 2 * (P - 1) * equal.latency


def _h2_seconds(equal: EqualStages) -> float | None:
    P, M, span = equal.num_ranks, equal.num_microbatches, _h2_span(equal)
    if span is None or P < M < 2 * P - 1:
        return None
    return max(span, equal.work + (P - 1) * (equal.forward + equal.latency))


ZB_H2 = Family(
    name="zb-h2",
    build=zb_h2,
    splits_backward=True,
    full_after=2,
    batch_seconds=_h2_seconds,
    span_seconds=_h2_span,
    peak_activations=lambda equal: (min(equal.num_microbatches, 2 * equal.num_ranks - 1),) * equal.num_ranks,
)

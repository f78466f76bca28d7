"""ZB-H1 (Qi et al., 2024, zero bubble pipeline parallelism): 1F1B whose weight gradients fill the drain."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule


def zb_h1(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with a split backward: the W that rank r has put off fill the time in which 1F1B would drain.

        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3       P=3, M=4, unit time
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r puts off r W, so that it holds as many activations as rank 0. With equal stages, free links, M >= P and W at
    most F and I: makespan M (F+I+W) + (P-1)(F+I-W). Each rank holds min(M, P) activations, from F to W. Below P
    microbatches another order is better.
    """
    programs = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        forwards = iter([Action(rank, Op.F, k) for k in range(num_microbatches)])
        weights = iter([Action(rank, Op.W, k) for k in range(num_microbatches)])
        program = [next(forwards) for _ in range(warmup)]
        for k in range(num_microbatches):
            program += [forward for forward in [next(forwards, None)] if forward is not None]
            program.append(Action(rank, Op.I, k))
            if warmup + k >= num_ranks - 1:
                program.append(next(weights))
        programs.append((*program, *weights))
    return Schedule(
        name="zb-h1",
        placement=tuple((rank,) for rank in range(num_ranks)),
        programs=tuple(programs),
        num_microbatches=num_microbatches,
    )


def _batch_seconds(equal: EqualStages) -> float | None:
    few = equal.num_microbatches < equal.num_ranks
    if few or equal.weight_grad > min(equal.forward, equal.input_grad):
        return None
    return equal.num_microbatches * equal.both + (equal.num_ranks - 1) * (equal.both - 2 * equal.weight_grad)


ZB_H1 = Family(
    name="zb-h1",
    build=zb_h1,
    splits_backward=True,
    full_after=1,
    batch_seconds=_batch_seconds,
    peak_activations=lambda equal: (min(equal.num_microbatches, equal.num_ranks),) * equal.num_ranks,
)

"""ZB-H1 over slices of the sequence: Seq1F1B whose weight gradients fill the drain."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule
from .slices import backward_order, forward_order


def seq_zb_h1(*, num_ranks: int, num_microbatches: int, num_slices: int = 2) -> Schedule:
    """Seq1F1B with a split backward: rank r puts off r W, as under ZB-H1.

        rank 0 | F0 F1 F2 F3 .  .  I1 W1 I0 W0 I3 W3 I2 W2       P=3, M=2, n=2, unit time: microbatch 1 is
        rank 1 | .  F0 F1 F2 .  I1 F3 I0 W1 I3 W0 I2 W3 W2       slices 2 and 3
        rank 2 | .  .  F0 F1 I1 F2 I0 F3 I3 W1 I2 W0 W3 W2

    With equal stages, equal slices, free links, (M-1) n >= P-1 and W at most F and I, all of one slice: makespan
    M n (F+I+W) + (P-1)(F+I-W). Each rank holds min(M n, P-1 + n) slices, from F to W.

    Arguments:
        num_slices: n, of a microbatch.
    """
    sizes = {"num_microbatches": num_microbatches, "num_slices": num_slices}
    programs = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank + num_slices - 1, num_microbatches * num_slices)
        backwards = backward_order(**sizes)
        forwards = iter([Action(rank, Op.F, index) for index in forward_order(**sizes)])
        weights = iter([Action(rank, Op.W, index) for index in backwards])
        program = [next(forwards) for _ in range(warmup)]
        for done, index in enumerate(backwards):
            program += [forward for forward in [next(forwards, None)] if forward is not None]
            program.append(Action(rank, Op.I, index))
            if done >= rank:
                program.append(next(weights))
        programs.append((*program, *weights))
    return Schedule(
        name="seq-zb-h1",
        placement=tuple((rank,) for rank in range(num_ranks)),
        programs=tuple(programs),
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )


def _batch_seconds(equal: EqualStages) -> float | None:
    few = (equal.num_microbatches - 1) * equal.num_slices < equal.num_ranks - 1
    if equal.latency > 0 or few or equal.weight_grad > min(equal.forward, equal.input_grad):
        return None
    return equal.work + (equal.num_ranks - 1) * (equal.both - 2 * equal.weight_grad)


def _peak_activations(equal: EqualStages) -> tuple[int, ...]:
    P, n = equal.num_ranks, equal.num_slices
    return (min(equal.num_microbatches * n, P - 1 + n),) * P


SEQ_ZB_H1 = Family(
    name="seq-zb-h1",
    build=seq_zb_h1,
    options=("num_slices",),
    splits_backward=True,
    batch_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

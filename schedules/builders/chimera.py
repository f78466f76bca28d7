"""Chimera (Li and Hoefler, 2021): two pipelines in opposite directions, each of which fills the other's bubbles."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Action, Op, Schedule
from .two_way import two_way


def chimera(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Even microbatches go down the ranks, odd ones up: each stage stands on two ranks, r and P-1-r.

        rank 0 | 0F0 0F2 .   3F1 3B1 3F3 3B3 0B0 .   0B2       P=4, M=4, unit time: stage s stands on rank s for
        rank 1 | .   1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2 .         microbatches 0 and 2, on rank 3-s for 1 and 3
        rank 2 | .   1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3 .
        rank 3 | 0F1 0F3 .   3F0 3B0 3F2 3B2 0B1 .   0B3

    In units of P microbatches, P/2 in each direction. In slots of F = B, stage s runs the j-th forward of its direction
    in slot s + 2j and the backward in P + 2j + (P-1-s): the two directions never meet in a slot. Units follow each
    other every 2P slots. Fewer than P microbatches, or a remainder, leave slots empty.

    Makespan of K = M/P units, with equal stages and free links: M (F+B) + (P-2)(min(F,B) + K |B-F|). The paper's bubble
    of P-2 slots holds for F = B and any K, and for K = 1 with the longer of the two as the slot; where they differ it
    grows with each unit. Rank r holds P/2 + 1 + min(r, P-1-r) activations, and the weights of two stages, whose
    gradients are summed over the ranks r and P-1-r behind the last backward of each.

    Raises ValueError for an odd number of ranks.
    """
    placement, owners = two_way(num_ranks, "chimera")
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(num_ranks)]
    for k in range(num_microbatches):
        unit, within = divmod(k, num_ranks)
        first = 2 * num_ranks * unit + 2 * (within // 2)
        for stage, ranks in enumerate(owners):
            own = slots[ranks[k % 2]]
            own.append((first + stage, Action(stage, Op.F, k)))
            own.append((first + 2 * num_ranks - 1 - stage, Action(stage, Op.B, k)))
    return Schedule(
        name="chimera",
        placement=placement,
        owners=owners,
        programs=tuple(tuple(action for _, action in sorted(own)) for own in slots),
        num_microbatches=num_microbatches,
    )


def _batch_seconds(equal: EqualStages) -> float | None:
    units, left = divmod(equal.num_microbatches, equal.num_ranks)
    if left or equal.latency:
        return None
    forward, backward = equal.forward, equal.input_grad + equal.weight_grad
    waits = min(forward, backward) + units * abs(backward - forward)
    return equal.num_microbatches * equal.both + (equal.num_ranks - 2) * waits


def _peak_activations(equal: EqualStages) -> tuple[int, ...] | None:
    P = equal.num_ranks
    return None if equal.num_microbatches % P else tuple(P // 2 + 1 + min(rank, P - 1 - rank) for rank in range(P))


CHIMERA = Family(
    name="chimera",
    build=chimera,
    placement="two-way",
    weight_copies=2,
    full_after=1,
    batch_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

"""Hanayo (Liu et al., 2023, wave-like pipeline parallelism): stages go down the ranks and up again, w times."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Schedule
from ..placement import snake_placement
from ..timing.costs import Costs
from .greedy import Rules, list_order

_COSTS = Costs(forward=1.0, backward=2.0)


def hanayo(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Each rank takes a backward if there is one, and of several what is nearest to the end of its way.

        rank 0 | 0F0 0F1 .   3F0 3B0 3F1 3B1 0B0 .   0B1       P=2, V=2, M=2, unit time
        rank 1 | .   1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 .

    A wave is two chunks: V = 2w of the paper. Where the way turns, two stages of one rank follow each other, without a
    message. The order is a list schedule for B = 2F with at most 2P microbatches under way. The paper's bubble for
    M = P and B = 2F, (2P-2)/(3Pw+P-1), is not that of this order: one wave takes 2P (F+B) + 2(P-1) B, where B is at
    least 2F (a third of idle time for P=4, not 0.4); of more waves neither form holds (0.213 for P=4, w=2, 0.222 by
    the paper's). With more microbatches than P it waits more than interleaved 1F1B does.
    """
    placement = snake_placement(num_ranks=num_ranks, num_chunks=num_chunks)
    num_stages = num_ranks * num_chunks
    rules = Rules(caps=(2 * num_ranks,) * num_stages, memory_limit=float("inf"), split=False)
    listed = list_order(placement, num_microbatches, _COSTS.table(num_stages=num_stages), rules)
    return Schedule(name="hanayo", placement=placement, programs=listed.programs, num_microbatches=num_microbatches)


def _is_one_wave(equal: EqualStages) -> bool:
    return equal.num_chunks == 2 and equal.num_microbatches == equal.num_ranks


def _batch_seconds(equal: EqualStages) -> float | None:
    backward = equal.input_grad + equal.weight_grad
    if not _is_one_wave(equal) or equal.latency or backward < 2 * equal.forward:
        return None
    return equal.work + 2 * (equal.num_ranks - 1) * backward


def _peak_activations(equal: EqualStages) -> tuple[int, ...] | None:
    P = equal.num_ranks
    return tuple(min(2 * P, P + 1 + 3 * rank // 2) for rank in range(P)) if _is_one_wave(equal) else None


HANAYO = Family(
    name="hanayo",
    build=hanayo,
    placement="snake",
    options=("num_chunks",),
    batch_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

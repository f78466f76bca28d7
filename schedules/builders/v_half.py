"""V-Half (Qi et al., 2024, pipeline parallelism with controllable memory): half the activations of 1F1B."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Schedule
from ..timing.costs import Costs
from .automatic import read_costs
from .blocks import repeat_block


def v_half(*, num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Two chunks a rank in a V; a step of the first chunk takes two slots, one of the second chunk one.

    All ranks hold at most 2 floor((P+2)/2) chunk activations, of 2P under 1F1B, and wait less than under `v-min`.
    Where F = I = W, makespan and longest span are (6M + 3P - 4) F for odd P, (6M + 3P - 5) F for even P, of one chunk,
    for P > 2, M >= P and free links. (The paper's further search over warm-up and drain has 2 F less where P is even.)
    With other costs the bubble does not grow with M as long as W + 2I >= 2F and W + 2F >= 2I.

    Arguments:
        costs: of one chunk's action each, for the places of the W; F, I and W of 1 where not given.

    Raises ValueError for costs that are not above 0.
    """
    table = read_costs(costs, num_stages=2 * num_ranks)
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    return repeat_block("v-half", _block, memory_limit=_most(num_ranks), table=table, **sizes)


def _block(P: int, rank: int) -> tuple[int, int, int, int]:
    return (2 * rank, 3 * P - 2 - rank, 3 * P - 1 + 2 * rank, 6 * P - 2 - rank)


def _most(P: int) -> int:
    return 2 * ((P + 2) // 2)


def _batch_seconds(equal: EqualStages) -> float | None:
    P, M = equal.num_ranks, equal.num_microbatches
    if equal.latency or not equal.forward == equal.input_grad == equal.weight_grad or M < P:
        return None
    return equal.work + (0 if P == 1 else max(2, 3 * P - (4 if P % 2 else 5))) * equal.forward


def _peak_activations(equal: EqualStages) -> tuple[int, ...] | None:
    P, M = equal.num_ranks, equal.num_microbatches
    return None if M < 2 * P else (_most(P),) * P


V_HALF = Family(
    name="v-half",
    build=v_half,
    placement="snake",
    options=("costs",),
    num_chunks=2,
    splits_backward=True,
    batch_seconds=_batch_seconds,
    span_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

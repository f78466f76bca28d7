"""V-Min (Qi et al., 2024, pipeline parallelism with controllable memory): a third of the activations of 1F1B."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Schedule
from ..timing.costs import Costs
from .automatic import read_costs
from .blocks import repeat_block


def v_min(*, num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Two chunks a rank in a V, each step of a microbatch's way right behind the one before: activations live shortest.

    All ranks hold at most 2 floor((P+4)/3) chunk activations, of 2P under 1F1B; no steady order does with much less.
    Where F = I = W, makespan and longest span are (6M + 4P - 5) F, of one chunk, for P > 1 and free links. (The paper's
    further search over warm-up and drain has 2 F less where 3 divides P.) With other costs ranks wait for each other in
    each round, so that the bubble grows with M: then take `v-half` or `zb-v`.

    Arguments:
        costs: of one chunk's action each, for the places of the W; F, I and W of 1 where not given.

    Raises ValueError for costs that are not above 0.
    """
    table = read_costs(costs, num_stages=2 * num_ranks)
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    return repeat_block("v-min", _block, memory_limit=_most(num_ranks), table=table, **sizes)


def _block(P: int, rank: int) -> tuple[int, int, int, int]:
    return (rank, 2 * P - 1 - rank, 2 * P + rank, 4 * P - 1 - rank)


def _most(P: int) -> int:
    return 2 * ((P + 4) // 3)


def _batch_seconds(equal: EqualStages) -> float | None:
    P = equal.num_ranks
    if equal.latency or not equal.forward == equal.input_grad == equal.weight_grad:
        return None
    return equal.work + (0 if P == 1 else 4 * P - 5) * equal.forward


def _peak_activations(equal: EqualStages) -> tuple[int, ...] | None:
    P, M = equal.num_ranks, equal.num_microbatches
    return None if M < P or P % 3 == 2 else (_most(P),) * P


V_MIN = Family(
    name="v-min",
    build=v_min,
    placement="snake",
    options=("costs",),
    num_chunks=2,
    splits_backward=True,
    batch_seconds=_batch_seconds,
    span_seconds=_batch_seconds,
    peak_activations=_peak_activations,
)

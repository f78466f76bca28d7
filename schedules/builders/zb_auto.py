"""ZB-1p and ZB-2p (Qi et al., 2024): zero bubble schedules for measured costs and a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from ..families import Family
from ..ir import Action, Op, Schedule
from ..placement import cyclic_placement
from ..timing.costs import Costs, CostTable
from .greedy import Listed, Rules, best_order, read_costs, read_memory
from .warmup import one_by_one
from .weights import with_weights


def zb_1p(
    *,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | None = None,
    costs: Costs | None = None,
    kept: float = 1.0,
) -> Schedule:
    """The least span that a greedy search finds for given costs, under a memory limit of P activations.

    Forwards ahead fill the time until the first gradient, as many as memory allows; then forwards and backwards take
    turns, or each rank takes what can start first, a backward before a forward. W fill gaps that are long enough, and
    short ones where a rank has idled most, or everywhere; a W makes room for a forward that has none. Tried are some
    slopes of the warm-up over the ranks, as the paper tries its flags, and what has the least span is taken, of these
    the least makespan. There is no closed form. Where there are P activations, M >= P and W takes no more than F and I,
    it has the span of ZB-H1, the least. O(M P^2): some seconds at P=32, M=256.

    Arguments:
        memory_limit: most stage activations of a rank at once, at least 1; P where not given.
        costs: of one stage action each; F, I and W of 1 and no latency where not given.
        kept: part of an activation that stays from the end of its I until the end of its W. Then more W may wait, but
            only where the runtime frees the rest at I; `check` and `simulate` count an activation whole until its W.

    Raises ValueError for a limit below 1 and costs that are not above 0.
    """
    limit = read_memory(memory_limit, kept, default=num_ranks, least=1)
    return _automatic("zb-1p", num_microbatches, limit, read_costs(costs, num_stages=num_ranks), kept)


def zb_2p(
    *,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | None = None,
    costs: Costs | None = None,
    kept: float = 1.0,
) -> Schedule:
    """`zb_1p` with a memory limit of 2P activations where none is given: no bubble in a rank's span for usual costs."""
    limit = read_memory(memory_limit, kept, default=2 * num_ranks, least=1)
    return _automatic("zb-2p", num_microbatches, limit, read_costs(costs, num_stages=num_ranks), kept)


def _automatic(name: str, num_microbatches: int, limit: float, table: CostTable, kept: float) -> Schedule:
    placement = cyclic_placement(num_ranks=len(table.latency), num_chunks=1)
    return best_order(name, placement, num_microbatches, table, _candidates(num_microbatches, table, limit, kept))


def _candidates(num_microbatches: int, table: CostTable, limit: float, kept: float) -> Iterator[Rules | Listed]:
    """Warm-ups that fall by so many forwards from rank to rank: from 1F1B's to what fills the way of a microbatch."""
    before = len(table.latency) - 1  # ranks in front of the last
    forward, input_grad = (fmean(map(fmean, table.rows[op])) for op in (Op.F, Op.I))
    full = 1 + (input_grad + 2 * fmean(table.latency)) / forward
    slopes = [*(1 + (full - 1) * step / 4 for step in range(5)), (limit - 1) / max(1, before)]
    warmups = dict.fromkeys(_warmup(slope, before, int(limit + 1e-9)) for slope in slopes)
    for warmup in warmups:
        whole = range(num_microbatches)
        order = [one_by_one(rank, whole, warmup=first - 1, op=Op.I) for rank, first in enumerate(warmup)]
        for fills in (False, True):
            yield Rules(caps=warmup, memory_limit=limit, kept=kept, fills_small_gaps=fills, order=order)
    placement = cyclic_placement(num_ranks=before + 1, num_chunks=1)
    for warmup in dict.fromkeys(map(_falling, warmups)):
        yield from with_weights(_in_rounds(warmup, num_microbatches), placement, table, memory_limit=limit, kept=kept)
    for fills in (False, True):
        caps = _warmup(full, before, int(limit + 1e-9))
        yield Rules(caps=caps, memory_limit=limit, kept=kept, fills_small_gaps=fills)


def _warmup(slope: float, before: int, room: int) -> tuple[int, ...]:
    """Forwards of each rank in front of its first backward."""
    return tuple(max(1, min(room, int(1 + slope * (before - rank) + 1e-9))) for rank in range(before + 1))


def _falling(warmup: tuple[int, ...]) -> tuple[int, ...]:
    """The same, with at least one fewer than in the rank before."""
    return tuple(max(1, min(first, warmup[0] - rank)) for rank, first in enumerate(warmup))


def _in_rounds(warmup: tuple[int, ...], num_microbatches: int) -> list[Action]:
    """F of the warm-up, then an I of each rank from the last and an F of each from the first, in turn."""
    done = [min(first, num_microbatches) for first in warmup]
    order = [Action(stage, Op.F, k) for stage, first in enumerate(done) for k in range(first)]
    for number in range(num_microbatches):
        order += [Action(stage, Op.I, number) for stage in reversed(range(len(done)))]
        for stage, k in enumerate(done):
            if k < num_microbatches:
                order.append(Action(stage, Op.F, k))
                done[stage] = k + 1
    return order


ZB_1P, ZB_2P = (
    Family(
        name=name,
        build=build,
        options=("costs", "kept", "memory_limit"),
        aliases=(name.replace("-", ""),),
        splits_backward=True,
    )
    for name, build in (("zb-1p", zb_1p), ("zb-2p", zb_2p))
)

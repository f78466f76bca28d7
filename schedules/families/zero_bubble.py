"""Zero bubble schedules with one stage per rank (Qi et al., 2024): 1F1B with a split backward, whose W fill the drain.

ZB-H1 and ZB-H2 are handcrafted, ZB-1p and ZB-2p are made for measured costs and a memory limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import chain
from statistics import fmean

from ..ir import Action, Op, Schedule
from ..orders.evaluate import OrderEvaluator, Orders
from ..placement import StagePlacement
from ..timing.costs import Costs, CostTable
from .automatic import best_order, lists, named, pose, read_costs, read_memory, refills, with_weights
from .family import Family
from .warmup import on_cyclic_ranks, one_by_one, put_off_weights


def zb_h1(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with a split backward: the W that rank r has delayed fill the time in which 1F1B would drain.

        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3       P=3, M=4, unit time
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r delays r W, so that it holds as many activations as rank 0: min(M, P), from F to W. With equal stages, free
    links
    and W at most F and I: makespan M (F+I+W) + (P-1)(F+I-W) when M >= P, and (M+P-1)(F+I) + W below, the best possible.
    A latency c of at most W/2 adds 2c(P-1 + min(M-2, P-1)), the 4c(P-1) of the paper when M > P. Below P microbatches W
    begin
    with the drain: by the literal rule of the paper they would all come at the end, 119 s instead of 112 with P=4, M=2,
    F=10, I=11, W=7.
    """
    return zb_handcrafted("zb-h1", num_ranks=num_ranks, num_microbatches=num_microbatches, steps=1)


def zb_handcrafted(name: str, *, num_ranks: int, num_microbatches: int, steps: int) -> Schedule:
    """1F1B where each rank has `steps` more forwards ahead than the next one, and delays as many W as it has fewer than
    the first."""
    most = min(steps * (num_ranks - 1), num_microbatches)
    programs = []
    for rank in range(num_ranks):
        warmup = min(steps * (num_ranks - 1 - rank), num_microbatches)
        program = one_by_one(rank, range(num_microbatches), warmup=warmup)
        programs.append(put_off_weights(program, delay=most - warmup))
    return on_cyclic_ranks(name, programs, num_microbatches=num_microbatches)


ZB_H1 = Family(name="zb-h1", build=zb_h1, splits_backward=True, full_after=1)


def zb_h2(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Forwards fill the warm-up, W the drain: with F = I = W each rank works without a pause from first to last.

        rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .       P=3, M=6, unit time
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    With equal stages, W at most F and I and a latency c of at most W/2, the longest span of a rank is M (F+I+W) +
    (P-1)(F+I-2W+2c) when M >= 2P-1, and (M+P-1)(F+I) + W + 2c(P-1) below. The makespan is at least M (F+I+W) +
    (P-1)(F+c), as with any order. So it is the span that has no bubble, which saves time only where a rank begins the
    next step before the others have ended this one. Each rank holds min(M, 2P-1) activations, from F to W.
    """
    return zb_handcrafted("zb-h2", num_ranks=num_ranks, num_microbatches=num_microbatches, steps=2)


ZB_H2 = Family(name="zb-h2", build=zb_h2, splits_backward=True, full_after=2)


def zb_automatic(
    name: str,
    most: int,
    *,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | None = None,
    costs: Costs | None = None,
    kept: float = 1.0,
    seconds: float = math.inf,
) -> Schedule:
    """ZB-1p and ZB-2p: the least span of some orders for given costs, under a limit of P or 2P activations.

    Forwards fill the time until the first gradient, as many as memory allows; then forwards and backwards alternate, or
    each rank takes what has arrived, backwards first or forwards first. W fill gaps of at least their length, of half
    of it, or any, or short ones of the rank that has idled most; a W also makes room for a forward. Some slopes of the
    warm-up over the ranks are tried, like the paper's flags, and the least span, then the least makespan is taken.
    There is no closed form. With P activations, M >= P and W of at most F and I, it has the span of ZB-H1, the least;
    with 2P typical costs leave no bubble in a rank's span. O(M P^2): some seconds at P=32, M=256.

    Arguments:
        most: memory limit by default, in P activations.
        memory_limit: most stage activations of a rank at once, at least 1.
        costs: of one stage action each; F, I and W of 1 and no latency by default.
        kept: part of an activation that stays from the end of its I until the end of its W. Then more W may wait, but
            only if the runtime frees the rest at I; `check` and `simulate` count an activation whole until its W.
        seconds: after which the best so far is taken (of CPU time).

    Raises ValueError for a limit below 1 and costs that are not above 0.
    """
    limit = read_memory(memory_limit, kept, default=most * num_ranks, least=1)
    table = read_costs(costs, num_stages=num_ranks)
    evaluator = pose(StagePlacement.cyclic(num_ranks=num_ranks), num_microbatches, table, memory_limit=limit, kept=kept)
    made = (build(num_ranks=num_ranks, num_microbatches=num_microbatches) for build in (zb_h1, zb_h2))
    candidates = chain(_candidates(evaluator, table, limit), named(evaluator, made))
    return best_order(name, evaluator, candidates, seconds=seconds)


def _candidates(evaluator: OrderEvaluator, table: CostTable, limit: float) -> Iterator[Orders]:
    """Warm-ups that fall by so many forwards from rank to rank: from 1F1B's to those that fill the round trip of a
    microbatch."""
    before = evaluator.num_stages - 1  # ranks before the last
    forward, input_grad = (fmean(map(fmean, table.rows[op])) for op in (Op.F, Op.I))
    full = 1 + (input_grad + 2 * fmean(table.latency)) / forward
    slopes = [*(1 + (full - 1) * step / 4 for step in range(5)), (limit - 1) / max(1, before)]
    room = int(limit + 1e-9)
    warmups = dict.fromkeys(
        tuple(max(1, min(room, int(1 + slope * (before - rank) + 1e-9))) for rank in range(before + 1))
        for slope in slopes
    )
    whole = range(evaluator.num_microbatches)
    for warmup in warmups:
        programs = [one_by_one(rank, whole, warmup=first - 1, op=Op.I) for rank, first in enumerate(warmup)]
        yield from refills(evaluator, programs)
        yield from lists(evaluator, warmup)
    # The same, with at least one fewer than in the rank before.
    falling = (tuple(max(1, min(first, own[0] - rank)) for rank, first in enumerate(own)) for own in warmups)
    for warmup in dict.fromkeys(falling):
        yield from with_weights(evaluator, _in_rounds(warmup, evaluator.num_microbatches))


def _in_rounds(warmup: tuple[int, ...], num_microbatches: int) -> list[Action]:
    """F of the warm-up, then rounds of an I of each rank from the last and an F of each from the first."""
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
    Family(name=name, build=partial(zb_automatic, name, most), aliases=(name.replace("-", ""),), splits_backward=True)
    for name, most in (("zb-1p", 1), ("zb-2p", 2))
)

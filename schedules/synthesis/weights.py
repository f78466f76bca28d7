"""W put anew into an order whose F and I stay as they are: into gaps, and where memory or the backlog asks for them.

F0 F1 I0 .  I1 .  I2          F0 F1 I0 W0 I1 W1 I2 W2        a W goes in front of an F or I that would wait for most
                                                             of its seconds, or that has no memory; the others last
"""

from __future__ import annotations

from collections.abc import Sequence

from .evaluate import Evaluator, Orders

_NOT_YET = -1.0


def refill(
    evaluator: Evaluator,
    orders: Orders,
    *,
    fill: Sequence[float],
    backlog: Sequence[int],
) -> Orders | None:
    """The order with its W placed anew; None where memory does not suffice so.

    Arguments:
        orders: without B.
        fill: by rank, a W goes into a gap of at least this part of its seconds.
        backlog: by rank, W that may be put off.
    """
    problem = evaluator.problem
    SM = problem.num_stages * problem.num_microbatches
    seconds, delay, slot, need = evaluator.seconds, evaluator.delay, evaluator.slot, evaluator.need
    change, limits = evaluator.change, evaluator.limits
    fixed = [[code for code in order if code < 2 * SM] for order in orders]
    waiting: list[list[int]] = [[] for _ in orders]
    arrived = [_NOT_YET] * evaluator.num_slots
    blocked = [-1] * evaluator.num_slots
    at, done = [0] * len(orders), [0] * len(orders)
    free, memory = [0.0] * len(orders), [0.0] * len(orders)
    new: Orders = [[] for _ in orders]
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        now, own, begun = free[rank], waiting[rank], done[rank]
        for code in fixed[rank][at[rank] :]:
            waits = need[code]
            arrival = 0.0 if waits < 0 else arrived[waits]
            if arrival < 0.0:
                blocked[waits] = rank
                break
            while begun < len(own):
                weight = own[begun]
                is_short = code < SM and memory[rank] + change[code] > limits[rank]
                if not is_short and len(own) - begun <= backlog[rank] and arrival - now < fill[rank] * seconds[weight]:
                    break
                now += seconds[weight]
                memory[rank] += change[weight]
                new[rank].append(weight)
                begun += 1
            now = (arrival if arrival > now else now) + seconds[code]
            memory[rank] += change[code]
            if code >= SM:
                own.append(code + SM)
            elif memory[rank] > limits[rank]:
                return None
            new[rank].append(code)
            at[rank] += 1
            arrived[slot[code]] = now + delay[code]
            if blocked[slot[code]] >= 0:
                ready.append(blocked[slot[code]])
        free[rank], done[rank] = now, begun
    return [[*order, *own[begun:]] for order, own, begun in zip(new, waiting, done, strict=True)]

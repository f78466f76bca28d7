"""Orders made for costs and a memory limit: of some candidates the one with the least span. Stages have one owner each.

Candidates are orders of F and I whose W are placed by `orders.listing.refill`, the same with forwards moved into idle
time (`reordered`), list schedules of some policies, and orders with W by the rules of ZB's authors (`with_weights`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from numbers import Real
from operator import mul

from ..ir import Action, Op, Schedule
from ..orders.evaluate import OrderEvaluator, Orders
from ..orders.listing import Lister, Policy, advance, refill
from ..orders.problem import Problem
from ..placement import StagePlacement
from ..timing.costs import COST_OF_OP, UNIT_COSTS, Costs, CostTable
from ..wording import count

_FILLS = (1.0, 0.5, 0.0)  # a W goes into a gap of at least this part of its seconds


def read_costs(costs: Costs | None, *, num_stages: int) -> CostTable:
    """Costs by stage, 1 by default. Raises ValueError for anything but Costs, and for actions that take no time."""
    if not isinstance(costs, Costs | None):
        raise ValueError(
            f"costs={costs!r:.60}: expected Costs(forward=..., input_grad=..., weight_grad=..., latency=...)"
        )
    table = (costs or UNIT_COSTS).table(num_stages=num_stages)
    for name, op in (("forward", Op.F), ("input_grad", Op.I), ("weight_grad", Op.W)):
        if min(table.column(op)) <= 0:
            raise ValueError(
                f"costs with {name}={min(table.column(op)):g}: expected more than 0 seconds for each stage"
            )
    return table


def read_memory(limit: float | None, kept: float, *, default: int, least: int) -> float:
    """The memory limit of a rank; ValueError if no order meets it, or for a `kept` outside of 0 to 1."""
    for name, number in (("memory_limit", default if limit is None else limit), ("kept", kept)):
        if not isinstance(number, Real) or isinstance(number, bool):
            raise ValueError(f"{name}={number!r}: expected a number")
    if not 0 <= kept <= 1:
        raise ValueError(f"kept={kept!r}: expected the part of an activation that stays from I to W, from 0 to 1")
    if limit is None:
        return default
    if not limit >= least:
        raise ValueError(
            f"memory_limit={limit!r}: no order can meet it, since one microbatch alone is "
            f"{count(least, 'stage activation')} on a rank; expected at least {least}"
        )
    return limit


def pose(
    placement: StagePlacement, num_microbatches: int, table: CostTable, *, memory_limit: float, kept: float = 1.0
) -> OrderEvaluator:
    """The problem of these costs, with a limit in stage activations.

    Its unit of time is the ninth digit of the longest action. Times are then exact sums of whole numbers: equal ones
    are equal in seconds as in milliseconds, and no choice between orders depends on rounding.
    """
    M, rank_of = num_microbatches, placement.rank_of
    S = len(rank_of)
    crosses = [here != there for here, there in pairwise(rank_of)]
    longest = max(*table.latency, *(max(map(max, table.rows[op])) for op in COST_OF_OP))
    unit = 10.0 ** max(-300, math.floor(math.log10(longest)) - 8)
    rows = {op: [[float(round(n / unit)) for n in row] for row in table.rows[op]] for op in COST_OF_OP}
    latency = [float(round(n / unit)) for n in table.latency]
    problem = Problem(
        placement=placement,
        num_microbatches=M,
        seconds={op: tuple(tuple((row * M)[:M]) for row in rows[op]) for op in COST_OF_OP},
        forward_delay=tuple(map(mul, latency, (*crosses, False))),
        gradient_delay=tuple(map(mul, latency, (False, *crosses))),
        held=((1.0,) * M,) * S,
        kept=((float(kept),) * M,) * S,
        memory_limit=(memory_limit,) * len(placement),
        objective="span",
    )
    return OrderEvaluator(problem)


def best_order(
    name: str, evaluator: OrderEvaluator, candidates: Iterable[Orders], *, seconds: float = math.inf
) -> Schedule:
    """The schedule with the least span, then the least makespan, then the first; of the candidates made in so many
    seconds (CPU time), at least one."""
    until = time.thread_time() + seconds
    best, least = Orders(), (math.inf, math.inf)
    work = max(evaluator.problem.work)
    for orders in candidates:
        times = evaluator.play(orders)
        if times is not None:
            value = evaluator.value_of(times), max(own[-1] for own in times[1])
            if value < least:
                best, least = orders, value
        if least[0] <= work * (1 + 1e-12) or (best and time.thread_time() >= until):
            break
    assert best, "the first candidate holds one microbatch at a time, at least"
    return evaluator.schedule(best, name=name)


def named(evaluator: OrderEvaluator, schedules: Iterable[Schedule]) -> Iterator[Orders]:
    """Schedules within the limit, unchanged."""
    return filter(evaluator.fits, map(evaluator.orders, schedules))


def refills(evaluator: OrderEvaluator, programs: Iterable[Iterable[Action]]) -> Iterator[Orders]:
    """F and I in this order, with W as in `_FILLS`; only orders that fit the memory."""
    orders = evaluator.codes(programs)
    P, most = len(orders), evaluator.num_stages * evaluator.num_microbatches
    for fill in _FILLS:
        found = refill(evaluator, orders, fill=(fill,) * P, backlog=(most,) * P)
        if found is not None:
            yield found


def reordered(evaluator: OrderEvaluator, programs: Iterable[Iterable[Action]]) -> Iterator[Orders]:
    """F and I in this order, except for forwards that fill idle time, with W as in `_FILLS`: `advance` and `refill` in
    turn, as long as the span falls. Only orders that fit the memory."""
    weights = 2 * evaluator.num_stages * evaluator.num_microbatches
    start = advance(evaluator, [[c for c in order if c < weights] for order in evaluator.codes(programs)])
    P = len(start)
    for fill in _FILLS:
        found, least = refill(evaluator, start, fill=(fill,) * P, backlog=(weights,) * P), math.inf
        while found is not None and (value := evaluator.value(found)) < least:
            yield found
            least = value
            found = refill(evaluator, advance(evaluator, found), fill=(fill,) * P, backlog=(weights,) * P)


def lists(evaluator: OrderEvaluator, ahead: Sequence[int]) -> Iterator[Orders]:
    """List schedules: backwards first or forwards first, with a limited number of forwards ahead per stage; with
    several stages per rank also in the order of due times."""
    P, most = evaluator.problem.num_ranks, evaluator.num_stages * evaluator.num_microbatches
    lister = Lister(evaluator)
    plain = Policy(ahead=tuple(ahead), backlog=(most,) * P, fill=(1.0,) * P)
    rules = [plain, replace(plain, forward_first=True)]
    rules += [replace(plain, due=0.0)] if evaluator.num_stages > P else []
    for fill, policy in product(_FILLS, rules):
        yield lister.build(replace(policy, fill=(fill,) * P))


def with_weights(evaluator: OrderEvaluator, order: Iterable[Action]) -> Iterator[Orders]:
    """Orders by the rules for W of ZB's authors, from F and I of all ranks in the order of their placing.

    A W fills each gap that is long enough, makes room in memory, and fills a short gap if its rank would otherwise have
    idled as long as any so far: before the I of a rank's first stage always, before its other I and before F once with
    and once without. Each variant is repeated with the idle time that it led to, as long as that helps: a rank may then
    idle until it is as far below the most as at the end. Variants that do not fit the memory are left out.
    """
    (placed,), placement = evaluator.codes([order]), evaluator.problem.placement
    M, SM = evaluator.num_microbatches, evaluator.num_stages * evaluator.num_microbatches
    first_stages = {min(own) for own in placement}
    for before_i, before_f in product((True, False) if len(placement[0]) > 1 else (True,), (True, False)):
        short = [
            before_f if code < SM else before_i or code // M % evaluator.num_stages in first_stages
            for code in range(2 * SM)
        ]
        allowed, least = [0.0] * len(placement), math.inf
        while (found := _place_weights(evaluator, placed, short, allowed)) is not None:
            orders, idle = found
            if max(idle) >= least:
                break
            yield orders
            least = max(idle)
            allowed = [least - own for own in idle]


def _place_weights(
    evaluator: OrderEvaluator, placed: Sequence[int], short: Sequence[bool], allowed: Sequence[float]
) -> tuple[Orders, list[float]] | None:
    """Programs and seconds of idle time by rank; None if they do not fit the memory. `short`: by code of F and I,
    whether a W may fill a short gap before it. `allowed`: [P] seconds that a rank may idle before short gaps are
    filled, even if no other rank has idled as long."""
    seconds, change, limits = evaluator.seconds, evaluator.change, evaluator.limits
    P, SM = len(limits), evaluator.num_stages * evaluator.num_microbatches
    orders: Orders = [[] for _ in range(P)]
    owed: list[list[int]] = [[] for _ in range(P)]
    free, idle, held = [0.0] * P, [0.0] * P, [0.0] * P
    arrived = [0.0] * evaluator.num_slots

    def run(rank: int, code: int, start: float) -> None:
        if orders[rank]:
            idle[rank] += start - free[rank]
        orders[rank].append(code)
        free[rank] = start + seconds[code]
        held[rank] += change[code]

    def weight(rank: int) -> None:
        run(rank, owed[rank].pop(0), free[rank])

    for code in placed:
        rank = evaluator.rank[code]
        while held[rank] + change[code] > limits[rank]:
            if not owed[rank]:
                return None
            weight(rank)
        arrival = arrived[evaluator.need[code]] if evaluator.need[code] >= 0 else 0.0
        while owed[rank] and arrival >= free[rank] + seconds[owed[rank][0]]:
            weight(rank)
        gap = arrival - free[rank]
        if owed[rank] and short[code] and gap > 0 and idle[rank] + gap >= max(*idle, allowed[rank]):
            weight(rank)
        run(rank, code, max(free[rank], arrival))
        arrived[evaluator.slot[code]] = free[rank] + evaluator.delay[code]
        if code >= SM:
            owed[rank].append(code + SM)
    for rank, left in enumerate(owed):
        while left:
            weight(rank)
    return orders, idle

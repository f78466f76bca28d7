"""Problems that are searched in place of the one that was asked, whose orders then fit the memory by other means.

**Moves.** A stage whose activations wait on the host takes next to nothing, so the search is asked for the order of a
problem in which the first stages of the chain take none: their activations live longest. Or it is given some times the
memory.

**Recomputation.** Stages keep their inputs alone and run their forward again in front of their backward: I takes F
more; between F and I the inputs are held, from I on all of it as ever. The first stages of the chain are chosen. A
search sees a problem of small activations and a limit that leaves room for one whole backward; where a rank puts off
more W of such stages than there is room for, they run whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add

from ..ir import Op
from ..timing.costs import COST_OF_OP, Costs, Row, together
from .evaluate import OrderEvaluator, Orders
from .problem import Problem, Table

_PARTS = (0.5, 0.25, 0.75, 1.0)  # of the stages, those that leave or recompute
_TIMES = (2.0, 1.4, math.inf)  # as much memory
_MOVING = 2.0  # activations of a stage that are under way, out and back


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A problem in place of another.

    Arguments:
        problem: as a search sees it.
        costs: of its stages [s].
        offloads: whether activations then leave, so that an order fits.
        num_recomputed: stages that recompute, the first ones of the chain.
        waiting: [S][M] what is held between a forward and its backward; None: as much as ever.
    """

    problem: Problem
    costs: Costs
    offloads: bool = False
    num_recomputed: int = 0
    waiting: Table | None = None


def with_more_room(problem: Problem, costs: Costs) -> Iterator[Variant]:
    """Problems whose orders moves make fit, those that most often lead to something first."""
    assert problem.memory_limit is not None
    S, M = problem.num_stages, problem.num_microbatches
    largest = [max(row) for row in problem.held]
    for away in dict.fromkeys(round(part * S) for part in _PARTS):
        if away == 0:
            continue
        limits = []
        for limit, own in zip(problem.memory_limit, problem.placement, strict=True):
            least = max(math.fsum(problem.held[s][k] for s in own if s >= away) for k in range(M))
            moving = _MOVING * max((largest[s] for s in own if s < away), default=0.0)
            limits.append(max(limit - moving, least))
        gone = ((0.0,) * M,) * away
        held, kept = (*gone, *problem.held[away:]), (*gone, *problem.kept[away:])
        seen = replace(problem, held=held, kept=kept, memory_limit=tuple(limits))
        yield Variant(problem=seen, costs=costs, offloads=True)
    for times in _TIMES:
        pairs = zip(problem.memory_limit, problem.smallest_memory, strict=True)
        limits = [max(times * limit, least) for limit, least in pairs]
        seen = replace(problem, memory_limit=None if times == math.inf else tuple(limits))
        yield Variant(problem=seen, costs=costs, offloads=True)


def recomputing(problem: Problem, costs: Costs, shares: Sequence[float]) -> Iterator[Variant]:
    """Problems in which some stages recompute, as far as their orders can fit.

    Arguments:
        shares: [S] part of an activation that is the stage's inputs.
    """
    assert problem.memory_limit is not None
    S, M = problem.num_stages, problem.num_microbatches
    for number in dict.fromkeys(max(1, round(part * S)) for part in _PARTS):
        waiting = tuple(tuple(h * shares[s] for h in row) if s < number else row for s, row in enumerate(problem.held))
        limits = []
        for limit, own in zip(problem.memory_limit, problem.placement, strict=True):
            again = [h - w for s in own for h, w in zip(problem.held[s], waiting[s], strict=True)]
            limits.append(limit - max(again))
        own_costs = _costs(costs, number, S)
        table = own_costs.table(num_stages=S)
        seen = replace(
            problem,
            input_grad=tuple(row * (M // len(row)) for row in table.rows[Op.I]),
            backward=tuple(row * (M // len(row)) for row in table.rows[Op.B]),
            held=waiting,
            kept=tuple(tuple(map(min, *rows)) for rows in zip(problem.kept, waiting, strict=True)),
            memory_limit=tuple(limits),
        )
        if seen.fits(seen.smallest_memory):
            yield Variant(problem=seen, costs=own_costs, num_recomputed=number, waiting=waiting)


def whole(evaluator: OrderEvaluator, orders: Orders, number: int) -> Orders:
    """The order in which the first stages run their backwards whole, where their I stands."""
    size = evaluator.num_stages * evaluator.num_microbatches
    last = number * evaluator.num_microbatches

    def run(code: int) -> list[int]:
        op, at = divmod(code, size)
        if at >= last or op in (0, 3):
            return [code]
        return [code + 2 * size] if op == 1 else []

    return [[new for code in order for new in run(code)] for order in orders]


def _costs(costs: Costs, number: int, num_stages: int) -> Costs:
    """Costs with a forward in the I and B of the first stages."""
    table = replace(costs.free_of_overhead, tied=()).table(num_stages=num_stages)

    def cost(op: Op, s: int) -> float | Row:
        new = table.row(op, s)
        if s < number and op in (Op.I, Op.B):
            new = together(new, table.row(Op.F, s), add)
        return new if len(new) > 1 else new[0]

    new = {name: [cost(op, s) for s in range(num_stages)] for op, name in COST_OF_OP.items()}
    return replace(costs, **new, index_factors=None)

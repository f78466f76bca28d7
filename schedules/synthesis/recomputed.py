"""Stages that keep their inputs alone and run their forward again in front of their backward: time paid for memory.

    I takes F more; between F and I the inputs are held, from I on all of it as ever

The first stages of the chain are chosen, whose activations live longest. A search sees a problem of small activations
and a limit that leaves room for one whole backward; where a rank puts off more W of such stages than there is room for,
they run whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..ir import Op
from ..timing.costs import Costs, Row
from .evaluate import Evaluator, Orders
from .problem import Problem, Table, fits

_PARTS = (0.5, 0.25, 0.75, 1.0)  # of the stages, those that recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedProblem:
    """A problem whose first stages recompute.

    Arguments:
        number: of these stages.
        problem: as a search sees it.
        costs: of its stages [s].
        waiting: [S][M] what is held between a forward and its backward.
    """

    number: int
    problem: Problem
    costs: Costs
    waiting: Table


def recomputed(problem: Problem, costs: Costs, shares: Sequence[float]) -> Iterator[RecomputedProblem]:
    """Problems in which some stages recompute, as far as their orders can fit.

    Arguments:
        shares: [S] part of an activation that is the stage's inputs.
    """
    assert problem.memory_limit is not None
    S = problem.num_stages
    for number in dict.fromkeys(max(1, round(part * S)) for part in _PARTS):
        waiting = tuple(tuple(h * shares[s] for h in row) if s < number else row for s, row in enumerate(problem.held))
        limits = []
        for limit, own in zip(problem.memory_limit, problem.placement, strict=True):
            again = [h - w for s in own for h, w in zip(problem.held[s], waiting[s], strict=True)]
            limits.append(limit - max(again))

        own_costs = _costs(costs, number, S)
        table = own_costs.table(num_stages=S)
        M = problem.num_microbatches
        seen = replace(
            problem,
            input_grad=tuple(row * (M // len(row)) for row in table.rows[Op.I]),
            backward=tuple(row * (M // len(row)) for row in table.rows[Op.B]),
            held=waiting,
            kept=tuple(tuple(map(min, *rows)) for rows in zip(problem.kept, waiting, strict=True)),
            memory_limit=tuple(limits),
        )
        if all(fits(least, limit) for least, limit in zip(seen.smallest_memory, limits, strict=True)):
            yield RecomputedProblem(number=number, problem=seen, costs=own_costs, waiting=waiting)


def whole(evaluator: Evaluator, orders: Orders, number: int) -> Orders:
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

    def rows(op: Op) -> list[float | Row]:
        found: list[float | Row] = []
        for s in range(num_stages):
            row, forward = table.row(op, s), table.row(Op.F, s)
            length = max(len(row), len(forward))
            again = s < number and op in (Op.I, Op.B)
            new = tuple(row[k % len(row)] + again * forward[k % len(forward)] for k in range(length))
            found.append(new if length > 1 else new[0])
        return found

    return replace(
        costs,
        forward=rows(Op.F),
        input_grad=rows(Op.I),
        weight_grad=rows(Op.W),
        backward=rows(Op.B),
        index_factors=None,
    )

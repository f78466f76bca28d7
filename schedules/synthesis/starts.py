"""Where a search begins: the named families that fit the problem."""

from __future__ import annotations

from collections.abc import Iterator

from ..families import Family
from ..ir import chain
from ..registry import FAMILIES
from ..timing.costs import Costs
from .evaluate import OrderEvaluator, Orders


def named_orders(evaluator: OrderEvaluator) -> Iterator[tuple[str, Orders]]:
    """Orders of the families that stand on this placement and fit the memory, and the same with each B as I and W."""
    for family in FAMILIES.values():
        yield from _fitting(evaluator, family, {})
        if "group_size" in family.options and evaluator.problem.num_ranks % 2 == 0:  # its half-memory form
            yield from _fitting(evaluator, family, {"group_size": evaluator.problem.num_ranks // 2})


def made_orders(evaluator: OrderEvaluator, costs: Costs) -> Iterator[tuple[str, Orders]]:
    """The same of families that are made for costs and a memory limit, which takes longer."""
    problem = evaluator.problem
    for family in FAMILIES.values():
        if "costs" not in family.options:
            continue
        yield from _fitting(evaluator, family, {"costs": costs})
        held = {n for row in problem.held for n in row}
        if "memory_limit" in family.options and problem.memory_limit is not None and len(held) == 1 and min(held) > 0:
            kept = min(n for row in problem.kept for n in row) / min(held)
            limit = min(problem.memory_limit) / min(held)
            yield from _fitting(evaluator, family, {"costs": costs, "memory_limit": limit, "kept": kept})


def _fitting(evaluator: OrderEvaluator, family: Family, options: dict[str, object]) -> Iterator[tuple[str, Orders]]:
    problem = evaluator.problem
    if family.rule.is_asynchronous or family.weight_copies > 1 or "num_slices" in family.options:
        return
    sizes: dict[str, object] = {"num_ranks": problem.num_ranks, "num_microbatches": problem.num_microbatches}
    if family.takes_chunks:
        sizes["num_chunks"] = problem.num_stages // problem.num_ranks
    elif problem.num_stages != problem.num_ranks * family.num_chunks:
        return
    try:
        schedule = family.build(**sizes, **options)
        orders = evaluator.orders(schedule)
    except ValueError:  # a family that has no schedule of these sizes, or not on this placement
        return
    if schedule.edges == chain(problem.num_stages) and evaluator.fits(orders):
        yield family.name, orders
        if (parts := split(evaluator, orders)) != orders:
            yield family.name, parts


def split(evaluator: OrderEvaluator, orders: Orders) -> Orders:
    """The same order with I and W in the place of each B."""
    first = 3 * evaluator.num_stages * evaluator.num_microbatches
    size = first // 3
    return [
        [part for code in order for part in ((code - 2 * size, code - size) if code >= first else (code,))]
        for order in orders
    ]


def fuse(evaluator: OrderEvaluator, orders: Orders) -> Orders:
    """The same order with a B in the place of each I that has its W right behind."""
    size = evaluator.num_stages * evaluator.num_microbatches
    fused = []
    for order in orders:
        new: list[int] = []
        for code in order:
            if new and size <= new[-1] < 2 * size and code == new[-1] + size:
                new[-1] += 2 * size
            else:
                new.append(code)
        fused.append(new)
    return fused

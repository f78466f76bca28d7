"""Schedules made for costs and a memory limit: the best of several greedy orders."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

from ..ir import Op, Schedule
from ..timing.costs import UNIT_COSTS, Costs, CostTable
from ..wording import count
from .greedy import Listed, Rules, StuckError, list_order
from .placements import Placement


def read_costs(costs: Costs | None, *, num_stages: int) -> CostTable:
    """Costs by stage; all 1 where there are none. ValueError for what is no Costs, and for actions without time."""
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
    """The memory limit of a rank; ValueError where no order meets it, or `kept` is no part of an activation."""
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


def best_order(
    name: str, placement: Placement, num_microbatches: int, table: CostTable, candidates: Iterable[Rules | Listed]
) -> Schedule:
    """The schedule with the least span, of these the least makespan, of these the first."""
    best: Listed | None = None
    passes = [(op, k) for op in (Op.F, Op.I, Op.W) for k in range(num_microbatches)]
    work = max(sum(table.of(op, s, k) for s in own for op, k in passes) for own in placement)
    for each in candidates:
        try:
            found = list_order(placement, num_microbatches, table, each) if isinstance(each, Rules) else each
        except StuckError:
            continue
        if best is None or (found.span, found.makespan) < (best.span, best.makespan):
            best = found
        if best.span <= work * (1 + 1e-12):
            break  # no bubble
    assert best is not None, "the first candidate holds one microbatch at a time, at least"
    return Schedule(name=name, placement=placement, programs=best.programs, num_microbatches=num_microbatches)

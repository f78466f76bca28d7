"""The exact optimum by ortools' CP-SAT: an oracle that shares nothing with the package's solvers but the problem."""

from typing import Any, NamedTuple

import pytest
from support.inside import SPLIT_OPS, Problem

from stagewright.schedules import Action, Op


class Found(NamedTuple):
    """Value and bound of the objective, equal where it is proven; the order of each rank."""

    value: float
    bound: float
    proven: bool
    orders: list[list[Action]]


def solve(problem: Problem, *, seconds: float = 10.0) -> Found | None:
    """The optimum of a problem whose costs are whole numbers; None where nothing was found in time.

    Memory is a resource held from the start of a forward to the end of its input gradient and (what is kept) to that
    of its weight gradient. Each rank's first action starts as soon as it can, as in `simulate`; others may start later.
    """
    cp_model: Any = pytest.importorskip("ortools.sat.python.cp_model", reason="ortools is an oracle of tests alone")
    S, M = problem.num_stages, problem.num_microbatches
    actions = [Action(s, op, k) for op in SPLIT_OPS for s in range(S) for k in range(M)]
    length = {a: _whole(problem.seconds[a.op][a.stage][a.index]) for a in actions}
    delays = [[_whole(d) for d in each] for each in (problem.forward_delay, problem.gradient_delay)]
    update = [_whole(seconds) for seconds in problem.update]
    assert problem.norm is None
    horizon = sum(length.values()) + M * sum(map(sum, delays)) + sum(update)
    model: Any = cp_model.CpModel()
    start = {a: model.new_int_var(0, horizon, str(a)) for a in actions}
    end = {a: start[a] + length[a] for a in actions}
    interval = {a: model.new_interval_var(start[a], length[a], end[a], f"i{a}") for a in actions}
    for s in range(S):
        for k in range(M):
            F, I, W = (Action(s, op, k) for op in SPLIT_OPS)
            model.add(start[I] >= end[F])
            model.add(start[W] >= end[I])
            if s < S - 1:
                model.add(start[Action(s + 1, Op.F, k)] >= end[F] + delays[0][s])
                model.add(start[I] >= end[Action(s + 1, Op.I, k)] + delays[1][s + 1])
            alike = [j for j in range(k) if _like(problem, j) == _like(problem, k)]
            if alike:  # in order: none is better than the other
                for op in SPLIT_OPS:
                    model.add(start[Action(s, op, k)] >= end[Action(s, op, alike[-1])])
    lengths = []
    for rank, stages in enumerate(problem.placement):
        own = [a for a in actions if a.stage in stages]
        model.add_no_overlap([interval[a] for a in own])
        if problem.memory_limit is not None:
            _limit_memory(model, problem, rank, start, end)
        last = model.new_int_var(0, horizon, f"last{rank}")
        for a in own:
            model.add(last >= end[a])
        last += sum(update[s] for s in stages)
        if problem.objective == "span":
            opening = [a for a in own if a.op is Op.F and a.stage == min(stages)]
            last -= _first_start(model, opening, start, end, delays[0])
        lengths.append(last)
    most = model.new_int_var(0, horizon, "most")
    for each in lengths:
        model.add(most >= each)
    model.minimize(most)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    solver.parameters.catch_sigint_signal = False  # it would leave a process that ends at the next one, without a word
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    orders = [
        sorted((a for a in actions if a.stage in stages), key=lambda a: solver.value(start[a]))
        for stages in problem.placement
    ]
    return Found(solver.objective_value, solver.best_objective_bound, status == cp_model.OPTIMAL, orders)


def _first_start(
    model: Any, opening: list[Action], start: dict[Action, Any], end: dict[Action, Any], delay: list[int]
) -> Any:
    """First start of a rank: that of one of the actions it may begin with, which starts when its input is there."""
    first = model.new_int_var(0, 10**9, "")
    chosen = [model.new_bool_var("") for _ in opening]
    model.add_exactly_one(chosen)
    for a, is_first in zip(opening, chosen, strict=True):
        model.add(first <= start[a])
        arrival = 0 if a.stage == 0 else end[Action(a.stage - 1, Op.F, a.index)] + delay[a.stage - 1]
        model.add(first == arrival).only_enforce_if(is_first)
        model.add(start[a] == arrival).only_enforce_if(is_first)
    return first


def _limit_memory(model: Any, problem: Problem, rank: int, start: dict[Action, Any], end: dict[Action, Any]) -> None:
    intervals, demands = [], []
    for s in problem.placement[rank]:
        for k in range(problem.num_microbatches):
            held, kept = _whole(problem.held[s][k]), _whole(problem.kept[s][k])
            for until, amount in ((Op.I, held - kept), (Op.W, kept)):
                if amount:
                    begin, stop = start[Action(s, Op.F, k)], end[Action(s, until, k)]
                    size = model.new_int_var(0, 10**9, "")
                    intervals.append(model.new_interval_var(begin, size, stop, ""))
                    demands.append(amount)
    model.add_cumulative(intervals, demands, int(problem.memory_limit[rank]))


def _like(problem: Problem, k: int) -> tuple[float, ...]:
    """All that an order knows of a microbatch."""
    tables = (*(problem.seconds[op] for op in SPLIT_OPS), problem.held, problem.kept)
    return tuple(row[k] for table in tables for row in table)


def _whole(number: float) -> int:
    if number != int(number):
        raise ValueError(f"{number!r}: expected whole numbers")
    return int(number)

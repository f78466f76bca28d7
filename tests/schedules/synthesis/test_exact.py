"""The mixed integer program: equal to CP-SAT's optima, to all orders of tiny problems, and honest about its time."""

from __future__ import annotations

from itertools import product

import pytest
from support.inside import Orders, Problem, fits
from support.inside import SynthesisEvaluateEvaluator as Evaluator
from support.posed import pose

from stagewright.schedules import Costs, Op, check, simulate

from . import cp_sat
from .exact import solve_exactly
from .instances import random_problem
from .make_optima import read


def quick_ones(count: int) -> list[int]:
    """Numbers of instances that HiGHS closes at once."""
    problems = ((number, random_problem(number)) for number in range(300))
    sizes = ((n, p.num_stages * p.num_microbatches * (1 if p.same_microbatches else 2)) for n, p in problems)
    small = (number for number, size in sizes if size < 12)
    return [next(small) for _ in range(count)]


@pytest.mark.parametrize("number", quick_ones(30))
def test_it_finds_the_optimum(number: int) -> None:
    problem = random_problem(number)
    found = solve_exactly(problem, seconds=200)
    assert found.proven
    assert found.seconds == pytest.approx(read()[number], rel=1e-9)
    assert_it_holds(problem, found.schedule, found.seconds)


def assert_it_holds(problem: Problem, schedule: object, seconds: float) -> None:
    """The order is complete, fits, and takes what it says."""
    from stagewright.schedules import Schedule

    assert isinstance(schedule, Schedule)
    check(schedule)
    evaluator = Evaluator(problem)
    orders = evaluator.orders(schedule)
    assert evaluator.value(orders) == seconds
    if problem.memory_limit is not None:
        assert all(map(fits, evaluator.peaks(orders), problem.memory_limit))


def all_orders(evaluator: Evaluator) -> list[list[list[int]]]:
    """By rank, all orders in which F, I and W of a (stage, microbatch) follow each other."""
    problem = evaluator.problem

    def continued(chains: list[list[int]]) -> list[list[int]]:
        if not any(chains):
            return [[]]
        found = []
        for at, chain in enumerate(chains):
            if chain:
                rest = [*chains[:at], chain[1:], *chains[at + 1 :]]
                found += [[chain[0], *order] for order in continued(rest)]
        return found

    return [
        continued(
            [
                [evaluator.code(op, s, k) for op in (Op.F, Op.I, Op.W)]
                for s in own
                for k in range(problem.num_microbatches)
            ]
        )
        for own in problem.placement
    ]


def brute_force(problem: Problem) -> float:
    """The least value of all orders that fit."""
    evaluator = Evaluator(problem)
    limits = problem.memory_limit
    best = float("inf")
    fitting = []
    for rank, orders in enumerate(all_orders(evaluator)):
        one: Orders = [[] for _ in problem.placement]
        fitting.append([])
        for order in orders:
            one[rank] = order
            if limits is None or fits(evaluator.peaks(one)[rank], limits[rank]):
                fitting[-1].append(order)
    for orders in product(*fitting):
        best = min(best, evaluator.value(list(orders)))
    return best


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("limit", [None, 1.0, 1.5])
@pytest.mark.parametrize("factors", [[1, 2], [1, 1]])
def test_all_orders_of_two_by_two(objective: str, limit: float | None, factors: list[float]) -> None:
    """Neither in-order nor early starts are taken for granted there; half is kept behind I, and updates follow."""
    costs = Costs(
        forward=[2, 3],
        input_grad=[3, 1],
        weight_grad=[1, 4],
        latency=1,
        update=[4, 1] if limit else 0,
        norm=2 if limit == 1 else None,
        index_factors=factors,
    )
    problem = pose(
        num_ranks=2,
        num_microbatches=2,
        costs=costs,
        memory_limit=limit,
        objective=objective,  # type: ignore[arg-type]
        kept_share=0.5,
    )
    found = solve_exactly(problem, seconds=200)
    assert found.proven
    assert found.seconds == pytest.approx(brute_force(problem), rel=1e-9)


def test_it_says_what_it_has_when_time_is_over() -> None:
    problem = pose(
        num_ranks=4, num_microbatches=12, costs=Costs(forward=[3, 5, 4, 6]), memory_limit=3, placement="plain"
    )
    known = Evaluator(problem)
    first = solve_exactly(problem, seconds=1e-3)
    assert first.schedule is not None
    assert not first.proven
    assert first.lower_bound <= first.seconds == simulate(first.schedule, Costs(forward=[3, 5, 4, 6])).makespan
    again = solve_exactly(problem, seconds=1e-3, known=known.orders(first.schedule))
    assert again.seconds <= first.seconds


def test_bad_input() -> None:
    costs = Costs(forward=1, backward=1, input_grad=1, weight_grad=1)
    with pytest.raises(
        ValueError, match="a backward is quicker than its input_grad and weight_grad: expected their sum"
    ):
        solve_exactly(pose(num_ranks=2, num_microbatches=2, costs=costs))
    with pytest.raises(ValueError, match="seconds=0: expected more than 0"):
        solve_exactly(pose(num_ranks=2, num_microbatches=2, costs=Costs()), seconds=0)


@pytest.mark.parametrize("number", quick_ones(12))
def test_the_committed_optima_are_those_of_the_second_oracle(number: int) -> None:
    found = cp_sat.solve(random_problem(number), seconds=400)
    assert found is not None
    assert found.proven
    assert found.value == read()[number]


@pytest.mark.nightly
def test_all_committed_optima_are_those_of_the_second_oracle() -> None:
    for number, optimum in enumerate(read()):
        found = cp_sat.solve(random_problem(number), seconds=120)
        assert found is not None
        assert (found.proven, found.value) == (True, optimum), number

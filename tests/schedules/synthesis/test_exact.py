"""Oracles of small problems: the committed optima are CP-SAT's, and nothing beats the best of all orders."""

from __future__ import annotations

from itertools import product

import pytest
from support.inside import Problem, fits
from support.inside import SynthesisEvaluateEvaluator as Evaluator
from support.inside import bounds_least_seconds as least_seconds
from support.posed import pose

from stagewright.schedules import Costs, synthesize

from ..test_bounds import orders
from . import cp_sat
from .instances import random_problem
from .make_optima import read


def brute_force(problem: Problem) -> float:
    """The least value of all orders that fit."""
    evaluator = Evaluator(problem)
    limits = problem.memory_limit
    own: list[list[list[int]]] = []
    for rank, stages in enumerate(problem.placement):
        own.append([])
        for order in orders(stages, problem.num_microbatches, "FIW"):
            codes = [evaluator.code(action.op, action.stage, action.index) for action in order]
            alone = [codes if r == rank else [] for r in range(problem.num_ranks)]
            if limits is None or fits(evaluator.peaks(alone)[rank], limits[rank]):
                own[-1].append(codes)
    return min(evaluator.value(list(each)) for each in product(*own))


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("limit", [None, 1.0, 1.5])
@pytest.mark.parametrize("factors", [[1, 2], [1, 1]])
def test_all_orders_of_two_by_two(objective: str, limit: float | None, factors: list[float]) -> None:
    """Half is kept behind I, and updates follow."""
    costs = Costs(
        forward=[2, 3],
        input_grad=[3, 1],
        weight_grad=[1, 4],
        latency=1,
        update=[4, 1] if limit else 0,
        norm=2 if limit == 1 else None,
        index_factors=factors,
    )
    given = {"num_ranks": 2, "num_microbatches": 2, "costs": costs, "memory_limit": limit, "objective": objective}
    best = brute_force(problem := pose(**given, kept_share=0.5))
    assert least_seconds(problem) <= best
    assert synthesize(**given, kept_share=0.5, evaluations=2000).value == best  # type: ignore[arg-type]


@pytest.mark.parametrize("numbers", [range(12), pytest.param(range(300), marks=pytest.mark.nightly)])
def test_the_committed_optima_are_proven(numbers: range) -> None:
    for number in numbers:
        found = cp_sat.solve(random_problem(number), seconds=400)
        assert found is not None
        assert (found.proven, found.value) == (True, read()[number]), number

"""Lower bounds with memory, and oracles of small problems: never above an optimum."""

from itertools import pairwise, product

import pytest
from support.inside import SPLIT_OPS, Problem, fits
from support.inside import SynthesisEvaluateEvaluator as Evaluator
from support.inside import bounds_least_seconds as least_seconds

from stagewright.schedules import Costs, synthesize

from ..test_costs import orders
from . import cp_sat
from .instances import COUNT, pose, published, random_problem, read_optima, request


@pytest.mark.thorough
def test_never_above_the_optimum_of_300_random_instances() -> None:
    """The optima are CP-SAT's; three in four are met."""
    optima = read_optima()
    assert len(optima) == COUNT
    tight = 0
    for number, optimum in enumerate(optima):
        bound = least_seconds(random_problem(number))
        assert bound <= optimum * (1 + 1e-9), number
        tight += bound >= optimum * (1 - 1e-9)
    assert tight >= 225


def bound_of(point: dict[str, str]) -> float:
    problem = pose(**request(point))
    work = problem.num_microbatches * sum(problem.seconds[op][s][0] for op in SPLIT_OPS for s in problem.placement[0])
    return 1 - work / least_seconds(problem)


@pytest.mark.thorough
def test_published_bubbles() -> None:
    """At memory P the published schedules are optimal, to all their digits; at 2P none is below the bound."""
    for point in published("zb-"):
        bound, bubble = bound_of(point), float(point["bubble"])
        assert -1e-12 <= bound <= bubble + 5e-5, point
        assert point["memory"] == "2.0" or bound == pytest.approx(bubble, abs=5e-5), point


@pytest.mark.thorough
@pytest.mark.parametrize(("source", "met"), [("curve plain", 4), ("curve v", 1), ("v of 24", 0), ("v of 32", 0)])
def test_published_bubbles_over_memory(source: str, met: int) -> None:
    """ZB's automatic schedules: the bound falls with memory and stays below them."""
    points = published(source)
    bounds = [bound_of(point) for point in points]
    bubbles = [float(point["bubble"]) for point in points]
    assert all(bound <= bubble + 5e-5 for bound, bubble in zip(bounds, bubbles, strict=True))
    assert all(more >= less - 1e-12 for more, less in pairwise(bounds))
    assert sum(abs(bound - bubble) < 5e-5 for bound, bubble in zip(bounds, bubbles, strict=True)) == met


@pytest.mark.thorough(but=["3-8-4", "16-48-20"])
@pytest.mark.parametrize(("P", "M", "limit"), [(3, 8, 4), (4, 6, 4), (4, 8, 6), (6, 14, 8), (16, 48, 20), (16, 48, 28)])
def test_equal_steps_of_a_v_take_as_long_as_is_proven(P: int, M: int, limit: int) -> None:
    """Qi et al. (2024, controllable memory): a span of 6M + 6P - 3k - 1 with k activations; met where small."""
    costs = Costs(forward=1, input_grad=1, weight_grad=1)
    proven = 6 * M + 6 * P - 1 - 3 * limit
    problem = pose(num_ranks=P, num_microbatches=M, costs=costs, placement="v", memory_limit=limit, objective="span")
    assert least_seconds(problem) == pytest.approx(proven)
    if P < 6:
        found = synthesize(
            num_ranks=P, num_microbatches=M, costs=costs, placement="v", memory_limit=limit, evaluations=100
        )
        assert (found.value, found.is_optimal) == (proven, True)


def test_one_microbatch_at_a_time_is_known_exactly_also_with_whole_backwards() -> None:
    """Room for one activation: round trip behind round trip, but for the last W of all and those that hide."""
    costs = Costs(forward=3, input_grad=4, weight_grad=2, latency=1)
    problem = pose(num_ranks=3, num_microbatches=5, costs=costs, memory_limit=1)
    trip = 3 * (3 + 4) + 4 * 1 + 2
    assert least_seconds(problem) == 5 * trip
    # Then no rank need compute longer than that takes.
    costs = Costs(forward=1, backward=2, input_grad=2, weight_grad=2)
    assert least_seconds(pose(num_ranks=1, num_microbatches=4, costs=costs)) == 4 * 3


def brute_force(problem: Problem) -> float:
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


@pytest.mark.thorough(but=["factors0-None-span", "factors0-1.5-span"])
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


@pytest.mark.thorough
@pytest.mark.parametrize("numbers", [range(12), pytest.param(range(300), marks=pytest.mark.nightly)])
def test_the_committed_optima_are_proven(numbers: range) -> None:
    for number in numbers:
        found = cp_sat.solve(random_problem(number), seconds=400)
        assert (found.proven, found.value) == (True, read_optima()[number]), number

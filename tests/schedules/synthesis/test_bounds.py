"""Lower bounds with memory: never above an optimum, and at what the literature reaches or proves."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from support.inside import Objective
from support.inside import bounds_least_seconds as least_seconds
from support.posed import pose

from stagewright.schedules import Costs, MemoryLimitError, build, simulate, synthesize

from .instances import COUNT, random_problem
from .make_optima import read


def test_never_above_the_optimum_of_300_random_instances() -> None:
    """The optima are CP-SAT's; three in four are met."""
    optima = read()
    assert len(optima) == COUNT
    tight = 0
    for number, optimum in enumerate(optima):
        bound = least_seconds(random_problem(number))
        assert bound <= optimum * (1 + 1e-9), number
        tight += bound >= optimum * (1 - 1e-9)
    assert tight >= 225


def kept_share(hidden: int, heads: int) -> float:
    """Share of a transformer layer's activations that is kept behind I, at length 1024 (Qi et al., 2024)."""
    return 32 * hidden / (34 * hidden + 5 * heads * 1024)


# P, M, seconds [ms] of F, I, W and a message, the kept share, published span bubbles of ZB-1p and ZB-2p.
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, kept_share(2304, 24), 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, kept_share(2304, 24), 0.1242, 0.0039),
    (8, 24, 29.718, 29.444, 19.927, 0.527, kept_share(4096, 32), 0.1323, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577, kept_share(4096, 32), 0.1045, 0.0022),
    (16, 48, 11.347, 11.248, 8.132, 0.377, kept_share(5120, 40), 0.1397, 0.0066),
]


@pytest.mark.parametrize("row", PUBLISHED)
def test_published_bubbles(row: tuple[float, ...]) -> None:
    """At memory P the published schedules are optimal, to all their digits; at 2P none is below the bound."""
    P, M = map(int, row[:2])
    F, I, W, latency, share, one, two = row[2:]
    costs = Costs(forward=F, input_grad=I, weight_grad=W, latency=latency)
    bubbles = []
    for limit in (P, 2 * P):
        problem = pose(
            num_ranks=P, num_microbatches=M, costs=costs, memory_limit=limit, objective="span", kept_share=share
        )
        bubbles.append(1 - M * (F + I + W) / least_seconds(problem))
    assert bubbles[0] == pytest.approx(one, abs=5e-5)
    assert -1e-12 <= bubbles[1] <= two + 5e-5


# Memory limit (in microbatches of a whole rank, over P), bubbles of one chunk and of the V placement.
CURVE = [
    (1.000, 0.1536, 0.0697), (1.250, 0.0998, 0.0306), (1.500, 0.0632, 0.0065), (1.750, 0.0350, 0.0035),
    (2.000, 0.0077, 0.0035),
]  # fmt: skip


def test_published_bubbles_over_memory() -> None:
    """ZB's automatic schedules, one chunk and V, P = 16, M = 48: the bound falls with memory and stays below them."""
    P, M = 16, 48
    F, I, W = 14.407, 14.380, 9.676  # of a chunk
    found: dict[str, list[float]] = {"plain": [], "v": []}
    for limit, *published in CURVE:
        for placement, chunks, bubble in zip(("plain", "v"), (1, 2), published, strict=True):
            times = 2 / chunks
            problem = pose(
                num_ranks=P,
                num_microbatches=M,
                costs=Costs(forward=F * times, input_grad=I * times, weight_grad=W * times, latency=1.610),
                memory_limit=limit * P * chunks,
                placement=placement,
                objective="span",
                kept_share=kept_share(5120, 40),
            )
            found[placement].append(1 - 2 * M * (F + I + W) / least_seconds(problem))
            assert found[placement][-1] <= bubble + 5e-5, (limit, placement)
    assert all(more >= less - 1e-12 for each in found.values() for more, less in pairwise(each))
    exact = sum(
        bound == pytest.approx(bubble, abs=5e-5) for bound, (_, bubble, _) in zip(found["plain"], CURVE, strict=True)
    )
    assert exact == 3


@pytest.mark.parametrize("P", [2, 4, 8])
def test_named_schedules_that_are_optimal(P: int) -> None:
    """ZB-H1 at memory P, as a span."""
    costs = Costs(forward=10, input_grad=11, weight_grad=7, latency=1)
    schedule = build("zb-h1", num_ranks=P, num_microbatches=3 * P)
    problem = pose(num_ranks=P, num_microbatches=3 * P, costs=costs, memory_limit=P, objective="span")
    assert least_seconds(problem) == pytest.approx(simulate(schedule, costs).span)


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


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_more_memory_is_never_worse_and_much_needs_none(objective: Objective) -> None:
    costs = Costs(forward=[1, 2, 1, 3], input_grad=2, weight_grad=1, latency=0.5, update=[0, 1, 0, 2])
    bounds = [
        least_seconds(pose(num_ranks=4, num_microbatches=8, costs=costs, memory_limit=limit, objective=objective))
        for limit in (1, 1.5, 2, 3, 4, 6, 8, math.inf)
        if math.isfinite(limit)
    ]
    free = least_seconds(pose(num_ranks=4, num_microbatches=8, costs=costs, objective=objective))
    assert bounds[0] == bounds[1]  # half an activation is of no use
    assert all(less >= more for less, more in pairwise([*bounds, free]))
    assert bounds[-1] == free
    with pytest.raises(MemoryLimitError, match="expected at least 1"):
        pose(num_ranks=4, num_microbatches=8, costs=costs, memory_limit=0.5, objective=objective)


def test_one_microbatch_at_a_time_is_known_exactly() -> None:
    """Room for one activation: round trip behind round trip, but for the last W of all and those that hide."""
    costs = Costs(forward=3, input_grad=4, weight_grad=2, latency=1)
    problem = pose(num_ranks=3, num_microbatches=5, costs=costs, memory_limit=1)
    trip = 3 * (3 + 4) + 4 * 1 + 2
    assert least_seconds(problem) == 5 * trip


def test_a_whole_backward_may_be_quicker_than_its_halves() -> None:
    """Then no rank need compute longer than that takes."""
    costs = Costs(forward=1, backward=2, input_grad=2, weight_grad=2)
    assert least_seconds(pose(num_ranks=1, num_microbatches=4, costs=costs)) == 4 * 3

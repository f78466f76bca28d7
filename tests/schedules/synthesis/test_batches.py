"""A schedule for each batch of unequal microbatches: never worse than the fixed one, within memory, found again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from support.inside import BatchOrders, Problem
from support.posed import pose

from stagewright.schedules import Costs, MemoryLimitError, Op, Schedule, build, check, simulate, synthesize

P, M = 3, 8


def problems(number: int, *, limit: float | None, seed: int = 0, num_chunks: int = 1) -> Iterator[Problem]:
    """Batches of lognormal sizes; memory and seconds go with them."""
    random = Random(seed)
    for _ in range(number):
        sizes = [random.lognormvariate(0.0, 0.7) for _ in range(M)]
        yield pose(
            num_ranks=P,
            num_microbatches=M,
            costs=Costs(forward=1.0, input_grad=1.1, weight_grad=0.7, latency=0.1, index_factors=sizes),
            placement="cyclic",
            num_chunks=num_chunks,
            activations=[sizes] * (P * num_chunks),
            memory_limit=None if limit is None else limit * max(sizes),
        )


def seconds(schedule: Schedule, problem: Problem) -> float:
    """Simulated, with the problem's own tables."""
    names = {Op.F: "forward", Op.I: "input_grad", Op.W: "weight_grad"}
    rows = {name: list(map(list, problem.seconds[op])) for op, name in names.items()}
    return simulate(schedule, Costs(**rows, latency=0.1)).makespan


def peaks(schedule: Schedule, problem: Problem) -> list[float]:
    """Memory of each rank, action by action."""
    found = []
    for program in schedule.programs:
        held = {"F": 1, "B": -1, "I": 0, "W": -1}
        now = most = 0.0
        for stage, op, k in program:
            now += held[op.value] * problem.held[stage][k]
            most = max(most, now)
        found.append(most)
    return found


@pytest.mark.thorough(but=["None-1"])
@pytest.mark.parametrize(("limit", "num_chunks"), [(None, 1), (1.0, 1), (3.0, 1), (7.0, 2)])
def test_each_batch_is_within_its_memory_and_no_slower_than_the_fixed_schedule(
    limit: float | None, num_chunks: int
) -> None:
    fixed = build("1f1b", num_ranks=P, num_microbatches=M)
    if num_chunks > 1:
        fixed = build("interleaved", num_ranks=P, num_microbatches=M, num_chunks=num_chunks)
    orders = BatchOrders(fixed, cold=80, warm=40)
    fitting = 0
    for problem in problems(3, limit=limit, num_chunks=num_chunks):
        found = orders.find(problem)
        check(found.schedule)
        assert found.value == pytest.approx(seconds(found.schedule, problem), rel=1e-12)
        if problem.memory_limit is not None:
            assert max(peaks(found.schedule, problem)) <= problem.memory_limit[0] * (1 + 1e-9)
        if found.fixed_value is not None:
            fitting += 1
            assert found.fixed_value == pytest.approx(seconds(fixed, problem), rel=1e-12)
            assert found.value <= found.fixed_value
        else:
            assert max(peaks(fixed, problem)) > (problem.memory_limit or (0.0,))[0]
    assert bool(fitting) == (limit != 1.0)


def test_one_order_from_a_warm_start_is_never_worse_than_the_fixed_one() -> None:
    """Even where there is no time to look at anything."""
    orders = BatchOrders(build("1f1b", num_ranks=P, num_microbatches=M), cold=1, warm=1)
    for problem in problems(3, limit=3.0):
        found = orders.find(problem)
        assert (found.evaluations, found.value) == (1, found.fixed_value)
        assert found.schedule is orders.fixed


def test_what_was_found_for_a_batch_helps_with_the_next() -> None:
    """A few orders from a warm start do as well as as many without do not."""
    fixed = build("1f1b", num_ranks=P, num_microbatches=M)
    warm, gains = BatchOrders(fixed, cold=80, warm=12), []
    for number, problem in enumerate(problems(8, limit=3.0)):
        found = warm.find(problem)
        if number:
            gains.append(BatchOrders(fixed, cold=12).find(problem).value / found.value - 1)
    assert sum(gains) / len(gains) > 0.02


def test_a_limit_that_one_microbatch_exceeds_is_refused_and_the_next_batch_is_found() -> None:
    orders = BatchOrders(build("1f1b", num_ranks=P, num_microbatches=M), cold=20)
    (good,) = problems(1, limit=2.0)
    with pytest.raises(MemoryLimitError, match="no schedule can meet it, since one microbatch alone takes"):
        orders.find(replace(good, memory_limit=(0.9 * good.smallest_memory[0],) * P))
    assert orders.find(good).value > 0


def test_synthesize_counts_memory_by_microbatch() -> None:
    """Four short microbatches fit beside a long one where four long ones do not."""
    held = [[4.0, 1.0, 1.0, 1.0, 1.0, 4.0]] * 2
    problem = pose(num_ranks=2, num_microbatches=6, costs=Costs(), activations=held, memory_limit=5.0)
    found = synthesize(
        num_ranks=2, num_microbatches=6, costs=Costs(), activations=held, memory_limit=5.0, evaluations=200
    )
    assert max(peaks(found.schedule, problem)) <= 5.0
    assert max(found.timeline.peak_activations) >= 2
    blind = synthesize(num_ranks=2, num_microbatches=6, costs=Costs(), activations=4.0, memory_limit=5.0)
    assert found.value < blind.value
    with pytest.raises(ValueError, match=r"activations of stage 1=\[1\].*: expected .* or 6, one per microbatch"):
        pose(num_ranks=2, num_microbatches=6, costs=Costs(), activations=[1.0, [1]])
    with pytest.raises(ValueError, match="at least 4"):
        pose(num_ranks=2, num_microbatches=6, costs=Costs(), activations=held, memory_limit=3.0)

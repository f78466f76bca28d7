"""The lower bound: never above what any order reaches, and reached by the best order of small cases."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.schedules import Action, Costs, Op, Schedule, ScheduleError, build, lower_bound, simulate

from .random_schedules import by_hand, quarters, schedules_with_costs, steady, with_updates


@pytest.mark.thorough
@steady
@given(schedules_with_costs(), st.none() | quarters, st.integers(2, 3))
def test_no_order_beats_it(case: tuple[Schedule, Costs], norm: float | None, batches: int) -> None:
    schedule, costs = case
    cases = [(schedule, costs), (schedule, replace(costs, norm=norm))]
    if any(action.op is not Op.F for program in schedule.programs for action in program):
        cases.append((with_updates(schedule, batches), costs))
    for order, each in cases:
        assert lower_bound(order, each) <= simulate(order, each).makespan


def orders(stages: Sequence[int], num_microbatches: int, ops: str) -> Iterator[tuple[Action, ...]]:
    """All orders of the actions of one rank in which each (stage, microbatch) has its ops in this order."""
    chains = [[Action(s, Op(op), k) for op in ops] for s in stages for k in range(num_microbatches)]

    def continued(done: tuple[Action, ...], at: tuple[int, ...]) -> Iterator[tuple[Action, ...]]:
        if all(i == len(ops) for i in at):
            yield done
        for j, i in enumerate(at):
            if i < len(ops):
                yield from continued((*done, chains[j][i]), (*at[:j], i + 1, *at[j + 1 :]))

    return continued((), (0,) * len(chains))


def best_makespan(P: int, V: int, M: int, ops: str, costs: Costs) -> float:
    placement = tuple(tuple(range(rank, P * V, P)) for rank in range(P))
    best = float("inf")
    for programs in product(*(list(orders(stages, M, ops)) for stages in placement)):
        schedule = Schedule(name="any", placement=placement, programs=programs, num_microbatches=M)
        try:
            best = min(best, simulate(schedule, costs).makespan)
        except ScheduleError:  # a deadlock
            continue
    return best


@pytest.mark.thorough(but=["3-1-1-FB"])
@pytest.mark.parametrize(
    ("P", "V", "M", "ops"),
    [(2, 1, 2, "FB"), (2, 2, 1, "FB"), (3, 1, 1, "FB"), (1, 2, 2, "FB"), (2, 1, 2, "F"), (2, 1, 2, "FIW")],
)
def test_the_best_of_all_orders_reaches_it(P: int, V: int, M: int, ops: str) -> None:
    """Not so in general: these are small enough, for any costs, latencies and updates."""
    numbers = random.Random(P * 100 + V * 10 + M)
    program = " ".join(f"{s}{op}{k}" for s in range(P * V) for k in range(M) for op in ops)
    words = [[word for word in program.split() if int(word[0]) % P == rank] for rank in range(P)]
    some_order = by_hand(
        *map(" ".join, words), microbatches=M, placement=[list(range(rank, P * V, P)) for rank in range(P)]
    )
    for _ in range(3 if ops == "FIW" or P == 1 else 12):  # thousands of orders; one rank waits for nobody
        costs = Costs(
            forward=[numbers.randint(1, 5) for _ in range(P * V)],
            input_grad=[numbers.randint(1, 9) for _ in range(P * V)],
            weight_grad=[numbers.randint(1, 5) for _ in range(P * V)],
            latency=numbers.choice([0, 1, 2]),
            update=numbers.choice([0, 3]),
        )
        assert lower_bound(some_order, costs) == best_makespan(P, V, M, ops, costs)


@pytest.mark.parametrize("norm", [None, 0.25])
def test_updates_behind_the_program(norm: float | None) -> None:
    """The last rank to end is the first one; with a norm all update together, and the slowest update counts."""
    schedule = build("1f1b", num_ranks=3, num_microbatches=4)
    costs = Costs(forward=1.0, backward=2.0, update=[0.5, 4.0, 1.0], norm=norm)
    expected = 18 + (0.5 + 3.0 - 1.5 if norm is None else 0.25 + 4.0)  # rank 1 ends 2 before rank 0
    assert lower_bound(schedule, costs) == simulate(schedule, costs).makespan == expected


def test_a_gradient_may_end_on_the_replica_with_less_to_update() -> None:
    """Stage 0 on ranks 0 and 1, stage 1 on rank 1: the one microbatch runs stage 0 on rank 0, which updates at once."""
    schedule = by_hand("0F0 0B0", "1F0 1B0", microbatches=1, placement=[[0], [0, 1]])
    costs = Costs(forward=1.0, backward=2.0, update=[0.0, 10.0])
    assert lower_bound(schedule, costs) == simulate(schedule, costs).makespan == 1 + 1 + 2 + 10


def test_updates_in_the_program() -> None:
    """Each U after its batch; the last update of stage 0 comes behind all else."""
    schedule = by_hand("0F0 0B0 0U0 0F1 0B1 0U1", "1F0 1B0 1U0 1F1 1B1 1U1", microbatches=1, batches=2)
    costs = Costs(forward=1.0, backward=2.0, update=0.5)
    # Rank 1: 1 before its first, work 2 * 3, then B on stage 0 and its update. Its own first update might come late.
    assert lower_bound(schedule, costs) == 1 + 6 + 2 + 0.5
    assert simulate(schedule, costs).makespan == 2 * 6.5

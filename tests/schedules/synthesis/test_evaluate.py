"""The inner loop of the search against the simulator, to the last bit, and the checker's count of activations."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from support.inside import LinkLevel, Lister, Objective, Problem, advance, chain, first_policies
from support.inside import SynthesisEvaluateEvaluator as Evaluator

from stagewright.schedules import (
    Action,
    Costs,
    Links,
    MemoryLimitError,
    Op,
    Schedule,
    ScheduleError,
    build,
    check,
    simulate,
)

from ..random_schedules import disordered, ordered, steady
from .instances import pose

seconds = st.floats(0.01, 3.0)


@st.composite
def instances(draw: DrawFn) -> tuple[Schedule, Costs]:
    """A random order of a chain, each stage on one rank, with a cost a stage that does not add up exactly."""
    num_ranks = draw(st.integers(1, 4))
    num_stages = draw(st.integers(num_ranks, 6))
    ranks = [*range(num_ranks), *(draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages - num_ranks))]
    ranks = draw(st.permutations(ranks))
    placement = tuple(tuple(s for s, r in enumerate(ranks) if r == rank) for rank in range(num_ranks))
    num_microbatches = draw(st.integers(1, 4))
    actions = []
    for stage in range(num_stages):
        for k in range(num_microbatches):
            actions += [Action(stage, op, k) for op in draw(st.sampled_from([(Op.F, Op.I, Op.W), (Op.F, Op.B)]))]
    size = len(actions)
    programs = ordered(
        placement,
        chain(num_stages),
        actions,
        {action: ranks[action.stage] for action in actions},
        draw(st.lists(st.integers(0, 50), min_size=size, max_size=size)),
    )
    schedule = Schedule(name="random", placement=placement, programs=programs, num_microbatches=num_microbatches)

    def numbers(least: float = 0.01) -> list[float]:
        return draw(st.lists(st.floats(least, 3.0), min_size=num_stages, max_size=num_stages))

    costs = Costs(
        forward=numbers(),
        input_grad=numbers(),
        weight_grad=numbers(),
        backward=numbers(),
        latency=numbers(0.0),
        update=draw(st.sampled_from([0.0, 0.7])),
        norm=draw(st.sampled_from([None, 0.0, 0.3])),
    )
    return schedule, costs


def posed(schedule: Schedule, costs: Costs, objective: Objective = "makespan", links: Links | None = None) -> Problem:
    return pose(
        num_microbatches=schedule.num_microbatches,
        costs=costs,
        placement=schedule.placement,
        objective=objective,
        links=links,
    )


@pytest.mark.thorough
@steady
@given(instances())
def test_equal_to_the_simulator_to_the_last_bit(instance: tuple[Schedule, Costs]) -> None:
    schedule, costs = instance
    timeline = simulate(schedule, costs)
    for objective, expected in (("makespan", timeline.makespan), ("span", timeline.span)):
        evaluator = Evaluator(posed(schedule, costs, objective))
        orders = evaluator.orders(schedule)
        assert evaluator.value(orders) == expected
        assert evaluator.peaks(orders) == list(check(schedule).peak_activations)
        times = evaluator.play(orders)
        assert times[1] == [[s.end for s in rank.compute if s.what.op is not Op.U] for rank in timeline.ranks]
        assert evaluator.schedule(orders, name="random") == schedule


@pytest.mark.thorough
@steady
@given(disordered(replicas=False, forward_only=False))
def test_a_deadlock_has_no_end(schedule: Schedule) -> None:
    """Each W after its I, as in all orders of a search: a start is checked, and moves keep it so."""
    assume(all(schedule.placement))
    schedule = replace(schedule, edges=chain(schedule.num_stages), programs=tuple(map(sound, schedule.programs)))
    evaluator = Evaluator(posed(schedule, Costs()))
    try:
        check(schedule)
    except ScheduleError:
        assert evaluator.value(evaluator.orders(schedule)) == math.inf
    else:
        assert evaluator.value(evaluator.orders(schedule)) < math.inf


def sound(program: tuple[Action, ...]) -> tuple[Action, ...]:
    """With a W that comes before its I in its place, and the I in that of the W."""
    moved = [*program]
    for s, _, k in [action for action in program if action.op is Op.W]:
        halves = Action(s, Op.I, k), Action(s, Op.W, k)
        first, second = sorted(map(program.index, halves))
        moved[first], moved[second] = halves
    return tuple(moved)


def test_links_count_with_their_latency_and_their_bytes() -> None:
    """As long as no message queues."""
    nodes = (LinkLevel(num_ranks=2, latency=0.125), LinkLevel(num_ranks=4, latency=0.5, seconds_per_byte=0.25))
    links = Links(network=nodes, activation_bytes=(1.0, 2.0, 1.0), gradient_bytes=1.0)
    schedule = build("1f1b", num_ranks=4, num_microbatches=3)
    evaluator = Evaluator(posed(schedule, Costs(latency=0.25), links=links))
    assert evaluator.value(evaluator.orders(schedule)) == simulate(schedule, Costs(latency=0.25), links).makespan


def test_memory_is_freed_in_part_behind_the_input_gradient() -> None:
    schedule = build("zb-h1", num_ranks=3, num_microbatches=6)
    problem = pose(
        num_ranks=3, num_microbatches=6, costs=Costs(), activations=[8.0, 8.0, 16.0], kept_share=[1.0, 0.25, 0.25]
    )
    # Rank r defers r W: 3 whole activations at once on rank 0; 2 and one quarter; 1 and two quarters.
    evaluator = Evaluator(problem)
    assert evaluator.peaks(evaluator.orders(schedule)) == [24.0, 18.0, 24.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "zigzag"}, "placement='zigzag': expected one of plain, cyclic, v"),
        ({"placement": "v", "num_chunks": 3}, "num_chunks=3 for placement 'v': expected 2"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"costs": Costs(forward=[1.0, 0.0])}, "forward=0.0: expected more than 0 seconds"),
        ({"costs": Costs(forward=[1.0, 1.0, 1.0])}, "forward has 3 numbers for 2 stages"),
        ({"objective": "speed"}, "objective='speed': expected one of makespan, span"),
        ({"memory_limit": [1.0]}, "memory_limit=.* 2, one per rank"),
        ({"memory_limit": -1.0}, "memory_limit=-1.0: expected a finite number of at least 0"),
        ({"kept_share": 1.5}, "kept_share=1.5: expected a part from 0 to 1"),
        ({"placement": [[0], [0]]}, "placement=.* each on one rank"),
        ({"costs": Costs(tied=[((0, 1), 1.0)])}, "costs without tied="),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    given = {"num_ranks": 2, "num_microbatches": 3, "costs": Costs(), **options}
    with pytest.raises(ValueError, match=message):
        pose(**given)  # type: ignore[arg-type]


def test_too_little_memory_names_the_smallest_that_suffices() -> None:
    with pytest.raises(MemoryLimitError, match=r"memory_limit=1 on rank 0.* takes 2 there; expected at least 2"):
        pose(num_ranks=3, num_microbatches=4, costs=Costs(), placement="v", memory_limit=1)
    pose(num_ranks=3, num_microbatches=4, costs=Costs(), placement="v", memory_limit=2)


def test_a_forward_moves_into_the_gap_that_it_fits() -> None:
    """F2 arrives at once: it ends at 3, before I0 may run. With less room it has to wait for what I0 and W0 free."""
    costs = Costs(forward=1, input_grad=1, weight_grad=1)
    sizes = {"num_ranks": 2, "num_microbatches": 3, "costs": costs}
    first = "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    last = "F0 I0 W0 F1 I1 W1 F2 I2 W2"
    for limit, kept, expected in ((3, 1.0, "F0 F1 F2 I0 W0 I1 W1 I2 W2"), (2, 1.0, first), (2.5, 0.5, first)):
        evaluator = Evaluator(pose(**sizes, memory_limit=limit, kept_share=kept))
        programs = [
            [evaluator.code(Op[a[0]], s, int(a[1])) for a in row.split()] for s, row in enumerate((first, last))
        ]
        names = [[f"{evaluator.action(c).op.name}{c % 3}" for c in order] for order in advance(evaluator, programs)]
        assert names == [expected.split(), last.split()]


@pytest.mark.thorough
@steady
@given(st.data())
def test_forwards_that_move_ahead_make_nothing_late(data: st.DataObject) -> None:
    """All actions remain, none ends later, and each rank stays within its memory."""
    P, M = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    placement = data.draw(st.sampled_from(["plain", "v", "cyclic"]))
    F, I, W, latency = (data.draw(st.integers(1, 12)) for _ in range(4))
    problem = pose(
        num_ranks=P,
        num_microbatches=M,
        placement=placement,
        costs=Costs(forward=F, input_grad=I, weight_grad=W, latency=latency),
        memory_limit=data.draw(st.integers(4, 24)) / 2,
        kept_share=data.draw(st.sampled_from([1.0, 0.5])),
    )
    evaluator = Evaluator(problem)
    policies = first_policies(problem, Random(0))
    policy = [policy for policy, _ in zip(policies, range(60), strict=False)][data.draw(st.integers(0, 59))]
    orders = Lister(evaluator).build(replace(policy, ahead=tuple(data.draw(st.integers(1, 3)) for _ in policy.ahead)))
    moved = advance(evaluator, orders)
    assert [sorted(order) for order in moved] == [sorted(order) for order in orders]
    assert evaluator.fits(moved)
    ends = [by_code(evaluator, each) for each in (moved, orders)]
    assert all(ends[0][code] <= ends[1][code] for code in ends[1])


def by_code(evaluator: Evaluator, orders: list[list[int]]) -> dict[int, float]:
    times = evaluator.play(orders)
    return {
        code: end for order, own in zip(orders, times[1], strict=True) for code, end in zip(order, own, strict=True)
    }

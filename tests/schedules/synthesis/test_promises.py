"""Seconds are kept, by a clock that counts calls; more time or more room is never worse.

So it is where the placement is left open, and with a schedule for each batch of unequal microbatches.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import BatchOrders, Problem, Request, Synthesis, fitting_blocks

from stagewright.schedules import (
    Costs,
    Layer,
    Link,
    Links,
    MemoryLimitError,
    Op,
    Schedule,
    build,
    check,
    simulate,
    synthesize,
    synthesize_jointly,
)

from .instances import pose


def uneven(num_stages: int) -> Costs:
    random = Random(num_stages)
    seconds = [random.uniform(0.8, 1.2) for _ in range(num_stages)]
    weight = [0.6 * each for each in seconds]
    return Costs(forward=seconds, input_grad=[1.1 * s for s in seconds], weight_grad=weight, latency=0.05)


@contextmanager
def calls_as_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """A second is a million calls of functions, so that no other process takes from it."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event.endswith("call")

    def clock() -> float:
        return made / 1e6

    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", clock)
        patched.setattr(time, "thread_time", clock)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield clock
        finally:
            sys.setprofile(before)


SIZES: dict[str, dict[str, Any]] = {
    "plain": {"num_ranks": 8, "num_microbatches": 48, "costs": uneven(8), "memory_limit": 8},
    "v": {"num_ranks": 8, "num_microbatches": 24, "costs": uneven(16), "memory_limit": 10, "placement": "v"},
    "any": {"num_ranks": 8, "num_microbatches": 24, "costs": uneven(16), "memory_limit": 8, "placement": "any"},
    "links": {"num_ranks": 8, "num_microbatches": 24, "costs": uneven(8), "memory_limit": 9}
    | {"links": Links(network=Link(seconds_per_byte=0.1))},
}


@pytest.mark.thorough(but=["v"])
@pytest.mark.parametrize("kind", [*SIZES, "chains"])
def test_seconds_are_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond them only what an order takes to be written down: its simulation, and what a search was about to end."""
    layers = [Layer(forward=s, input_grad=s, weight_grad=s) for s in uneven(30).forward]  # type: ignore[union-attr]
    seconds = 1.5 if kind == "chains" else 0.6  # an order for the end of a chain takes 0.15
    with calls_as_clock(monkeypatch) as clock:
        if kind in SIZES:
            synthesize(**SIZES[kind], seconds=seconds)
        else:
            synthesize_jointly(layers, num_ranks=4, num_microbatches=8, seconds=seconds)
        assert clock() < 1.15 * seconds


def drawn(number: int) -> tuple[dict[str, Any], int]:
    """A small request, and the least memory of a rank."""
    random = Random(f"more {number}")
    placement = random.choice(["plain", "cyclic", "v"])
    P, V, M = random.randint(2, 4), 1 if placement == "plain" else 2, random.randint(3, 6)

    def seconds() -> list[float]:
        return [float(random.randint(3, 15)) for _ in range(P * V)]

    costs = Costs(forward=seconds(), input_grad=seconds(), weight_grad=seconds(), latency=random.choice([0.0, 1.0]))
    sizes = {"num_ranks": P, "num_microbatches": M, "costs": costs, "placement": placement}
    return sizes | {"objective": random.choice(["makespan", "span"]), "seconds": 600.0}, V


@pytest.mark.thorough(but=["1", "2", "4"])
@pytest.mark.parametrize("number", range(6))
def test_more_evaluations_begin_with_fewer(number: int) -> None:
    sizes, least = drawn(number)
    found = [synthesize(**sizes, memory_limit=least + 1, evaluations=many) for many in (20, 90, 400)]
    for less, more in pairwise(found):
        assert way(more)[: len(less.history)] == way(less)
        assert more.value <= less.value


def way(found: Synthesis) -> list[tuple[float, int]]:
    return [(point.value, point.evaluations) for point in found.history]


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(6))
def test_more_room_is_no_worse(number: int) -> None:
    sizes, least = drawn(number)
    rooms = [(least, 1.0), (least + 1, 1.0), (least + 1, 0.9), (least + 2, 0.9), (4 * least, 0.9)]
    values = [synthesize(**sizes, memory_limit=m, kept_share=k, evaluations=1500).value for m, k in rooms]
    assert values == sorted(values, reverse=True)


@pytest.mark.thorough
@pytest.mark.parametrize(("num_ranks", "limit", "part"), [(8, 10, 0.99), (16, 24, 0.97)])
def test_blocks_between_the_named_ones(num_ranks: int, limit: int, part: float) -> None:
    """Under limits between the memory of `v-min`, `v-half` and `zb-v` they leave these behind, at every P."""
    costs, M = Costs(forward=1.0, input_grad=1.0, weight_grad=0.67, latency=0.11), 2 * num_ranks
    blocks = [*fitting_blocks(num_ranks, M, limit)]
    assert all(check(schedule) for schedule in blocks)
    sizes = {"num_ranks": num_ranks, "num_microbatches": M, "costs": costs, "placement": "v", "objective": "span"}
    with_blocks = synthesize(**sizes, memory_limit=limit, seconds=600, evaluations=30)
    named = [simulate(build(name, num_ranks=num_ranks, num_microbatches=M), costs) for name in ("v-min", "v-half")]
    assert with_blocks.value <= part * min(each.span for each in named if max(each.peak_activations) <= limit)


EACH = 40  # orders that a placement has

seconds = st.sampled_from([1.0, 2.0, 3.0, 5.0])


@pytest.mark.thorough
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_it_is_never_worse_than_the_best_placement_alone(data: st.DataObject) -> None:
    """Each placement alone, at costs of chunks made by hand here, with the evaluations that it has among the three."""
    P, M = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 5))

    def drawn() -> list[float]:
        return data.draw(st.lists(seconds, min_size=P, max_size=P))

    forward, input_grad, weight_grad, held = drawn(), drawn(), drawn(), drawn()
    latency = data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    limit = data.draw(st.sampled_from([None, max(held), 2 * max(held)]))
    objective = data.draw(st.sampled_from(["makespan", "span"]))
    many: dict[str, Any] = {"num_ranks": P, "num_microbatches": M, "memory_limit": limit, "objective": objective}
    alone = {}
    for placement, V in (("plain", 1), ("cyclic", 2), ("v", 2)):

        def chunks(rows: list[float], V: int = V) -> list[float]:
            return [each / V for each in rows for _ in range(V)]

        costs = Costs(
            forward=chunks(forward), input_grad=chunks(input_grad), weight_grad=chunks(weight_grad), latency=latency
        )
        try:
            alone[placement] = synthesize(
                **many, costs=costs, placement=placement, activations=chunks(held), evaluations=EACH
            )
        except MemoryLimitError:
            continue
    costs = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)
    most = len(alone) * EACH
    found = synthesize(**many, costs=costs, placement="any", activations=held, evaluations=most)
    assert found.value <= min(each.value for each in alone.values())
    assert found.lower_bound == min(each.lower_bound for each in alone.values()) <= found.value * (1 + 1e-12)
    assert {each.placement: each.lower_bound for each in found.placements} == {
        name: each.lower_bound for name, each in alone.items()
    }
    assert found.evaluations <= most + len(alone)
    check(found.schedule)
    timeline = simulate(found.schedule, found.costs)
    assert found.value == getattr(timeline, objective) == found.history[-1].value


def test_pieces_are_joined_or_divided_and_a_placement_that_they_do_not_make_is_left_out() -> None:
    """Two numbers a rank: a plain stage has both; three a rank make no V of two chunks a rank."""
    costs = Costs(forward=[1.0, 2.0, 3.0, 4.0], backward=[2.0, 4.0, 6.0, [8.0, 9.0]], latency=[0.1, 0.2, 0.3, 0.4])
    held, kept = [1.0, 3.0, 2.0, 2.0], [1.0, 0.2, 0.5, 0.5]
    pieces = Request(num_ranks=2, num_microbatches=2, costs=costs, activations=held, kept_share=kept).pieces()
    plain = pieces.stages(2)
    assert plain.costs.forward == (3.0, 7.0)
    assert plain.costs.backward == (6.0, (14.0, 15.0))
    assert plain.costs.latency == (0.2, 0.4)
    assert (plain.activations, plain.kept_share) == ((4.0, 4.0), (0.4, 0.5))
    same = pieces.stages(4)
    assert same.costs == pieces.joined((0, 1, 2, 3, 4)).costs
    assert pieces.stages(3) is None
    thirds = Costs(forward=[1.0] * 6)
    found = synthesize(num_ranks=2, num_microbatches=2, costs=thirds, placement="any", num_chunks=3, evaluations=30)
    assert {each.placement for each in found.placements} == {"plain", "cyclic"}


def test_the_winner_gets_what_other_placements_leave_and_starts_keep_theirs() -> None:
    """Long messages leave the plain one alone; its search spends all there is."""
    forward, factors = [2.0, 3.0, 2.0], [1, 3, 1, 2]
    costs = Costs(forward=forward, input_grad=2.0, weight_grad=1.5, latency=15.0, index_factors=factors)
    found = synthesize(num_ranks=3, num_microbatches=4, costs=costs, memory_limit=2, placement="any", evaluations=90)
    assert [each.value is None for each in found.placements] == [False, True, True]
    assert (found.stopped, found.evaluations) == ("evaluations", 90)
    start = build("zb-v", num_ranks=2, num_microbatches=3)
    costs = Costs(forward=2.0, input_grad=2.0, weight_grad=2.0)
    found = synthesize(num_ranks=2, num_microbatches=3, costs=costs, placement="any", start=start, evaluations=1)
    assert found.history[0].source == "given"
    assert found.schedule.placement == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": None}, "num_ranks=None: expected a whole number"),
        ({"costs": Costs(forward=[1.0, 2.0, 3.0])}, "numbers of 3 pieces for 2 ranks: expected 2, or a multiple"),
        ({"costs": Costs(forward=[1.0] * 4), "activations": [1.0, 1.0]}, "one number, or equally many of each"),
        ({"memory_limit": 0.5}, "expected at least 1"),
        ({"links": Links(network=Link(), activation_bytes=[1.0])}, "activation_bytes with several numbers"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "costs": Costs(), "evaluations": 5}
    with pytest.raises(ValueError, match=message):
        synthesize(**given | options, placement="any")


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


def seconds_of(schedule: Schedule, problem: Problem) -> float:
    names = {Op.F: "forward", Op.I: "input_grad", Op.W: "weight_grad"}
    rows = {name: list(map(list, problem.seconds[op])) for op, name in names.items()}
    return simulate(schedule, Costs(**rows, latency=0.1)).makespan


def peaks(schedule: Schedule, problem: Problem) -> list[float]:
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
        assert found.value == pytest.approx(seconds_of(found.schedule, problem), rel=1e-12)
        if problem.memory_limit is not None:
            assert max(peaks(found.schedule, problem)) <= problem.memory_limit[0] * (1 + 1e-9)
        if found.fixed_value is not None:
            fitting += 1
            assert found.fixed_value == pytest.approx(seconds_of(fixed, problem), rel=1e-12)
            assert found.value <= found.fixed_value
        else:
            assert max(peaks(fixed, problem)) > (problem.memory_limit or (0.0,))[0]
    assert bool(fitting) == (limit != 1.0)


def test_orders_from_before_help_and_are_never_worse_than_the_fixed_one() -> None:
    """Even where there is no time to look at anything."""
    orders = BatchOrders(build("1f1b", num_ranks=P, num_microbatches=M), cold=1, warm=1)
    for problem in problems(3, limit=3.0):
        found = orders.find(problem)
        assert (found.evaluations, found.value) == (1, found.fixed_value)
        assert found.schedule is orders.fixed
    # A few orders from a warm start do as well as as many without do not.
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

"""Searches where memory binds: activations that leave, stages that recompute; and links that queue."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import BACKWARD_OPS, LAST_USES

from stagewright.schedules import (
    Action,
    Costs,
    Link,
    Links,
    MemoryLimitError,
    Op,
    Schedule,
    Synthesis,
    Timeline,
    build,
    check,
    simulate,
    synthesize,
    with_offload,
)

from ..test_bounds import orders
from .test_synthesize import named

UNIT: dict[str, Any] = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
HOST = Costs(**UNIT, offload=1.0, reload=1.0)


def peaks(timeline: Timeline, waiting: list[float]) -> list[float]:
    """By rank, what it holds at most, counted along the clock: 1 a stage activation while its actions run.

    Arguments:
        waiting: by stage, what is held between a forward and its backward.
    """
    found = []
    changes: list[list[tuple[float, int, float]]] = [[] for _ in timeline.ranks]
    for rank, trace in enumerate(timeline.ranks):
        for (stage, op, _), start, end in (*trace.compute, *trace.moves):
            part = waiting[stage]
            if op is Op.F or op is Op.RELOAD:
                changes[rank].append((start, 1, part))
            elif op is Op.OFFLOAD:
                changes[rank].append((end, 0, -part))
            if op in BACKWARD_OPS:
                changes[rank].append((start, 1, 1.0 - part))
            if op in LAST_USES:
                changes[rank].append((end, 0, -1.0))
    for own in changes:  # of one time, what ends goes first
        now = peak = 0.0
        for _, _, change in sorted(own):
            now += change
            peak = max(peak, now)
        found.append(peak)
    return found


def assert_sound(found: Synthesis, limit: float, *, share: float = 1.0, links: Links | None = None) -> None:
    """The checker, the simulator and a count along the clock agree with what it says of itself."""
    check(found.schedule)
    timeline = simulate(found.schedule, found.costs, links)
    assert found.value == getattr(timeline, found.problem.objective) == found.history[-1].value
    assert found.value >= found.lower_bound * (1 - 1e-12)
    assert max(peaks(timeline, [share if word == "full" else 1.0 for word in found.recompute])) <= limit + 1e-9


@pytest.mark.thorough
def test_a_quarter_of_the_memory_without_a_longer_bubble() -> None:
    """A quarter of 1F1B's P V = 16 activations stays, and two that move. The optimum without any limit is reached, and
    beats `gis` with half of its stages offloaded; without moves no order within the limit comes near it."""
    P, V, M = 4, 4, 12
    many: dict[str, Any] = {"num_ranks": P, "num_microbatches": M, "placement": "cyclic", "num_chunks": V}
    found = synthesize(**many, costs=HOST, memory_limit=P * V / 4 + 2, moves=["offload"], evaluations=30)
    assert_sound(found, P * V / 4 + 2)
    assert found.is_optimal
    rule = with_offload(
        build("gis", num_ranks=P, num_microbatches=M, num_chunks=V, group_size=P // 2), share=0.5, costs=HOST
    )
    timeline = simulate(rule, HOST)
    assert max(timeline.peak_activations) <= P * V / 4 + 2
    assert found.value < timeline.makespan
    assert found.value * 1.15 < synthesize(**many, costs=HOST, memory_limit=6, evaluations=1).lower_bound


def test_a_limit_that_nothing_else_meets() -> None:
    """Four chunks of one microbatch are 4 at once; two suffice where those that wait leave, and with fewer nothing is
    found. Inputs of a tenth take 1.3 with recomputation."""
    many: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "placement": "cyclic", "num_chunks": 4}
    many |= {"costs": HOST, "evaluations": 60}
    with pytest.raises(MemoryLimitError, match="expected at least 4"):
        synthesize(**many, memory_limit=2)
    found = synthesize(**many, memory_limit=2, moves=["offload"])
    assert_sound(found, 2.0)
    assert any(action.op is Op.OFFLOAD for action in found.schedule.programs[0])
    with pytest.raises(MemoryLimitError, match=r"memory_limit=1: nothing that meets it was found.*at least 2"):
        synthesize(**many, memory_limit=1, moves=["offload"])
    with pytest.raises(MemoryLimitError, match="one stage's activations of one microbatch take 1 there"):
        synthesize(**many, memory_limit=0.5, moves=["offload"])
    found = synthesize(**many, memory_limit=1.5, recompute=0.1)
    assert_sound(found, 1.5, share=0.1)
    assert found.recompute[:4] == ("full",) * 4


@pytest.mark.thorough
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_they_never_make_it_worse(data: st.DataObject) -> None:
    """Nor does any of them exceed the memory, whatever the costs."""
    seconds = st.sampled_from([1.0, 2.0, 3.0])
    P, M = data.draw(st.integers(2, 3)), data.draw(st.integers(2, 6))
    placement = data.draw(st.sampled_from(["plain", "cyclic", "v", "any"]))

    def each() -> float:
        return data.draw(seconds)

    costs = Costs(
        forward=each(),
        input_grad=each(),
        weight_grad=each(),
        latency=data.draw(st.sampled_from([0.0, 0.5])),
        offload=data.draw(st.sampled_from([0.0, 1.0, 4.0])),
        reload=data.draw(st.sampled_from([0.0, 0.3, 2.0])),
    )
    least = 1 if placement in ("plain", "any") else 2
    limit = least + data.draw(st.integers(0, 2))
    links = Links(network=Link(seconds_per_byte=data.draw(st.sampled_from([0.1, 1.0]))))
    links = data.draw(st.sampled_from([None, links]))
    more: dict[str, Any] = {"moves": ["offload"]}
    if data.draw(st.booleans()):
        more["recompute"] = 0.2
    many: dict[str, Any] = {"num_ranks": P, "num_microbatches": M, "costs": costs, "memory_limit": limit}
    many |= {"placement": placement, "links": links, "evaluations": 40}
    many["objective"] = data.draw(st.sampled_from(["makespan", "span"]))
    alone, found = synthesize(**many), synthesize(**many, **more)
    assert found.value <= alone.value
    assert way(found)[: len(alone.history)] == way(alone)
    if placement == "any":
        own = limit * found.problem.num_stages / P  # in activations of its stages
        assert_sound(found, own, share=0.2, links=links)
    else:
        assert_sound(found, limit, share=0.2, links=links)


def way(found: Synthesis) -> list[tuple[float, str, int]]:
    """Each improvement: its value, what found it, after how many orders."""
    return [(point.value, point.source, point.evaluations) for point in found.history]


def test_placements_share_the_orders_as_they_would_without_moves() -> None:
    """Though what is looked at first, and when a placement is not worth a look, depends on bounds that moves lower."""
    many: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "placement": "any", "memory_limit": 1}
    each = [2.0, 3.0]
    many |= {"evaluations": 40}
    many["costs"] = Costs(forward=each, input_grad=each, weight_grad=1.0, latency=0.5, offload=4.0, reload=1.0)
    alone, found = synthesize(**many), synthesize(**many, moves=["offload"])
    assert way(found)[: len(alone.history)] == way(alone)
    assert found.lower_bound < alone.lower_bound


@pytest.mark.thorough
@pytest.mark.parametrize("evaluations", [1, 60])
def test_links_that_queue_leave_no_named_schedule_ahead(evaluations: int) -> None:
    """Messages of 0.9 forwards, and cards that two ranks share."""
    costs = Costs(forward=1.0, input_grad=1.25, weight_grad=0.5)
    cards = {
        (a, b): Link(seconds_per_byte=0.9, sending=a // 2, receiving=b // 2)
        for a in range(4)
        for b in range(4)
        if a != b
    }
    links = Links(network=cards, activation_bytes=1.0)
    for placement, V in (("plain", 1), ("cyclic", 2)):
        found = synthesize(
            num_ranks=4,
            num_microbatches=6,
            costs=costs,
            links=links,
            placement=placement,
            memory_limit=8 * V,
            evaluations=evaluations,
        )
        assert_sound(found, 8 * V, links=links)
        ran = 0
        for schedule in named(4, 6, V):
            timeline = simulate(schedule, costs, links) if schedule.placement == found.schedule.placement else None
            if timeline is not None and max(timeline.peak_activations) <= 8 * V:
                ran += 1
                assert found.value <= timeline.makespan, schedule.name
        assert ran >= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moves": "offload"}, "moves='offload': expected some of offload"),
        ({"moves": ["hide"]}, "expected some of offload"),
        ({"recompute": 1.5}, "recompute=1.5: expected a part from 0 to 1, or 2, one a stage"),
        ({"recompute": [0.5]}, "one a stage"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 3, "costs": Costs(), "memory_limit": 1}
    with pytest.raises(ValueError, match=message):
        synthesize(**given | options, evaluations=5)


@pytest.mark.nightly
@pytest.mark.parametrize("limit", [1, 2])
def test_every_order_with_every_moves_of_two_microbatches(limit: int) -> None:
    """P = 2, M = 2: all orders of both ranks, and all places of moves on the first; no better one was missed."""
    costs = Costs(forward=2.0, input_grad=1.0, weight_grad=1.0, latency=0.5, offload=1.0, reload=1.0)
    found = synthesize(
        num_ranks=2, num_microbatches=2, costs=costs, memory_limit=[limit, 2], moves=["offload"], evaluations=400
    )
    best = min(value for each in every_schedule() if (value := value_of(each, costs, limit)))
    assert found.value == best


def every_schedule() -> list[Schedule]:
    found = []
    for first, second in product(*(list(orders([stage], 2, "FIW")) for stage in range(2))):
        for moving in ((), (0,), (1,), (0, 1)):
            for programs in _with_moves([first], moving):
                found.append(
                    Schedule(name="any", placement=((0,), (1,)), programs=(programs, second), num_microbatches=2)
                )
    return found


def _with_moves(programs: list[tuple[Action, ...]], moving: tuple[int, ...]) -> list[tuple[Action, ...]]:
    for k in moving:
        programs = [
            (*program[:out], Op.OFFLOAD(0, k), *program[out:back], Op.RELOAD(0, k), *program[back:])
            for program in programs
            for out, back in combinations(range(program.index(Op.F(0, k)) + 1, program.index(Op.I(0, k)) + 1), 2)
        ]
    return programs


def value_of(schedule: Schedule, costs: Costs, limit: int) -> float | None:
    try:
        timeline = simulate(schedule, costs)
    except ValueError:
        return None
    fits = all(peak <= most for peak, most in zip(timeline.peak_activations, (limit, 2), strict=True))
    return timeline.makespan if fits else None


@pytest.mark.parametrize(("ranks", "placement"), [(1, "v"), (2, [[0, 2], [1, 3]])])
def test_a_limit_that_is_too_small_to_recompute_in_is_told_with_one_that_is_not(ranks: int, placement: Any) -> None:
    given = {"num_ranks": ranks, "num_microbatches": 2, "placement": placement, "recompute": 0.1, "evaluations": 5}
    with pytest.raises(MemoryLimitError, match=r"expected at least 1\.1, the least"):
        synthesize(costs=Costs(), memory_limit=1, **given)
    assert synthesize(costs=Costs(), memory_limit=1.1, **given).recompute.count("full") == 2 * ranks

"""Times of ranks by cause, and inputs as measured steps show them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import Cause, Input, find_gaps, measured_inputs

from stagewright.schedules import (
    Action,
    Collective,
    Costs,
    Idle,
    Link,
    Links,
    Op,
    RankTrace,
    Schedule,
    Span,
    Timeline,
    attribute_idle,
    build,
    critical_path,
    simulate,
)

from .random_schedules import ASYNC, by_hand, paused, quarters, schedules_with_costs, steady, window_of

NONE = Idle()


def check_sums(timeline: Timeline) -> None:
    for rank, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True):
        assert sum(idle) == timeline.makespan - rank.busy
        assert all(seconds >= 0 for seconds in idle)


@pytest.mark.thorough
@steady
@given(schedules_with_costs(), quarters)
def test_a_rank_that_waits_for_its_own_message_to_leave_waits_for_a_transfer(
    case: tuple[Schedule, Costs], a_byte: float
) -> None:
    schedule, costs = case
    links = Links(network=Link(seconds_per_byte=a_byte, blocks=True), activation_bytes=1.0)
    timeline = simulate(schedule, costs, links)
    check_sums(timeline)
    assert all(idle.unexplained == 0 for idle in attribute_idle(timeline))
    assert "unexplained" not in [kind.value for kind in critical_path(timeline).by_kind]


@pytest.mark.thorough
@steady
@given(schedules_with_costs(), st.none() | quarters)
def test_causes_add_up_in_every_simulation(case: tuple[Schedule, Costs], norm: float | None) -> None:
    schedule, costs = case
    timeline = simulate(schedule, replace(costs, norm=norm))
    check_sums(timeline)
    assert all(idle.unexplained == 0 for idle in attribute_idle(timeline))
    if not any(costs.latency):  # type: ignore[arg-type]
        assert all(idle.transfer == 0 for idle in attribute_idle(timeline))


@pytest.mark.thorough
@steady
@given(schedules_with_costs(), st.data())
def test_causes_add_up_in_every_measurement(case: tuple[Schedule, Costs], data: st.DataObject) -> None:
    timeline = simulate(*case)
    check_sums(replace(timeline, ranks=tuple(data.draw(paused(timeline))), measured=True))


def test_an_even_pipeline_warms_up_waits_and_drains() -> None:
    """
    rank 0 | F0 F1 .  .  B0 F2 B1 .  B2      P=3 in unit time, M=3
    rank 1 | .  F0 F1 .  B0 F2 B1 .  ...
    """
    schedule = build("1f1b", num_ranks=3, num_microbatches=3)
    assert schedule.grid().splitlines() == [
        "rank 0 | F0 F1 F2 .  .  B0 .  B1 .  B2",
        "rank 1 | .  F0 F1 .  B0 F2 B1 .  B2 .",
        "rank 2 | .  .  F0 B0 F1 B1 F2 B2 .  .",
    ]
    assert attribute_idle(simulate(schedule, Costs(forward=1.0, backward=1.0))) == (
        NONE._replace(late_peer=4.0),
        NONE._replace(warm_up=1.0, late_peer=2.0, drain=1.0),
        NONE._replace(warm_up=2.0, drain=2.0),
    )


def test_waiting_for_a_rank_with_more_work_is_imbalance() -> None:
    """Rank 0 works 4, rank 1 works 12: 8 seconds of rank 0 are lost in any order, one more in this one."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    costs = Costs(forward=[1.0, 3.0], backward=[1.0, 3.0])
    timeline = simulate(schedule, costs)
    assert timeline.makespan == 14
    assert attribute_idle(timeline) == (
        NONE._replace(late_peer=2.0, imbalance=8.0),
        NONE._replace(warm_up=1.0, drain=1.0),
    )


def test_the_part_of_a_gap_behind_the_arrival_is_unexplained() -> None:
    """
    rank 0 | F0 .. .. .. .. .. .. B0        gradient made at 4, here at 5, used at 7
    rank 1 |    F0 F0 B0
    """
    schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    measured = Timeline(
        schedule=schedule,
        ranks=(
            RankTrace(
                compute=(Span(Action.parse("0F0"), 0.0, 1.0), Span(Action.parse("0B0"), 7.0, 8.0)),
                comm=simulate(schedule, Costs(forward=[1, 2], backward=[1, 1], latency=[0, 1])).ranks[0].comm,
            ),
            RankTrace(compute=(Span(Action.parse("1F0"), 1.0, 3.0), Span(Action.parse("1B0"), 3.0, 4.0))),
        ),
        measured=True,
    )
    # Rank 1 works one second more than rank 0: that much waiting is imbalance.
    assert attribute_idle(measured)[0] == NONE._replace(late_peer=2.0, imbalance=1.0, transfer=1.0, unexplained=2.0)
    gap = find_gaps(measured)[0][Action.parse("0B0")]
    assert (gap.late_peer, gap.transfer, gap.unexplained, gap.seconds, gap.cause) == (3.0, 1.0, 2.0, 6.0, "late_peer")


def test_a_wait_for_data_is_a_cause_of_its_own() -> None:
    """
    rank 0 |d d d d . F0 .. .. .. B0      its batch is there at 4, its step is entered
    rank 1 |    d d d .  d d F0 B0        reads the target twice, and is late the second time
    rank 2 |                              reads nothing: in front of the step it waits for the others' data
    """
    schedule = build("gpipe", num_ranks=3, num_microbatches=1)

    def trace(*spans: tuple[str, float, float], data: tuple[tuple[float, float], ...] = ()) -> RankTrace:
        return RankTrace(compute=tuple(Span(Action.parse(what), *times) for what, *times in spans), data=data)

    ranks = (
        trace(("0F0", 5.0, 6.0), ("0B0", 14.0, 15.0), data=((0.0, 4.0),)),
        trace(("1F0", 10.0, 11.0), ("1B0", 13.0, 14.0), data=((2.0, 5.0), (6.5, 9.5))),
        trace(("2F0", 11.0, 12.0), ("2B0", 12.0, 13.0)),
    )
    timeline = Timeline(schedule=schedule, ranks=ranks, measured=True)
    assert (timeline.start, timeline.first_action, timeline.makespan) == (0.0, 5.0, 15.0)
    check_sums(timeline)
    idle = attribute_idle(timeline)
    assert [(rank.data, rank.warm_up) for rank in idle] == [(4.0, 1.0), (6.0, 4.0), (5.0, 6.0)]
    assert Timeline.from_json(timeline.to_json()) == timeline
    moved = timeline.shifted(2.0)
    assert (moved.start, attribute_idle(moved)) == (2.0, idle)
    took = ((step.kind.value, step.rank, step.end - step.start) for step in critical_path(timeline).steps)
    path = [each for each in took if each[2]]
    assert path[:4] == [("data", 0, 5.0), ("forward", 0, 1.0), ("data", 1, 4.0), ("forward", 1, 1.0)]


def test_updates() -> None:
    """Without a norm each rank updates at once; with one all wait for the last backward (drain), then for the norm."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    costs = Costs(forward=1.0, backward=2.0, update=0.5)
    assert attribute_idle(simulate(schedule, costs)) == (
        NONE._replace(late_peer=3.0, update=0.5),
        NONE._replace(warm_up=1.0, update=0.5, drain=2.0),
    )
    assert attribute_idle(simulate(schedule, replace(costs, norm=0.25))) == (
        NONE._replace(late_peer=3.0, update=0.75),
        NONE._replace(warm_up=1.0, drain=2.0, update=0.75),
    )


def test_a_rank_that_does_nothing_drains() -> None:
    schedule = by_hand("0F0 0B0", "", microbatches=1, placement=[[0], []])
    timeline = simulate(schedule, Costs(forward=1.0, backward=2.0))
    assert attribute_idle(timeline) == (NONE, NONE._replace(drain=3.0))


@pytest.mark.parametrize("name", ASYNC)
@pytest.mark.parametrize("latency", [0.0, 0.25, 2.0])
def test_a_window_lacks_the_makers_of_its_first_messages(name: str, latency: float) -> None:
    """Causes add up, and a message of known arrival is late or under way as in the whole run."""
    whole = simulate(build(name, num_ranks=4, num_microbatches=4), Costs(forward=1.0, backward=2.0, latency=latency))
    window = window_of(whole, 3, 6)
    made = {span.what for trace in window.ranks for span in trace.compute}
    assert any(Action(1, Op.B, a.index) not in made for a in window.ranks[0].actions if a.op is Op.B)
    check_sums(window)
    for gaps, expected in zip(find_gaps(window), find_gaps(whole), strict=True):
        inner = list(gaps.items())[1:]  # the first gap is a warm-up here
        assert [gap for _, gap in inner if latency] == [expected[action] for action, _ in inner if latency]
        assert latency or not inner


def test_neither_maker_nor_message_is_unexplained() -> None:
    """Nothing says why rank 0 waited for a gradient of a batch before the window."""
    schedule = build("pipedream", num_ranks=2, num_microbatches=1)
    compute = (Span(Action.parse("0F5"), 0.0, 1.0), Span(Action.parse("0B4"), 3.0, 5.0))
    other = (Span(Action.parse("1F5"), 1.0, 2.0), Span(Action.parse("1B5"), 2.0, 4.0))
    window = Timeline(schedule=schedule, ranks=(RankTrace(compute=compute), RankTrace(compute=other)), measured=True)
    assert attribute_idle(window)[0] == NONE._replace(unexplained=2.0)


def test_a_gap_in_which_a_sum_begins_is_around_no_action() -> None:
    """One rank of two chunks: behind the last chunk's backward its gradients are copied and sent off for 4 s."""
    step = simulate(
        build("interleaved", num_ranks=1, num_microbatches=1, num_chunks=2), Costs(forward=1.0, backward=2.0)
    )
    (trace,) = step.ranks
    later = {2: 0.0, 3: 4.0}
    compute = tuple(
        Span(s.what, s.start + later.get(n, 0.0), s.end + later.get(n, 0.0)) for n, s in enumerate(trace.compute)
    )
    begun = Span(Collective((1,), Op.REDUCE_GRAD, 0), compute[2].end, compute[3].end)
    seen = [
        measured_inputs([replace(step, ranks=(replace(trace, compute=compute, collectives=sums),))])
        for sums in ((), (begun,))
    ]
    around = [each.get(Input(Cause.OVERHEAD, "overhead", (1,))) for each in seen]
    assert around == [2.0, 0.0]

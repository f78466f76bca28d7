"""The event simulator against a longest path; messages, the epilogue, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from stagewright.schedules import (
    Action,
    Costs,
    Message,
    MessageKind,
    Op,
    Schedule,
    ScheduleError,
    Span,
    build,
    ideal_makespan,
    lower_bound,
    simulate,
)

from .random_schedules import by_hand, schedules_with_costs, steady
from .reference import data_edges, name_of_message, seconds, starts

ACT, GRAD = MessageKind.ACT, MessageKind.GRAD


@pytest.mark.thorough
@steady
@given(schedules_with_costs())
def test_starts_equal_the_longest_paths(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    expected = starts(schedule, costs)
    timeline = simulate(schedule, costs)
    for rank, trace in enumerate(timeline.ranks):
        number = len(schedule.programs[rank])
        assert trace.compute[:number] == tuple(
            Span(action, expected[rank, action], expected[rank, action] + seconds(costs, action))
            for action in schedule.programs[rank]
        )
    assert ideal_makespan(schedule, costs) == max(
        sum(seconds(costs, action) for action in program) for program in schedule.programs
    )


@pytest.mark.thorough
@steady
@given(schedules_with_costs())
def test_messages_go_from_the_end_of_their_maker_to_their_arrival(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    assert isinstance(costs.latency, tuple)
    end = {(rank, s.what): s.end for rank, trace in enumerate(simulate(schedule, costs).ranks) for s in trace.compute}
    left: list[dict[Message, float]] = [{} for _ in schedule.programs]
    for (sender, maker), (receiver, user) in data_edges(schedule):
        if sender != receiver and any(costs.latency):
            kind = ACT if maker.op is Op.F else GRAD
            message = Message(kind, *name_of_message(schedule, maker, user), user.index)
            left[receiver][message] = max(left[receiver].get(message, 0.0), end[sender, maker])
    expected = [{Span(m, start, start + costs.latency[m.src]) for m, start in found.items()} for found in left]
    for trace, messages in zip(simulate(schedule, costs).ranks, expected, strict=True):
        assert set(trace.comm) == messages
        assert len(trace.comm) == len(messages)
        assert [s.start for s in trace.comm] == sorted(s.start for s in trace.comm)


# --- the epilogue ---

FB_U = Costs(forward=1.0, backward=2.0, update=[0.5, 1.0, 0.25, 2.0])


def test_a_norm_counts_behind_no_update() -> None:
    """It was left out where updates cost nothing, while the lower bound counted it."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    costs = Costs(forward=1.0, backward=2.0, norm=0.5)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == lower_bound(schedule, costs) == 9.5
    assert [trace.compute[-1] for trace in timeline.ranks] == [Span(Action(s, Op.U, 0), 9.5, 9.5) for s in (0, 1)]


@pytest.mark.parametrize("costs", [FB_U, Costs(update=1.0, norm=1.0)])
def test_an_evaluation_has_no_epilogue(costs: Costs) -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=3).forward_only()
    assert all(s.what.op is Op.F for trace in simulate(schedule, costs).ranks for s in trace.compute)  # type: ignore[union-attr]


# --- what it refuses ---


def test_a_deadlock() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 never gets what 0B0 needs: the schedule deadlocks; check\(sched"):
        simulate(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2), Costs())


def test_communication_in_a_compute_order() -> None:
    program = (Action(0, Op.REDUCE_GRAD, 0),)
    with pytest.raises(ScheduleError, match="runs REDUCE_GRAD of stage 0, which has no cost: expected F B I W U"):
        simulate(replace(by_hand("0F0 0B0", microbatches=1), programs=(program,)), Costs())

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


def test_latency_delays_and_occupies_nothing() -> None:
    """
    rank 0 | F0 F1  .  .  .  .  B0 B0 .  B1 B1         F=1, B=2, 1.5 from rank 0, 1 from rank 1
    rank 1 | .  . F0 B0 B0 F1 B1 B1
    """
    timeline = simulate(
        build("1f1b", num_ranks=2, num_microbatches=2), Costs(forward=1.0, backward=2.0, latency=[1.5, 1.0])
    )
    assert timeline.ranks[0].compute == (
        Span(Action(0, Op.F, 0), 0.0, 1.0),
        Span(Action(0, Op.F, 1), 1.0, 2.0),
        Span(Action(0, Op.B, 0), 6.5, 8.5),
        Span(Action(0, Op.B, 1), 9.5, 11.5),
    )
    assert timeline.ranks[1].compute == (
        Span(Action(1, Op.F, 0), 2.5, 3.5),
        Span(Action(1, Op.B, 0), 3.5, 5.5),
        Span(Action(1, Op.F, 1), 5.5, 6.5),
        Span(Action(1, Op.B, 1), 6.5, 8.5),
    )
    assert timeline.ranks[0].comm == (Span(Message(GRAD, 1, 0, 0), 5.5, 6.5), Span(Message(GRAD, 1, 0, 1), 8.5, 9.5))
    assert timeline.ranks[1].comm == (Span(Message(ACT, 0, 1, 0), 1.0, 2.5), Span(Message(ACT, 0, 1, 1), 2.0, 3.5))
    assert not timeline.measured


# --- the epilogue ---

FB_U = Costs(forward=1.0, backward=2.0, update=[0.5, 1.0, 0.25, 2.0])


def test_each_rank_updates_its_stages_behind_its_own_work() -> None:
    schedule = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    plain = simulate(schedule, Costs(forward=1.0, backward=2.0))
    timeline = simulate(schedule, FB_U)
    for rank, updates in ((0, [(0, 0.5), (2, 0.25)]), (1, [(1, 1.0), (3, 2.0)])):
        before = plain.ranks[rank].compute
        assert timeline.ranks[rank].compute[: len(before)] == before
        at = before[-1].end
        for span, (stage, duration) in zip(timeline.ranks[rank].compute[len(before) :], updates, strict=True):
            assert span == Span(Action(stage, Op.U, 0), at, at + duration)
            at += duration
        assert timeline.ranks[rank].busy == plain.ranks[rank].busy


def test_with_a_global_norm_all_ranks_wait_for_the_last() -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=3)
    costs = Costs(forward=1.0, backward=2.0, update=[0.5, 1.0, 0.25, 2.0], norm=0.125)
    end = simulate(schedule, Costs(forward=1.0, backward=2.0)).makespan
    updates = [trace.compute[-1] for trace in simulate(schedule, costs).ranks]
    assert [(s.start, s.end) for s in updates] == [(end + 0.125, end + 0.125 + u) for u in (0.5, 1.0, 0.25, 2.0)]


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


def test_updates_in_the_program_come_where_they_stand() -> None:
    schedule = by_hand("0F0 0B0 0U0 0F1 0B1 0U1", microbatches=1, batches=2)
    timeline = simulate(schedule, Costs(forward=1.0, backward=2.0, update=0.5, norm=9.0))
    assert [(str(s.what), s.start) for s in timeline.ranks[0].compute] == [
        ("0F0", 0.0),
        ("0B0", 1.0),
        ("0U0", 3.0),
        ("0F1", 3.5),
        ("0B1", 4.5),
        ("0U1", 6.5),
    ]
    assert ideal_makespan(schedule, Costs(forward=1.0, backward=2.0, update=0.5)) == 7.0


# --- what it refuses ---


def test_a_deadlock() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 never gets what 0B0 needs: the schedule deadlocks; check\(sched"):
        simulate(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2), Costs())


def test_communication_in_a_compute_order() -> None:
    program = (Action(0, Op.REDUCE_GRAD, 0),)
    with pytest.raises(ScheduleError, match="runs REDUCE_GRAD of stage 0, which has no cost: expected F B I W U"):
        simulate(replace(by_hand("0F0 0B0", microbatches=1), programs=(program,)), Costs())


def test_costs_for_other_stages() -> None:
    with pytest.raises(ValueError, match="forward has 3 numbers for 2 stages"):
        simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs(forward=[1.0, 1.0, 1.0]))

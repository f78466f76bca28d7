"""Timelines: the two bubbles, peaks, JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.schedules import (
    Action,
    Costs,
    Message,
    MessageKind,
    Op,
    RankTrace,
    Schedule,
    Span,
    Timeline,
    build,
    check,
    simulate,
)

from .builders import ASYNC
from .random_schedules import by_hand, schedules_with_costs, steady, window_of
from .reference import seconds


def traced(*ranks: str) -> Timeline:
    """`0F0@0-1 0B0@2-4` a rank: action, start, end."""
    spans = []
    for rank in ranks:
        row = []
        for word in rank.split():
            action, times = word.split("@")
            start, end = map(float, times.split("-"))
            row.append(Span(Action.parse(action), start, end))
        spans.append(tuple(row))
    programs = [" ".join(str(s.what) for s in row if Action.parse(str(s.what)).op is not Op.U) for row in spans]
    return Timeline(
        schedule=by_hand(*programs, microbatches=2), ranks=tuple(RankTrace(compute=row) for row in spans), measured=True
    )


def test_two_bubbles() -> None:
    """
    rank 0 | F0 F1 .  .  .  B0 B0 B1 B1         makespan 9, rank 0 spans 9 and works 6
    rank 1 | .  F0 F1 B0 B0 B1 B1 .  .          rank 1 spans 6
    """
    timeline = traced("0F0@0-1 0F1@1-2 0B0@5-7 0B1@7-9", "1F0@1-2 1F1@2-3 1B0@3-5 1B1@5-7")
    assert (timeline.start, timeline.end, timeline.makespan, timeline.span) == (0, 9, 9, 9)
    assert [rank.busy for rank in timeline.ranks] == [6, 6]
    assert timeline.makespan_bubble == timeline.span_bubble == timeline.bubble == 1 - 12 / 18


def test_the_span_bubble_takes_the_longest_rank() -> None:
    """
    rank 0 | F0 F1 B0 B1 .  .  .         no rank is there for the whole 7 seconds
    rank 1 | .  .  .  F0 F1 B0 B1
    """
    timeline = traced("0F0@0-1 0F1@1-2 0B0@2-3 0B1@3-4", "1F0@3-4 1F1@4-5 1B0@5-6 1B1@6-7")
    assert (timeline.makespan, timeline.span) == (7, 4)
    assert timeline.makespan_bubble == timeline.bubble == pytest.approx(1 - 8 / 14)
    assert timeline.span_bubble == 0.0


def test_times_may_begin_anywhere() -> None:
    timeline = traced("0F0@0-1 0F1@1-2 0B0@5-7 0B1@7-9", "1F0@1-2 1F1@2-3 1B0@3-5 1B1@5-7")
    later = timeline.shifted(100.5)
    assert (later.start, later.end) == (100.5, 109.5)
    for name in ("makespan", "span", "makespan_bubble", "span_bubble", "peak_activations", "measured", "schedule"):
        assert getattr(later, name) == getattr(timeline, name)
    moved = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs(latency=1.0)).shifted(1.0)
    assert moved.ranks[1].comm[0] == Span(Message(MessageKind.ACT, 0, 1, 0), 2.0, 3.0)


def test_an_update_lengthens_the_makespan_and_is_no_work() -> None:
    timeline = traced("0F0@0-1 0F1@1-2 0B0@2-4 0B1@4-6 0U0@6-8")
    assert (timeline.makespan, timeline.ranks[0].busy) == (8, 6)
    assert timeline.makespan_bubble == timeline.span_bubble == 0.25


def test_nothing_happened() -> None:
    timeline = Timeline(schedule=build("gpipe", num_ranks=2, num_microbatches=1), ranks=(RankTrace(compute=()),) * 2)
    assert (timeline.makespan, timeline.span, timeline.bubble, timeline.span_bubble) == (0, 0, 0, 0)
    free = simulate(build("gpipe", num_ranks=2, num_microbatches=1), Costs(forward=0, backward=0))
    assert (free.makespan, free.bubble) == (0, 0)


@pytest.mark.thorough
@steady
@given(schedules_with_costs())
def test_definitions(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    work = sum(seconds(costs, action) for program in schedule.programs for action in program)
    ends = [(trace.compute[0].start, trace.compute[-1].end) for trace in timeline.ranks if trace.compute]
    makespan = max(end for _, end in ends) - min(start for start, _ in ends)
    span = max(end - start for start, end in ends)
    assert (timeline.makespan, timeline.span) == (makespan, span)
    for bubble, length in ((timeline.makespan_bubble, makespan), (timeline.span_bubble, span)):
        assert bubble == pytest.approx(1 - work / (schedule.num_ranks * length) if length else 0.0)
    assert timeline.bubble == timeline.makespan_bubble
    assert timeline.peak_activations == check(schedule).peak_activations


# --- JSON ---


@pytest.mark.thorough
@steady
@given(schedules_with_costs(), st.booleans())
def test_json_round_trip(case: tuple[Schedule, Costs], measured: bool) -> None:
    timeline = replace(simulate(*case), measured=measured)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_json() -> None:
    timeline = simulate(by_hand("0F0", "1F0", microbatches=1), Costs(forward=1.0, latency=0.5))
    data = json.loads(timeline.to_json())
    assert data["ranks"] == [
        {"compute": [["0F0", 0.0, 1.0]], "comm": [], "collectives": []},
        {"compute": [["1F0", 1.5, 2.5]], "comm": [[["act", 0, 1, 0], 1.0, 1.5]], "collectives": []},
    ]
    assert (data["version"], data["measured"]) == (1, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": None}, "not a timeline"),
        ({"ranks": []}, "0 ranks for a schedule of 2"),
        ({"version": 2}, "version 2, expected 1"),
        ({"ranks": [{"compute": []}] * 2}, "KeyError.'comm'"),
        ({"ranks": [{"compute": [["0X0", 0, 1]], "comm": []}] * 2}, "cannot read the action '0X0'"),
        ({"ranks": [{"compute": [[5, 0, 1]], "comm": []}] * 2}, "not a timeline: AttributeError"),
        ({"ranks": [{"compute": [["0F0", 0, "soon"]], "comm": []}] * 2}, "could not convert .*soon"),
        ({"ranks": [{"compute": [["0F0", 0]], "comm": []}] * 2}, "not a timeline: TypeError"),
        ({"ranks": [{"compute": [], "comm": [[["mail", 0, 1, 0], 0, 1]]}] * 2}, "'mail' is not a valid MessageKind"),
        ({"schedule": {}}, "a schedule has the keys"),
    ],
)
def test_unreadable_json(change: dict[str, object], message: str) -> None:
    data = json.loads(simulate(by_hand("0F0", "1F0", microbatches=1), Costs()).to_json())
    with pytest.raises(ValueError, match=message):
        Timeline.from_json(json.dumps({**data, **change}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "7"])
def test_no_timeline_at_all(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a timeline: .*; expected the JSON that Timeline.to_json writes"):
        Timeline.from_json(text)


# --- the steady state of overlapping batches ---


@pytest.mark.parametrize("name", ASYNC)
def test_a_window_of_a_stream_has_its_steady_state(name: str) -> None:
    """A run's records of a few batches: the same period, bubble and activations as the whole."""
    schedule = build(name, num_ranks=4, num_microbatches=4, num_batches=20)
    whole = simulate(schedule, Costs(forward=1.0, backward=2.0, latency=0.5, update=0.25))
    window = window_of(whole, 12, 15)
    assert window.batch_seconds == whole.batch_seconds > 12
    assert window.bubble == pytest.approx(whole.bubble)
    assert window.bubble == pytest.approx(1 - 12 / window.batch_seconds)
    assert window.peak_activations == whole.peak_activations == (4, 3, 2, 1)
    assert (window.peak_versions, window.staleness) == (whole.peak_versions, whole.staleness)
    assert Timeline.from_json(window.to_json()) == window


def test_a_flush_has_its_makespan_for_a_batch() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs())
    assert timeline.batch_seconds == timeline.makespan
    assert timeline.peak_versions == (1, 1)
    assert timeline.staleness == (0, 0)


@pytest.mark.parametrize("batches", [1, 2])
def test_too_few_batches_for_a_steady_state(batches: int) -> None:
    """Then it is that of the whole program."""
    schedule = build("2bw", num_ranks=3, num_microbatches=4, num_batches=batches)
    timeline = simulate(schedule, Costs(forward=1.0, backward=2.0))
    assert timeline.batch_seconds == timeline.makespan == (4 * batches + 2) * 3
    assert timeline.bubble == pytest.approx(2 / (4 * batches + 2))


def test_a_stream_that_ran_nothing() -> None:
    schedule = build("2bw", num_ranks=2, num_microbatches=2)
    timeline = Timeline(schedule=schedule, ranks=(RankTrace(compute=()),) * 2, measured=True)
    assert (timeline.bubble, timeline.batch_seconds) == (0.0, 0.0)

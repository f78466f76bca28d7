"""Overlapping spans get lanes of their own; the gaps before actions add up to the idle time by cause."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import Delivery, assign_lanes, find_arrows, find_gaps

from stagewright.schedules import (
    Action,
    Costs,
    Message,
    MessageKind,
    Op,
    RankTrace,
    Span,
    Timeline,
    attribute_idle,
    build,
    simulate,
)

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=30).map(
    lambda pairs: sorted((start, start + length) for start, length in pairs)
)


@given(spans)
def test_spans_of_a_lane_do_not_overlap(spans):
    ends = {}
    for (start, end), lane in zip(spans, assign_lanes(spans), strict=True):
        assert ends.get(lane, start) <= start
        ends[lane] = end


@given(spans)
def test_lanes_are_as_few_as_overlap_at_once(spans):
    at_once = max((sum(s <= at < e for s, e in spans) for at in range(40)), default=0)
    assert len(set(assign_lanes([span for span in spans if span[0] < span[1]]))) == at_once


def delayed(timeline, *, factor):
    """The same run with every rank slower by `factor`, but its actions as long as before: gaps without a cause."""

    def slow(spans):
        return tuple(Span(what, start * factor, start * factor + (end - start)) for what, start, end in spans)

    ranks = tuple(RankTrace(compute=slow(rank.compute), comm=rank.comm) for rank in timeline.ranks)
    return replace(timeline, ranks=ranks, measured=True)


COSTS = Costs(forward=[1.0, 1.5, 0.5, 1.0], backward=[2.0, 2.5, 3.0, 1.0], latency=0.25, update=0.5)


@pytest.mark.parametrize(
    ("name", "num_ranks", "factor"),
    [("gpipe", 4, 1.0), ("1f1b", 4, 1.0), ("interleaved", 2, 1.0), ("1f1b", 4, 1.1), ("interleaved", 2, 1.2)],
)
def test_gaps_add_up_to_the_attribution(name, num_ranks, factor):
    timeline = simulate(build(name, num_ranks=num_ranks, num_microbatches=6), COSTS)
    if factor > 1:
        timeline = delayed(timeline, factor=factor)
    for idle, gaps in zip(attribute_idle(timeline), find_gaps(timeline), strict=True):
        total = {c: sum(getattr(gap, c) for gap in gaps.values()) for c in ("late_peer", "transfer", "unexplained")}
        assert total["late_peer"] == pytest.approx(idle.late_peer + idle.imbalance, abs=1e-12)
        assert total["transfer"] == pytest.approx(idle.transfer, abs=1e-12)
        assert total["unexplained"] == pytest.approx(idle.unexplained, abs=1e-12)
        assert sum(gap.warm_up for gap in gaps.values()) == pytest.approx(idle.warm_up, abs=1e-12)
        assert (idle.unexplained > 0) == (factor > 1)


def test_gap_names_its_largest_cause():
    """Rank 1 gets 1F0 after 1 s of work and 3 s on the way; rank 0 then waits for both, the way back too."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    first, second = find_gaps(simulate(schedule, Costs(forward=1.0, backward=2.0, latency=3.0)))
    assert second[Action(1, Op.F, 0)].cause == "warm_up"
    assert second[Action(1, Op.F, 0)].seconds == 4.0
    assert (first[Action(0, Op.B, 0)].late_peer, first[Action(0, Op.B, 0)].transfer) == (6.0, 3.0)
    assert first[Action(0, Op.B, 0)].cause == "late_peer"
    assert list(first) == [Action(0, Op.B, 0)]


def test_arrows_are_what_crosses_ranks():
    schedule = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    arrows = find_arrows(simulate(schedule, Costs()))
    assert len(arrows) == 3 * 2 * 2  # boundaries x microbatches x directions
    assert Delivery(Message(MessageKind.ACT, 1, 2, 0), Action(1, Op.F, 0), 1, Action(2, Op.F, 0), 0) in arrows
    assert Delivery(Message(MessageKind.GRAD, 2, 1, 1), Action(2, Op.B, 1), 0, Action(1, Op.B, 1), 1) in arrows


def test_an_empty_timeline_has_no_gaps():
    schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    assert find_gaps(Timeline(schedule=schedule, ranks=(RankTrace(compute=()),) * 2)) == ({}, {})

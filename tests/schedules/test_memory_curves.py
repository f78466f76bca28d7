"""Memory over time: by hand, and against a count at every moment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from support.sizes import fitting

from stagewright.schedules import (
    FAMILIES,
    Costs,
    MemoryCurve,
    MemoryPart,
    Op,
    Schedule,
    StageBytes,
    Timeline,
    build,
    memory_curves,
    simulate,
)

from .random_schedules import by_hand, schedules_with_costs, steady, window_of


def at(curve: MemoryCurve, part: MemoryPart, time: float) -> float:
    """The value at a moment; the last of several points there."""
    before = [n for n, when in enumerate(curve.times) if when <= time]
    return curve.parts[part][before[-1]] if part in curve.parts else 0.0


def middles(timeline: Timeline) -> list[float]:
    """Moments at which nothing changes."""
    times = sorted({t for rank in timeline.ranks for _, s, e in (*rank.compute, *rank.comm) for t in (s, e)})
    return [(a + b) / 2 for a, b in pairwise(times)]


def slow_activations(timeline: Timeline, rank: int, time: float, stages: Sequence[StageBytes]) -> float:
    """Look at every microbatch of every stage."""
    spans = {span.what: span for span in timeline.ranks[rank].compute}
    found = 0.0
    forward_only = all(action.op is Op.F for action in spans)
    for (stage, op, k), start, end in spans.values():
        if op is Op.F:
            lasts = [spans[a].end for a in spans if a.stage == stage and a.index == k and a.op in (Op.B, Op.W)]
            over = end if forward_only else lasts[0]
            found += stages[stage].activations * (start <= time < over)
        if op in (Op.B, Op.I):
            found += stages[stage].again * (start <= time < end)
    return found


def slow_workspace(timeline: Timeline, rank: int, time: float, stages: Sequence[StageBytes]) -> float:
    running = [what for what, start, end in timeline.ranks[rank].compute if start <= time < end]
    return sum(getattr(stages[what.stage], "update" if what.op is Op.U else "workspace") for what in running)


def slow_gradients(timeline: Timeline, rank: int, time: float, stages: Sequence[StageBytes]) -> float:
    found = 0.0
    for stage in timeline.schedule.placement[rank]:
        spans = [s for s in timeline.ranks[rank].compute if s.what.stage == stage]
        first = min((end for what, _, end in spans if what.op in (Op.B, Op.W)), default=None)
        last = min((end for what, _, end in spans if what.op is Op.U), default=timeline.end + 1)
        found += stages[stage].gradients * (first is not None and first <= time < last)
    return found


@pytest.mark.thorough
@steady
@given(schedules_with_costs())
def test_every_moment_is_as_counted_one_by_one(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    stages = [
        StageBytes(
            weights=1,
            gradients=2.0**s,
            optimizer=3,
            activations=3.0**s,
            again=5,
            workspace=7 + s,
            output=11,
            update=13 + s,
        )
        for s in range(schedule.num_stages)
    ]
    curves = memory_curves(timeline, stages)
    slow = {
        MemoryPart.ACTIVATIONS: slow_activations,
        MemoryPart.WORKSPACE: slow_workspace,
        MemoryPart.GRADIENTS: slow_gradients,
    }
    for rank, curve in enumerate(curves):
        assert list(curve.times) == sorted(curve.times)
        assert curve.times[0] == timeline.start
        own = len(schedule.placement[rank])
        for time in middles(timeline):
            assert at(curve, MemoryPart.WEIGHTS, time) == own
            assert at(curve, MemoryPart.OPTIMIZER, time) == 3 * own
            for part, count in slow.items():
                assert at(curve, part, time) == count(timeline, rank, time, stages), (rank, part, time)


def test_by_hand() -> None:
    """
    rank 0 | 0F0 | 0F1 |     | 0B0 |     | 0B1 | 0U
    rank 1 |     | 1F0 | 1B0 | 1F1 | 1B1 | 1U
    """
    schedule = by_hand("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2)
    timeline = simulate(schedule, Costs(forward=1.0, backward=1.0, update=1.0))
    stage = StageBytes(weights=100, gradients=10, optimizer=200, activations=5, workspace=1, output=2)
    first, second = memory_curves(timeline, [stage, stage])
    moments = [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
    assert [at(first, MemoryPart.ACTIVATIONS, t) for t in moments] == [5, 10, 10, 10, 5, 5, 0]
    assert [at(first, MemoryPart.WORKSPACE, t) for t in moments[:4]] == [1, 1, 0, 1]
    assert [at(second, MemoryPart.ACTIVATIONS, t) for t in moments[:5]] == [0, 5, 5, 5, 5]
    # Outputs that were sent, until a gradient back tells that they were received, and gradients posted ahead.
    assert [at(first, MemoryPart.MESSAGES, t) for t in moments] == [4, 6, 8, 8, 4, 4, 0]
    assert at(second, MemoryPart.GRADIENTS, 2.5) == 0
    assert at(second, MemoryPart.GRADIENTS, 3.5) == 10
    assert at(second, MemoryPart.GRADIENTS, 99.0) == 0  # the update drops them
    assert first.peak == max(first.total)


@pytest.mark.thorough(but=["gpipe", "2bw"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_hold_versions_and_let_go(name: str) -> None:
    P, M = fitting(name, 3, 6)
    schedule = build(name, num_ranks=P, num_microbatches=M)
    timeline = simulate(schedule, Costs(forward=1.0, latency=0.25, update=0.5))
    stage = StageBytes(weights=100, gradients=10, activations=5, workspace=1, output=2)
    for rank, curve in enumerate(memory_curves(timeline, [stage] * schedule.num_stages)):
        own = len(schedule.placement[rank])
        versions = timeline.peak_versions[rank] if schedule.is_asynchronous else 1
        assert set(curve.parts[MemoryPart.WEIGHTS]) == {100 * own * versions}
        assert max(curve.parts[MemoryPart.ACTIVATIONS]) == 5 * timeline.peak_activations[rank]
        assert curve.parts[MemoryPart.ACTIVATIONS][-1] == 0
        assert curve.parts[MemoryPart.MESSAGES][-1] <= max(curve.parts[MemoryPart.MESSAGES])
        assert curve.parts[MemoryPart.GRADIENTS][-1] == (10 * own if schedule.is_asynchronous else 0)


def test_a_window_begins_with_what_was_there() -> None:
    schedule = build("2bw", num_ranks=3, num_microbatches=4, num_batches=6)
    whole = simulate(schedule, Costs(forward=1.0, latency=0.25, update=0.5))
    window = window_of(whole, 2, 5)
    stages = [StageBytes(weights=100, gradients=10, activations=5, workspace=1, output=2)] * 3
    for seen, every, trace in zip(
        memory_curves(window, stages), memory_curves(whole, stages), window.ranks, strict=True
    ):
        for _, start, end in trace.compute:
            middle = (start + end) / 2
            if start < window.ranks[0].compute[-1].start - 12:  # later the window lacks the last uses
                for part in (MemoryPart.WORKSPACE, MemoryPart.MESSAGES, MemoryPart.GRADIENTS, MemoryPart.WEIGHTS):
                    assert at(seen, part, middle) == at(every, part, middle)


def test_zero_cost_actions_still_count_at_the_peak() -> None:
    schedule = build("gpipe", num_ranks=2, num_microbatches=3)
    stage = StageBytes(activations=5, workspace=9)
    for curve in memory_curves(simulate(schedule, Costs(forward=0.0, backward=0.0)), [stage, stage]):
        assert curve.peak == 3 * 5 + 9


def test_bad_figures_are_named() -> None:
    with pytest.raises(ValueError, match="activations=-1"):
        StageBytes(activations=-1)
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs())
    with pytest.raises(ValueError, match="1 stages for a schedule of 2"):
        memory_curves(timeline, [StageBytes()])

"""Sums that keep their ranks busy: what runs beside them gets on at the rate of what is left of the processor."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from support.inside import MOVE_OPS, Processor, ScheduleWiring, Taken, own_durations, replicate
from support.replay_cases import cases

from stagewright.schedules import AllReduce, Costs, Link, Links, Op, build, lower_bound, simulate

CASES = [each for each in cases(150, seed=1) if each.costs.sum_busy != 0.0]


@pytest.mark.parametrize(
    ("taken", "end"),
    [
        ([], 13.0),
        ([(0.0, 10.0, 0.5)], 13.0),  # before it
        ([(12.0, 20.0, 0.5)], 14.0),  # of its 3 seconds one is left, at half the rate
        ([(11.0, 12.0, 0.5)], 13.5),
        ([(11.0, 15.0, 1.0)], 17.0),  # stands still meanwhile
        ([(8.0, 12.0, 0.5), (11.0, 13.0, 0.75)], 15.0),  # 1/2 + 1/4 + 1/4 by 13, then 2 at the whole rate
        ([(13.0, 20.0, 1.0)], 13.0),  # behind it
    ],
)
def test_seconds_beside(taken: list[tuple[float, float, float]], end: float) -> None:
    """Three seconds of work from 10 on."""
    processor = Processor()
    for each in taken:
        processor.take(Taken(*each))
    assert processor.end(10.0, 3.0) == pytest.approx(end)


def test_nothing_to_do_takes_no_time_beside_a_sum() -> None:
    processor = Processor()
    processor.take(Taken(0.0, 5.0, 1.0))
    assert processor.end(2.0, 0.0) == 2.0


def test_a_sum_of_two_replicas_slows_both_down() -> None:
    """
    rank 0   B1 of 2 s   B0 of 4 s ........           the last chunk's sum (4 s, half busy) from 4 to 8
    rank 1   B1 of 2 s   B0 of 4 s ........           beside B0: 2 s are done by 8, 2 more take as long
    """
    schedule = replicate(build("interleaved", num_ranks=1, num_microbatches=1, num_chunks=2), 2)
    costs = Costs(forward=1.0, backward=[4.0, 2.0], reduce_grad=[1.0, 4.0])
    half = simulate(schedule, replace(costs, sum_busy=0.5))
    assert simulate(schedule, costs).makespan == 2 + 2 + 4 + 1
    assert half.makespan == 2 + 2 + 4 + 2 + 1
    spans = {span.what: (span.start, span.end) for span in half.ranks[1].compute}
    assert [spans[each] for each in sorted(spans) if each.op is Op.B] == [(4.0, 10.0), (2.0, 4.0)]
    # Stage 0's sum keeps its ranks as busy, and nothing is left to slow down.
    assert simulate(schedule, replace(costs, sum_busy=[1.0, 0.5])) == half


def test_updates_share_the_processor_with_sums_and_gathers() -> None:
    """Two chunks, each updated in parts: U0 at 8, beside it the all-reduce of stage 1 (from 4 to 12), then gathers.

    Stage 0's sum queues to 14. U0 runs from 14 to 16, its gather from 16 to 20, beside U1.
    """
    schedule = replicate(build("interleaved", num_ranks=1, num_microbatches=1, num_chunks=2), 2)
    around = ((0, 1), (1, 0))
    links = Links(
        network=Link(),
        sums=(
            AllReduce(stage=0, seconds=2.0, gather=4.0, ways=around),
            AllReduce(stage=1, seconds=8.0, gather=4.0, ways=around),
        ),
    )
    costs = Costs(forward=1.0, backward=[2.0, 2.0], update=[2.0, 3.0], sum_busy=0.5)
    found = simulate(schedule, costs, links)
    updates = [(s.what.stage, s.start, s.end) for s in found.ranks[0].compute if s.what.op is Op.U]
    # B0 runs beside the first sum from 4 to 8; U1 gets on by 2 of its 3 seconds beside the gather, which ends at 20.
    assert updates == [(0, 14.0, 16.0), (1, 16.0, 21.0)]
    assert found.makespan == 25.0


@pytest.mark.thorough(but=["0", "117"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_actions_get_what_is_left_of_the_processor(number: int) -> None:
    """Each as many seconds as it costs; and it starts as early as it can, given how long all of them took."""
    schedule, costs, links = CASES[number].schedule, CASES[number].costs, CASES[number].links
    timeline = simulate(schedule, costs, links)
    table = costs.table_for(schedule)
    steps = ScheduleWiring(schedule, table, links).joint_steps
    seconds = {(each.stages, each.op): each.seconds for each in steps if each.op not in MOVE_OPS}
    for trace in timeline.ranks:
        taken = [
            (span.end - seconds[what.stages, what.op], span.end, max(table.sum_busy[s] for s in what.stages))
            for span in trace.collectives
            if (what := span.what)
        ]
        for (stage, op, k), start, end in trace.compute:
            cost = table.update[stage] if op is Op.U else table.of(op, stage, k)
            assert rate_of(taken, start, end) == pytest.approx(cost, abs=1e-9)
    assert lower_bound(schedule, costs, links) <= timeline.makespan * (1 + 1e-9)
    if links is None and not any(op is Op.U for program in schedule.compute_programs for _, op, _ in program):
        again = simulate(schedule, own_durations(schedule, timeline, replace(costs, sum_busy=0.0)))
        for one, other in zip(timeline.ranks, again.ranks, strict=True):
            for a, b in zip(one.compute, other.compute, strict=True):
                if a.what.op is not Op.U:
                    assert a == (b.what, pytest.approx(b.start), pytest.approx(b.end))


def rate_of(taken: list[tuple[float, float, float]], start: float, end: float) -> float:
    """Seconds of a whole processor that are left between two moments."""
    moments = sorted({start, end, *(at for each in taken for at in each[:2] if start < at < end)})
    left = 0.0
    for a, b in pairwise(moments):
        left += (b - a) * (1 - max((share for x, y, share in taken if x < (a + b) / 2 < y), default=0.0))
    return left

"""Background work in the waits of a schedule: where it goes in each family, and that nobody is later for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.inside import RankRecord, assemble_timeline, step_line, trace_file

from stagewright.schedules import (
    Action,
    Costs,
    Link,
    Links,
    Op,
    Schedule,
    ScheduleError,
    Span,
    Timeline,
    attribute_idle,
    build,
    check,
    check_lowered,
    critical_path,
    ideal_makespan,
    lower,
    lower_bound,
    simulate,
    with_fill,
    with_offload,
)

SIZES = {"num_ranks": 4, "num_microbatches": 8}
COSTS = Costs(forward=1.0, backward=2.0, fill=0.75)


def share(timeline: Timeline) -> float:
    idle = attribute_idle(timeline)
    return sum(each.fill for each in idle) / sum(each.seconds for each in idle)


def starts(timeline: Timeline) -> list[tuple[object, ...]]:
    return [rank.compute for rank in timeline.ranks]


# (makespan, share of the idle time that pieces of 0.75 fill; a forward is 1.0, a backward 2.0)
EXPECTED = {
    "1f1b": (33.0, 0.896),
    "gpipe": (33.0, 0.958),
    "interleaved": (57.0, 0.854),
    "zb-h1": (27.0, 0.875),
    "zb-v": (51.0, 0.875),
    "2bw": (201.0, 0.896),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_how_much_each_family_fills(name: str) -> None:
    plain = build(name, **SIZES)
    filled = with_fill(plain, COSTS)
    before, timeline = simulate(plain, COSTS), simulate(filled, COSTS)
    assert (timeline.makespan, round(share(timeline), 3)) == EXPECTED[name]
    assert starts(timeline) == starts(before)
    by_hand = []
    for rank in before.ranks:
        ends, begins = [0.0, *(span.end for span in rank.compute)], [*(s.start for s in rank.compute), before.end]
        by_hand.append(sum((begin - end) // 0.75 * 0.75 for end, begin in zip(ends, begins, strict=True)))
    assert [idle.fill for idle in attribute_idle(timeline)] == by_hand
    assert [idle.seconds for idle in attribute_idle(timeline)] == [idle.seconds for idle in attribute_idle(before)]
    assert share(simulate(filled, replace(COSTS, fill=0.0))) == pytest.approx(1.0)  # pieces as small as one likes


@pytest.mark.parametrize("name", EXPECTED)
def test_nobody_is_later(name: str) -> None:
    """Over links that queue, with updates and a norm: a sound schedule, and who reads it says what it said without."""
    costs = replace(COSTS, input_grad=1.1, weight_grad=0.6, latency=0.2, update=0.3, norm=0.1, overhead=0.01)
    links = Links(network=Link(seconds_per_byte=1.0), activation_bytes=0.1)
    plain = build(name, **SIZES)
    filled = with_fill(plain, costs, links)
    assert filled.compute_programs == plain.compute_programs
    assert with_fill(filled, costs, links) == filled
    assert check(filled) == check(plain)
    before, timeline = simulate(plain, costs, links), simulate(filled, costs, links)
    assert starts(timeline) == starts(before)
    assert (timeline.bubble, timeline.peak_activations) == (before.bubble, before.peak_activations)
    assert lower_bound(filled, costs) == lower_bound(plain, costs)
    assert ideal_makespan(filled, costs) == ideal_makespan(plain, costs)
    assert critical_path(timeline) == critical_path(before)
    for rank, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True):
        assert idle.fill == pytest.approx(sum(end - start for what, start, end in rank.moves if what.op is Op.FILL))
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert Schedule.from_json(filled.to_json()) == filled
    if not filled.is_asynchronous:
        check_lowered(lower(filled))


def test_where_it_goes_by_hand() -> None:
    """F 1, B 2, pieces of 2: the wait of 1 in front of 1F0, and the one of 1 behind 1B1, are too short."""
    filled = with_fill(build("gpipe", num_ranks=2, num_microbatches=2), replace(COSTS, fill=2.0))
    assert [" ".join(map(str, program)) for program in filled.programs] == [
        "0F0 0F1 0FILL0 0B0 0B1",
        "1F0 1F1 1B0 1B1 1FILL1",
    ]
    assert filled.grid().splitlines() == [
        "rank 0 | F0 F1 .  .  B0 B1",
        "       |             ~0",
        "rank 1 | .  F0 F1 B0 B1 .",
        "       |                   ~1",
    ]
    first, last = simulate(filled, replace(COSTS, fill=2.0)).ranks
    assert first.moves == ((Action(0, Op.FILL, 0), 2.0, 4.0),)
    assert last.moves == ((Action(1, Op.FILL, 1), 7.0, 9.0),)
    idle, other = attribute_idle(simulate(filled, replace(COSTS, fill=1.5)))
    assert (idle.fill, idle.late_peer + idle.imbalance) == (3.0, 0.0)
    assert (other.fill, other.warm_up, other.drain) == (1.5, 1.0, 0.5)


def test_the_longest_waits_are_taken_first() -> None:
    plain = build("1f1b", **SIZES)
    costs = replace(COSTS, fill=0.5)
    some = with_fill(plain, costs, seconds_per_rank=3.0)
    assert [sum(a.op is Op.FILL for a in program) for program in some.programs] == [1, 1, 1, 1]
    for idle, rank in zip(attribute_idle(simulate(some, costs)), simulate(some, costs).ranks, strict=True):
        assert idle.fill >= 3.0
        assert len(rank.moves) == 1


def test_a_replica_without_work_keeps_its_updates() -> None:
    work, idle = (Action(0, Op.F, 0), Action(0, Op.B, 0), Action(0, Op.U, 0)), (Action(0, Op.U, 0),)
    plain = Schedule(
        name="by hand", placement=((0,), (0,)), programs=(work, idle), num_microbatches=1, weight_rule="stashing"
    )
    assert with_fill(plain, COSTS).compute_programs == plain.compute_programs


def test_forwards_alone_hold_as_much() -> None:
    for plain in (build("gpipe", **SIZES), build("interleaved", **SIZES)):
        forwards = plain.forward_only()
        assert check(with_fill(forwards, COSTS)) == check(forwards)
        assert with_fill(plain, COSTS).forward_only() == forwards


def test_beside_activations_that_move() -> None:
    costs = replace(COSTS, fill=0.25, offload=0.5, reload=0.5)
    moved = with_offload(build("1f1b", **SIZES), costs=costs)
    filled = with_fill(moved, costs)
    timeline = simulate(filled, costs)
    assert starts(timeline) == starts(simulate(moved, costs))
    assert {what.op for rank in timeline.ranks for what, *_ in rank.moves} == {Op.OFFLOAD, Op.RELOAD, Op.FILL}
    assert check(filled) == check(moved)


def test_a_measured_step_begins_with_its_first_action_and_traces_keep_fills() -> None:
    fills = (Span(Action(0, Op.FILL, 0), 7.0, 10.5), Span(Action(0, Op.FILL, 1), 13.0, 13.5))
    lane = tuple(Span(Action.parse(what), at, at + 1.0) for what, at in (("0F0", 10.5), ("0B0", 11.5), ("0F1", 13.5)))
    record = RankRecord(compute=lane, arrivals=(), fills=fills)
    assert trace_file.parse_step(trace_file.parse_line(step_line("a", 0, {0: record}).strip())) == {0: record}
    other = RankRecord(compute=(Span(Action(1, Op.F, 0), 9.0, 10.0),), arrivals=())
    timeline = assemble_timeline(build("1f1b", num_ranks=2, num_microbatches=2), [record, other])
    assert timeline.makespan == 5.5  # since 9.0
    assert timeline.ranks[0].moves == (fills[0]._replace(start=0.0, end=1.5), fills[1]._replace(start=4.0, end=4.5))
    assert attribute_idle(timeline)[0].fill == 2.0


def test_what_is_no_place_is_refused() -> None:
    plain = build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="seconds_per_rank=0: expected a number of seconds above 0"):
        with_fill(plain, COSTS, seconds_per_rank=0)
    with pytest.raises(ValueError, match="fill=-1: expected a finite number of seconds"):
        Costs(fill=-1)
    filled = with_fill(plain, COSTS)
    with pytest.raises(ScheduleError, match=r"does background work \(0FILL0, ...\), which a CSV table cannot say"):
        filled.to_csv()
    with pytest.raises(ScheduleError, match="0FILL0 does background work, which a CSV table cannot say"):
        Schedule.from_csv("0F0,0FILL0,0B0\n")
    other = replace(plain, programs=(plain.programs[0], (Action(0, Op.FILL, 0), *plain.programs[1])))
    with pytest.raises(ScheduleError, match=r"0FILL0 on rank 1, position 0: this rank holds the stages \[1\]"):
        check(other)

"""Forwards and backwards that run together: exchanges of one hide behind compute of the other."""

from dataclasses import replace
from itertools import pairwise

import pytest
from support.inside import Dependencies, Needs, replicate, schedule_without

from stagewright.schedules import (
    Action,
    Costs,
    Link,
    Links,
    Op,
    Schedule,
    ScheduleError,
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
    with_overlap,
)

SHAPES = [
    ("dualpipe", 2, 8),
    ("dualpipe", 4, 10),
    ("dualpipe-v", 2, 5),
    ("dualpipe-v", 3, 8),
    ("interleaved", 3, 6),
    ("hanayo", 4, 8),
]


def paired(name, P, M):
    return with_overlap(build(name, num_ranks=P, num_microbatches=M))


def pair(f, x, b, y):
    schedule = paired("dualpipe-v", 1, 2)
    halves = {"input_grad": b / 2 + y, "weight_grad": b / 2}
    costs = Costs(forward=f + x, backward=b + y, forward_exchange=x, backward_exchange=y, **halves)
    return schedule, simulate(schedule, costs)


@pytest.mark.parametrize(
    ("f", "x", "b", "y"),
    [(2, 1, 4, 1), (2, 1, 4, 3), (2, 5, 4, 1), (1, 6, 4, 5), (3, 0, 4, 2), (3, 2, 4, 0), (0, 2, 0, 3), (2, 4, 4, 2)],
)
def test_a_pair_takes_the_longer_of_each_compute_and_the_others_exchange(f, x, b, y):
    schedule, timeline = pair(f, x, b, y)
    (forward, backward), *_ = schedule.together.items()
    spans = {span.what: span for span in timeline.ranks[0].compute}
    assert spans[forward].end - spans[forward].start == f + x  # its output leaves as early as without a pair
    assert spans[backward].end - spans[forward].start == max(f, y) + max(b, x)
    # The lane of exchanges carries one thing at a time, all of it, and F's at its end.
    lane = timeline.ranks[0].exchanges
    assert all(one.end <= then.start + 1e-12 for one, then in pairwise(lane))
    alone = [a for a in timeline.ranks[0].actions if a.op is not Op.W]
    assert sum(s.end - s.start for s in lane) == pytest.approx(sum(x if a.op is Op.F else y for a in alone))


def fluid(f, x, b, y):
    """Seconds of a pair, step by step: F alternates compute and exchange in any parts, and B takes what F leaves free:
    the processor while F exchanges, the lane while F computes; after F both of B's follow each other."""
    now, left_b, left_y = 0, b, y
    for kind in "c" * f + "x" * x:
        now += 1
        if kind == "c":
            left_y = max(0, left_y - 1)
        else:
            left_b = max(0, left_b - 1)
    return now + left_b + left_y


def brute(schedule, costs, latency):
    """An independent simulation: all actions' times by repeated passes over their needs, until none changes."""
    needs = Needs(schedule.programs, schedule.stage_edges, num_slices=1)
    together = schedule.together
    begins_with = {backward: forward for forward, backward in together.items()}
    owner = schedule.owner
    f, x, b, y = costs
    half = (b + y) / 2

    def seconds(action):
        if action in begins_with:
            return fluid(f, x, b, y) - (f + x)
        return {"F": f + x, "B": b + y, "I": half, "W": half}[action.op]

    def ready(action, ends):
        own = owner(action.stage, action.index)
        far = [need for need in needs.of(action) if owner(need.stage, need.index) != own]
        return max((ends.get(need, 0) + latency for need in far), default=0)

    ends = {}
    changed = True
    while changed:
        changed = False
        for program in schedule.programs:
            now = 0
            for action in program:
                start = max(now, ready(action, ends))
                if action in together:
                    start = max(start, ready(together[action], ends))
                now = start + seconds(action)
                if ends.get(action) != now:
                    ends[action], changed = now, True
    return ends


@pytest.mark.thorough(but=["0-own0-dualpipe-v-2-5"])
@pytest.mark.parametrize(("name", "P", "M"), SHAPES)
@pytest.mark.parametrize("own", [(2, 1, 4, 2), (3, 4, 5, 1), (1, 3, 2, 8)])
@pytest.mark.parametrize("latency", [0, 1])
def test_times_are_those_of_an_independent_simulation(name, P, M, own, latency):
    schedule, (f, x, b, y) = paired(name, P, M), own
    check(schedule)
    costs = Costs(forward=f + x, backward=b + y, forward_exchange=x, backward_exchange=y, latency=latency)
    timeline = simulate(schedule, costs)
    found = {span.what: span.end for rank in timeline.ranks for span in rank.compute}
    assert found == pytest.approx(brute(schedule, own, latency))
    assert lower_bound(schedule, costs) <= timeline.makespan + 1e-9
    assert sum(rank.busy for rank in timeline.ranks) <= len(timeline.ranks) * timeline.makespan + 1e-9
    assert ideal_makespan(schedule, costs) == pytest.approx(max(rank.busy for rank in timeline.ranks))
    path = critical_path(timeline)  # without a gap from begin to end
    assert sum(step.end - step.start for step in path.steps) == pytest.approx(timeline.makespan)
    for rank, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True):
        assert idle.seconds + rank.busy == pytest.approx(timeline.makespan)


@pytest.mark.parametrize(("name", "P", "M"), SHAPES)
def test_without_pairs_exchanges_are_paid_in_full(name, P, M):
    schedule = build(name, num_ranks=P, num_microbatches=M)
    plain, own = (
        Costs(forward=3.0, backward=6.0),
        Costs(forward=3.0, backward=6.0, forward_exchange=1.0, backward_exchange=2.0),
    )
    one, other = simulate(schedule, plain), simulate(schedule, own)
    assert [rank.compute for rank in one.ranks] == [rank.compute for rank in other.ranks]
    assert lower_bound(schedule, plain) == lower_bound(schedule, own)
    assert not any(rank.exchanges for rank in one.ranks)
    ops = {Op.F: 1.0, Op.B: 2.0, Op.I: 2.0}
    for rank in other.ranks:
        assert sum(s.end - s.start for s in rank.exchanges) == pytest.approx(
            sum(ops.get(a.op, 0) for a in rank.actions)
        )


@pytest.mark.parametrize(("name", "P", "M"), SHAPES[:4])
def test_over_links_pairs_do_not_overtake_what_they_wait_for(name, P, M):
    schedule = paired(name, P, M)
    links = Links(network=Link(latency=0.25, seconds_per_byte=1.0), activation_bytes=1.0)
    costs = Costs(forward=3.0, backward=6.0, forward_exchange=1.0, backward_exchange=2.0)
    timeline = simulate(schedule, costs, links)
    arrived = [{s.what: s.end for s in rank.comm} for rank in timeline.ranks]

    needs = Dependencies(replace(schedule, overlapped=()))
    for rank, trace in enumerate(timeline.ranks):
        starts = {span.what: span.start for span in trace.compute}
        for forward, backward in schedule.together.items():
            if forward in starts:
                for each in (*needs.arrivals(forward), *needs.arrivals(backward)):
                    assert arrived[rank][each.message] <= starts[forward] + 1e-9
    assert lower_bound(schedule, costs, links) <= timeline.makespan


@pytest.mark.parametrize(("name", "P", "M"), SHAPES)
def test_lowered_pairs_wait_for_the_inputs_of_both(name, P, M):
    schedule = paired(name, P, M)
    lowered = lower(schedule)
    check_lowered(lowered)
    for program in lowered.programs:
        for backward in schedule.together.values():
            assert backward not in program.inputs
    plain = lower(replace(schedule, overlapped=()))
    count = [sum(map(len, program.inputs.values())) for program in plain.programs]
    assert [sum(map(len, program.inputs.values())) for program in lowered.programs] == count


def test_json_csv_and_other_forms_keep_pairs():
    schedule = paired("dualpipe-v", 2, 5)
    assert Schedule.from_json(schedule.to_json()) == schedule
    table = build("dualpipe-v", num_ranks=2, num_microbatches=5).to_csv(overlap="pairs")
    read = Schedule.from_csv(table, overlap="pairs")
    assert read.overlapped
    assert set(read.overlapped) <= set(schedule.overlapped)
    some = replace(schedule, overlapped=schedule.overlapped[::2] * 2)
    assert some == replace(schedule, overlapped=schedule.overlapped[::2])
    assert set(Schedule.from_csv(some.to_csv(overlap="pairs"), overlap="pairs").overlapped) == set(some.overlapped)
    assert Schedule.from_csv(table).overlapped == ()
    assert read.programs == schedule.programs
    timeline = simulate(schedule, Costs(forward=2.0, forward_exchange=1.0))
    assert Timeline.from_json(timeline.to_json()) == timeline
    moved = timeline.shifted(1.0)
    assert moved.ranks[0].exchanges[0].start == timeline.ranks[0].exchanges[0].start + 1.0
    schedule = paired("dualpipe-v", 2, 4)
    assert not schedule.forward_only().overlapped
    both = replicate(schedule, 2)
    check(both)
    assert len(both.overlapped) == 2 * len(schedule.overlapped)
    assert not schedule_without(both, [1]).overlapped


def test_orders_that_deadlock_as_pairs_are_found():
    # 2F1 waits for 1B0 with 0B0, and 1B0 comes after 3F1, which waits for 2F1.
    programs = ["0F0 0F1 2F0 2B0 2F1 0B0 2B1 0B1", "1F0 1F1 3F0 3B0 3F1 1B0 3B1 1B1"]
    apart = Schedule(name="own", placement=((0, 2), (1, 3)), programs=programs, num_microbatches=2)
    check(apart)
    together = replace(apart, overlapped=(Action(2, Op.F, 1),))
    with pytest.raises(ScheduleError, match=r"deadlock: a cycle of 2 ranks(.|\n)*2F1\] 0B0 2B1\) waits for 1B0"):
        check(together)
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(together, Costs())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"overlapped": (Op.F(0, 0),)}, "overlapped=0F0: expected a forward with the whole backward of another"),
        ({"overlapped": (Op.B(0, 0),)}, "overlapped=0B0: expected a forward"),
        ({"overlapped": Op.F(0, 0)}, r"overlapped=0F0: expected forwards, such as \(Op.F\(0, 3\),\)"),
        ({"overlapped": ("0F",)}, r"overlapped=\('0F',\): expected forwards"),
        ({"overlapped": 5}, "overlapped=5: expected forwards"),
    ],
)
def test_what_is_no_pair_is_refused(change, words):
    with pytest.raises(ScheduleError, match=words):
        replace(build("dualpipe-v", num_ranks=2, num_microbatches=4), **change)


def test_a_schedule_without_pairs_is_refused():
    with pytest.raises(ScheduleError, match="'1f1b' has no forward directly before the backward of another stage"):
        with_overlap(build("1f1b", num_ranks=2, num_microbatches=4))


@pytest.mark.parametrize("overlap", ["some", True])
def test_a_table_is_read_with_or_without_pairs(overlap):
    with pytest.raises(ValueError, match="expected 'none' or 'pairs'"):
        Schedule.from_csv("0F0,0B0\n", overlap=overlap)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_an_exchange_is_a_part_of_its_action(name):
    costs = Costs(forward=1.0, backward=2.0, **{f"{name}_exchange": [0.5, 3.0]})
    with pytest.raises(ValueError, match=f"{name}_exchange of stage 1 is 3.0 of the"):
        costs.table(num_stages=2)


def test_factors_of_indices_scale_exchanges():
    costs = Costs(forward=3.0, backward=6.0, forward_exchange=1.0, backward_exchange=2.0, index_factors=[1.0, 2.0])
    table = costs.table(num_stages=1, num_indices=2)
    assert [table.exchange(Op.F(0, k)) for k in range(2)] == [1.0, 2.0]
    assert [table.exchange(Op.I(0, k)) for k in range(2)] == [2.0, 4.0]
    assert table.exchange(Op.W(0, 0)) == 0.0
    assert [table.without_exchanges.of(Op.F, 0, k) for k in range(2)] == [2.0, 4.0]

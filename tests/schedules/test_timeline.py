"""Timelines: the two bubbles, peaks, JSON; clocks of hosts, whose offsets have bounds that hold.

Times of ranks by cause, and inputs as measured steps show them.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.inside import (
    MAX_DRIFT,
    Cause,
    ClockReading,
    Input,
    Ping,
    assemble_timeline,
    clock_note,
    early_messages,
    find_gaps,
    measured_inputs,
    offset_at,
    read_clock,
)

from stagewright.schedules import (
    Action,
    Collective,
    Costs,
    Idle,
    Link,
    Links,
    Message,
    MessageKind,
    Op,
    RankTrace,
    Schedule,
    Span,
    Timeline,
    attribute_idle,
    build,
    check,
    critical_path,
    simulate,
)

from .random_schedules import ASYNC, by_hand, paused, quarters, schedules_with_costs, steady, window_of
from .reference import seconds
from .test_records import records_of


def test_nothing_happened() -> None:
    timeline = Timeline(schedule=build("gpipe", num_ranks=2, num_microbatches=1), ranks=(RankTrace(compute=()),) * 2)
    assert (timeline.makespan, timeline.span, timeline.bubble, timeline.span_bubble) == (0, 0, 0, 0)
    stream = Timeline(schedule=build("2bw", num_ranks=2, num_microbatches=2), ranks=(RankTrace(compute=()),) * 2)
    assert (stream.bubble, stream.batch_seconds) == (0, 0)
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


def test_times_may_begin_anywhere() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs(latency=1.0, update=0.5))
    later = timeline.shifted(100.5)
    assert (later.start, later.end) == (timeline.start + 100.5, timeline.end + 100.5)
    for name in ("makespan", "span", "makespan_bubble", "span_bubble", "peak_activations", "measured", "schedule"):
        assert getattr(later, name) == getattr(timeline, name)
    assert later.ranks[1].comm[0] == Span(Message(MessageKind.ACT, 0, 1, 0), 101.5, 102.5)


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
        ({"ranks": [{"compute": [["0F0", 0, "soon"]], "comm": []}] * 2}, "could not convert .*soon"),
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


@pytest.mark.parametrize("batches", [1, 2])
def test_too_few_batches_for_a_steady_state(batches: int) -> None:
    """Then it is that of the whole program."""
    schedule = build("2bw", num_ranks=3, num_microbatches=4, num_batches=batches)
    timeline = simulate(schedule, Costs(forward=1.0, backward=2.0))
    assert timeline.batch_seconds == timeline.makespan == (4 * batches + 2) * 3
    assert timeline.bubble == pytest.approx(2 / (4 * batches + 2))


class Apart:
    """Two hosts: this one's clock shows `ahead + (1 + drift) * t` where that of rank 0 shows t."""

    def __init__(self, *, ahead: float, drift: float = 0.0) -> None:
        self.ahead, self.drift = ahead, drift

    def here(self, t: float) -> float:
        return self.ahead + (1 + self.drift) * t

    def ping(self, t: float, *, there: float, back: float) -> Ping:
        return self.here(t), t + there, self.here(t + there + back)

    def offset(self, t: float) -> float:
        return t - self.here(t)


def test_the_quickest_ping_counts_and_an_uneven_way_stays_within_its_error() -> None:
    """All of the round trip may be the way there, or the way back: the offset is off by half of it, never by more."""
    hosts = Apart(ahead=1000.0)
    slow = hosts.ping(0.0, there=0.25, back=0.25)
    assert read_clock([slow]) == ClockReading(1000.25, -1000.0, 0.25)
    assert read_clock([slow, hosts.ping(1.0, there=0.125, back=0.0)]).error == 0.0625
    for there, back, off in ((0.125, 0.0, 0.0625), (0.0, 0.125, -0.0625), (0.0625, 0.0625, 0.0)):
        reading = read_clock([slow, hosts.ping(2.0, there=there, back=back)])
        assert (reading.offset, reading.error) == (-1000.0 + off, 0.0625)
    with pytest.raises(ValueError, match="no ping: expected at least one round trip"):
        read_clock([])


ROUND_TRIP = st.floats(0, 0.1, allow_subnormal=False)


@steady
@given(
    st.floats(-1e6, 1e6),
    st.floats(-5e-5, 5e-5),
    st.lists(st.tuples(ROUND_TRIP, ROUND_TRIP), min_size=1, max_size=5),
    st.lists(st.tuples(ROUND_TRIP, ROUND_TRIP), min_size=1, max_size=5),
    st.floats(0, 1),
)
def test_what_lies_between_two_readings_is_within_the_error(
    ahead: float, drift: float, first: list[tuple[float, float]], last: list[tuple[float, float]], part: float
) -> None:
    hosts = Apart(ahead=ahead, drift=drift)
    ends = [
        read_clock(hosts.ping(at + k, there=a, back=b) for k, (a, b) in enumerate(pings))
        for at, pings in ((0.0, first), (3600.0, last))
    ]
    t = 5 + part * 3590
    offset, error = offset_at(ends, hosts.here(t))
    assert abs(offset - hosts.offset(t)) <= error * (1 + 1e-3) + 1e-6  # seconds of a drifting clock, and of floats
    assert error <= max(end.error for end in ends) * (1 + 1e-12)


def test_drift_is_taken_out_between_readings_and_allowed_for_outside() -> None:
    readings = [ClockReading(10.0, 1.0, 0.25), ClockReading(20.0, 3.0, 0.75)]
    assert offset_at(readings, 10.0) == (1.0, 0.25)
    assert offset_at(readings, 15.0) == (2.0, 0.5)
    assert offset_at(readings, 17.5) == (2.5, 0.625)
    assert offset_at(readings, 120.0) == (3.0, 0.75 + 100 * MAX_DRIFT)
    assert offset_at(readings, 0.0) == (1.0, 0.25 + 10 * MAX_DRIFT)
    assert offset_at(readings[:1], 1010.0) == (1.0, 0.25 + 1000 * MAX_DRIFT)
    assert offset_at([], 5.0) == (0.0, 0.0)
    three = [*readings, ClockReading(30.0, 0.0, 0.0)]
    assert (offset_at(three, 15.0), offset_at(three, 25.0)) == ((2.0, 0.5), (1.5, 0.375))
    twice = [readings[0], readings[0]]
    assert offset_at(twice, 10.0) == (1.0, 0.25)


def test_a_message_before_its_time_is_told_with_what_the_clocks_explain() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    records = records_of(simulate(schedule, Costs(latency=0.25)))
    wrong = replace(records[1], offset=-0.5)  # the truth is 0: rank 1 seems half a second early
    within = assemble_timeline(schedule, [records[0], replace(wrong, error=0.5)])
    early = early_messages(within)
    assert [(tuple(message), *seconds) for message, *seconds in early] == [(("act", 0, 1, 0), 0.25, 0.5)]
    assert clock_note(within) == (
        "clocks of hosts aligned to ±500 ms; by them 1 message came up to 250 ms before being sent, which that explains"
    )
    beyond = assemble_timeline(schedule, [records[0], replace(wrong, error=0.125)])
    assert clock_note(beyond).endswith("before being sent, 1 of them by more than that explains")
    for rank in within.ranks:  # nothing is drawn backwards
        assert all(start <= end for _, start, end in (*rank.compute, *rank.comm))
    assert clock_note(assemble_timeline(schedule, [records[0], replace(records[1], error=1e-5)])) == (
        "clocks of hosts aligned to ±10.0 us"
    )
    assert clock_note(assemble_timeline(schedule, records)) == ""


NONE = Idle()


def check_sums(timeline: Timeline) -> None:
    for rank, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True):
        assert sum(idle) == timeline.makespan - rank.busy
        assert all(seconds >= 0 for seconds in idle)


@pytest.mark.thorough
@steady
@given(schedules_with_costs(), quarters, st.booleans(), st.sampled_from((0.0, 0.5, 1.0)))
@example(
    (build("zb-v", num_ranks=4, num_microbatches=8), Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)),
    0.25,
    True,
    0.0,
)
@example((build("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2), Costs(forward=1.0)), 0.25, True, 0.0)
def test_a_rank_that_waits_for_its_own_message_to_leave_waits_for_a_transfer(
    case: tuple[Schedule, Costs], a_byte: float, meets: bool, held: float
) -> None:
    schedule, costs = case
    links = Links(network=Link(seconds_per_byte=a_byte, blocks=True, meets=meets, buffer=held), activation_bytes=1.0)
    timeline = simulate(schedule, costs, links)
    check_sums(timeline)
    assert all(made <= arrived for rank in timeline.ranks for _, made, arrived in rank.comm)
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


def test_an_even_pipeline_and_waiting_for_a_rank_with_more_work() -> None:
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
    # Rank 0 works 4, rank 1 works 12: 8 seconds of rank 0 are lost in any order, one more in this one.
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


def test_waiting_for_updates_and_for_nothing() -> None:
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


def test_what_is_around_no_action_or_unexplained() -> None:
    """Nothing says why rank 0 waited for a gradient of a batch before the window."""
    schedule = build("pipedream", num_ranks=2, num_microbatches=1)
    compute = (Span(Action.parse("0F5"), 0.0, 1.0), Span(Action.parse("0B4"), 3.0, 5.0))
    other = (Span(Action.parse("1F5"), 1.0, 2.0), Span(Action.parse("1B5"), 2.0, 4.0))
    window = Timeline(schedule=schedule, ranks=(RankTrace(compute=compute), RankTrace(compute=other)), measured=True)
    assert attribute_idle(window)[0] == NONE._replace(unexplained=2.0)
    # One rank of two chunks: behind the last chunk's backward its gradients are copied and sent off for 4 s.
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

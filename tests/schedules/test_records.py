"""Records of ranks put together: clocks apart, ranks of which nothing is known, windows of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.inside import (
    NOTHING_SHARED,
    Dependencies,
    RankRecord,
    assemble_stream,
    assemble_timeline,
    find_gaps,
    make_calls,
)

from stagewright.schedules import (
    Action,
    Collective,
    Costs,
    Idle,
    Message,
    MessageKind,
    Op,
    Span,
    StageBytes,
    Timeline,
    attribute_idle,
    build,
    compare,
    critical_path,
    memory_curves,
    simulate,
)


def records_of(timeline: Timeline, *, ahead: Sequence[float] = ()) -> list[RankRecord]:
    """Records that the ranks of a simulated run would have made, each by a clock so far ahead of rank 0's [s]."""
    needs = Dependencies(timeline.schedule)
    clocks = ahead or [0.0] * len(timeline.ranks)
    arrived = {span.what: span.end for trace in timeline.ranks for span in trace.comm}
    records = []
    for trace, by in zip(timeline.ranks, clocks, strict=True):
        idle_since, arrivals = 0.0, []
        for what, _, end in trace.compute:
            arrivals += [
                (d.message, idle_since + by, arrived[d.message] + by)
                for d in needs.arrivals(what)
                if arrived[d.message] > idle_since
            ]
            idle_since = end
        compute = tuple(Span(what, start + by, end + by) for what, start, end in trace.compute)
        step = (compute[0].start - 0.25, compute[-1].end + 0.125) if compute else None
        records.append(RankRecord(compute=compute, arrivals=tuple(arrivals), step=step, offset=-by))
    return records


def test_clocks_that_are_apart_make_the_same_timeline() -> None:
    simulated = simulate(build("interleaved", num_ranks=2, num_microbatches=4), Costs(latency=0.25))
    ahead = [7.0, -3.5]
    measured = assemble_timeline(simulated.schedule, records_of(simulated, ahead=ahead))
    assert [rank.compute for rank in measured.shifted(7.0).ranks] == [
        tuple(Span(w, s + 7.0, e + 7.0) for w, s, e in rank.compute) for rank in simulated.ranks
    ]
    assert attribute_idle(measured) == attribute_idle(simulated)
    assert measured.around == 0.25 + 0.125
    assert measured.batch_seconds == simulated.batch_seconds + 0.375
    assert (measured.clock_error, measured.missing) == ((), ())
    apart = [replace(record, error=0.5 * rank) for rank, record in enumerate(records_of(simulated, ahead=ahead))]
    told = assemble_timeline(simulated.schedule, apart)
    assert told.clock_error == (0.0, 0.5)
    assert Timeline.from_json(told.to_json()) == told


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_missing_rank_is_an_empty_row_that_no_figure_counts(missing: int) -> None:
    simulated = simulate(build("1f1b", num_ranks=4, num_microbatches=8), Costs(latency=0.25))
    records = [None if rank == missing else record for rank, record in enumerate(records_of(simulated))]
    measured = assemble_timeline(simulated.schedule, records)
    assert (measured.missing, measured.ranks[missing].compute) == ((missing,), ())
    assert find_gaps(measured)[missing] == {}
    idle = attribute_idle(measured)
    assert idle[missing] == Idle(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for rank in {0, 1, 2, 3} - {missing}:
        assert sum(idle[rank]) == pytest.approx(measured.makespan - measured.ranks[rank].busy)
    busy = sum(rank.busy for rank in measured.ranks)
    assert measured.bubble == pytest.approx(1 - busy / (3 * measured.makespan))
    assert Timeline.from_json(measured.to_json()) == measured
    nothing = assemble_timeline(simulated.schedule, [None] * 4)
    assert (nothing.bubble, nothing.missing) == (0.0, (0, 1, 2, 3))


def test_a_window_of_a_stream_begins_with_batch_0() -> None:
    schedule = build("2bw", num_ranks=2, num_microbatches=2)
    course = make_calls(schedule, sharing=NOTHING_SHARED)
    simulated = simulate(course.stream.unrolled(3), Costs(latency=0.25, update=0.5))

    def later(record: RankRecord) -> RankRecord:
        """Two batches on in the stream."""
        return replace(
            record,
            compute=tuple(
                Span(w._replace(index=w.index + (2 if w.op is Op.U else 4)), s, e) for w, s, e in record.compute
            ),
            arrivals=tuple((m._replace(index=m.index + 4), b, t) for m, b, t in record.arrivals),
            collectives=(Span(Collective((0,), Op.REDUCE_GRAD, 3), 1.0, 2.0),),
        )

    measured = assemble_stream(course, [later(record) for record in records_of(simulated)])
    assert measured.schedule == simulated.schedule
    assert [rank.compute for rank in measured.ranks] == [rank.compute for rank in simulated.ranks]
    assert {span.what for rank in measured.ranks for span in rank.collectives} == {Collective((0,), Op.REDUCE_GRAD, 1)}
    alone = assemble_stream(course, [None, later(records_of(simulated)[1])])
    assert (alone.schedule, alone.missing) == (simulated.schedule, (0,))


def test_errors_and_missing_ranks_are_checked() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs())
    with pytest.raises(ValueError, match=r"clock_error=\(0.1,\): expected finite seconds, one per rank of 2"):
        replace(timeline, clock_error=(0.1,))
    with pytest.raises(ValueError, match=r"clock_error=.*expected finite seconds"):
        replace(timeline, clock_error=(0.0, float("nan")))
    with pytest.raises(ValueError, match=r"missing=\(1,\): expected ranks below 2 without a trace"):
        replace(timeline, missing=(1,))


def test_costs_are_read_back() -> None:
    costs = Costs(forward=[1.0, 2.0], input_grad=0.5, weight_grad=0.25, tied=[((0, 1), 0.125)], norm=0.5, latency=1e-5)
    assert Costs.from_json(costs.to_json()) == costs
    assert Costs.from_json(Costs().to_json()) == Costs()
    for text, why in (
        ('{"forwards": 1}', "costs with .'forwards'.: expected an object with some of forward"),
        ("[1]", "costs with list: expected"),
        ('{"forward": -1}', "forward=-1: expected a finite number"),
        ('{"tied": [3]}', "tied=3: expected pairs"),
        ("{", "Expecting"),
    ):
        with pytest.raises(ValueError, match=why):
            Costs.from_json(text)


def test_only_what_was_waited_for_is_seen_to_arrive() -> None:
    simulated = simulate(build("1f1b", num_ranks=2, num_microbatches=1), Costs(latency=0.25))
    first, second = records_of(simulated)
    message = Message(MessageKind.ACT, 0, 1, 0)
    assert [span.what for span in assemble_timeline(simulated.schedule, [first, second]).ranks[1].comm] == [message]
    early = replace(second, arrivals=tuple((m, there - 1e-6, there) for m, _, there in second.arrivals))
    assert assemble_timeline(simulated.schedule, [first, early]).ranks[1].comm == ()


def test_what_was_under_way_while_the_receiver_computed_is_not_the_links_time() -> None:
    """Rank 1 works for 10 s on microbatch 0, then waits 1 ms for what rank 0 made 9 s ago: a thread that woke."""
    schedule = build("gpipe", num_ranks=2, num_microbatches=2)
    act = [Message(MessageKind.ACT, 0, 1, k) for k in range(2)]
    first = RankRecord(compute=tuple(Span(Action(0, Op.F, k), float(k), k + 1.0) for k in range(2)), arrivals=())
    second = RankRecord(
        compute=(Span(Action(1, Op.F, 0), 1.5, 11.0), Span(Action(1, Op.F, 1), 11.001, 21.0)),
        arrivals=((act[0], 0.0, 1.5), (act[1], 11.0, 11.001)),
    )
    measured = assemble_timeline(schedule, [first, second])
    assert measured.ranks[1].comm == (Span(act[0], 1.0, 1.5), Span(act[1], 11.0, 11.001))
    path = critical_path(measured)
    assert [step.what for step in path.steps] == [
        Action(0, Op.F, 0), act[0], Action(1, Op.F, 0), act[1], Action(1, Op.F, 1)
    ]  # fmt: skip
    assert path.by_link == {(0, 1): pytest.approx(0.501)}
    assert path.seconds == pytest.approx(21.0)


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw"])
def test_every_analysis_copes_with_what_is_missing_and_with_clocks_apart(name: str) -> None:
    """Nothing raises, and nothing takes less than no time."""
    schedule = build(name, num_ranks=4, num_microbatches=4)
    course = make_calls(schedule, sharing=NOTHING_SHARED) if schedule.is_asynchronous else None
    simulated = simulate(schedule if course is None else course.stream.unrolled(3), Costs(latency=0.25, update=0.5))
    stages = [StageBytes(weights=1.0, activations=1.0)] * schedule.num_stages
    for missing in ((), (0,), (1, 2), (0, 1, 2, 3)):
        for off in (-0.7, 0.6):
            records = [
                None if rank in missing else replace(record, offset=off * rank, error=0.1 * rank)
                for rank, record in enumerate(records_of(simulated))
            ]
            measured = assemble_timeline(schedule, records) if course is None else assemble_stream(course, records)
            assert all(step.end >= step.start for step in critical_path(measured).steps)
            assert len(memory_curves(measured, stages)) == 4
            for gaps in find_gaps(measured):
                assert all(seconds >= 0 for gap in gaps.values() for seconds in gap[1:])
            assert Timeline.from_json(measured.to_json()) == measured
            for before, after in ((simulated, measured), (measured, simulated)):
                compare(before, after)

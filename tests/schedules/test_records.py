"""Records of ranks put together: clocks apart, ranks of which nothing is known, windows of a stream.

Trace files: written by each process, put together, and read when parts of them are missing or broken.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.inside import (
    NOTHING_SHARED,
    ClockReading,
    Dependencies,
    RankRecord,
    Traces,
    assemble_stream,
    assemble_timeline,
    clock_line,
    find_gaps,
    find_traces,
    header_line,
    make_calls,
    read_traces,
    step_line,
    trace_file,
)
from support.run_folder import header_of

from stagewright.schedules import (
    Action,
    Collective,
    Costs,
    Idle,
    Message,
    MessageKind,
    Op,
    Schedule,
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


SCHEDULE = build("1f1b", num_ranks=3, num_microbatches=4)


def of_step(number: int, schedule: Schedule = SCHEDULE) -> Timeline:
    return simulate(schedule, Costs(forward=1.0 + number / 64, latency=0.25))


def write(
    folder: Path,
    steps: Mapping[int, Sequence[int]],
    *,
    run: str = "a",
    first_step: int = 0,
    ahead: Sequence[float] = (0.0, 0.0, 0.0),
    machines: Sequence[str] = ("x", "x", "x"),
    schedule: Schedule = SCHEDULE,
    started: str = "2026-01-01",
) -> None:
    """Files of one start: by process, its steps. Rank r's clock is ahead[r] seconds ahead of rank 0's."""
    for process, numbers in steps.items():
        place = {"machine": machines[process], "origin": machines[0], "host": f"host {machines[process]}"}
        own = {"process": process, "ranks": (process,), "num_processes": schedule.num_ranks, "first_step": first_step}
        header = header_of(schedule, run=run, started=started, versions={"torch": "2"}, **place, **own)
        data = header_line(header)
        if machines[process] != machines[0]:
            data += clock_line(run, ClockReading(ahead[process], -ahead[process], 0.5))
        for number in numbers:
            records = records_of(of_step(number, schedule), ahead=ahead)
            data += step_line(run, number, {process: records[process]})
        with trace_file.trace_path(folder, process).open("ab") as file:
            file.write(data)


def read(*folders: Path) -> Traces:
    return read_traces(find_traces(folders))


def same(measured: Timeline, simulated: Timeline) -> bool:
    """Whether all ranks that are there did the same at the same time, from the first action on."""
    pairs = zip(measured.shifted(-measured.start).ranks, simulated.ranks, strict=True)
    shown = [(m, s) for m, s in pairs if m.compute]
    first = min(s.compute[0].start for _, s in shown)
    return all(
        a.what == b.what and a.start == pytest.approx(b.start - first, abs=2e-9) and a.end > a.start
        for m, s in shown
        for a, b in zip(m.compute, s.compute, strict=True)
    )


def test_the_steps_of_all_ranks_are_read_back(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(3), (3, 23, 43)))
    traces = read(tmp_path)
    assert (traces.notes, [number for number, _ in traces.steps]) == ((), [3, 23, 43])
    for number, timeline in traces.steps:
        assert timeline.schedule == SCHEDULE
        assert same(timeline, of_step(number))
        expected = attribute_idle(replace(of_step(number), measured=True))
        for idle, truth in zip(attribute_idle(timeline), expected, strict=True):
            assert idle == pytest.approx(truth, abs=1e-7)
        assert timeline.clock_error == ()


def test_clocks_of_other_hosts_are_taken_out(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(3), (3,)), ahead=(0.0, 500.0, -20.0), machines="xyy")
    ((_, timeline),) = read(tmp_path).steps
    assert same(timeline, of_step(3))
    assert timeline.clock_error[0] == 0.0
    assert timeline.clock_error[1:] == pytest.approx((0.5, 0.5), abs=1e-3)  # what it was, and some drift since


def test_a_missing_file_is_an_empty_row(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(3), (3, 23)))
    (tmp_path / "trace.rank1.jsonl").unlink()
    traces = read(tmp_path)
    assert [timeline.missing for _, timeline in traces.steps] == [(1,), (1,)]
    assert all(same(timeline, of_step(number)) for number, timeline in traces.steps)
    assert find_gaps(traces.steps[0].timeline)[1] == {}
    (note,) = traces.notes
    assert note.startswith("nothing of rank 1: expected trace.rank1.jsonl next to ")


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    """Steps behind the checkpoint are run again; those of the first start do not count, nor are the two mixed."""
    write(tmp_path, {0: (3, 23, 43), 1: (3, 23), 2: (23, 43)})
    fewer = build("gpipe", num_ranks=2, num_microbatches=4)
    write(
        tmp_path,
        {0: (23, 63, 83), 1: (23,)},
        run="b",
        first_step=20,
        schedule=fewer,
        ahead=(0, 0),
        started="2026-01-02",
    )
    traces = read(tmp_path)
    names = [(number, timeline.schedule.name) for number, timeline in traces.steps]
    assert names == [(3, "1f1b"), (23, "gpipe"), (63, "gpipe"), (83, "gpipe")]
    assert same(traces.steps[1].timeline, of_step(23, fewer))
    assert traces.notes == (
        f"nothing of rank 2 in step 3: {tmp_path}/trace.rank2.jsonl ends with step 43",
        f"nothing of rank 1 in steps 63, 83: {tmp_path}/trace.rank1.jsonl ends with step 23",
    )


def test_other_versions_and_lost_schedules_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {0: (3,)})
    monkeypatch.setattr(trace_file, "VERSION", 2)
    write(tmp_path, {1: (3,)}, run="newer")
    monkeypatch.undo()
    traces = read(tmp_path)
    assert f"{tmp_path}/trace.rank1.jsonl, line 1: trace version 2, expected 1" in traces.notes[0]
    assert traces.steps[0].timeline.missing == (1, 2)
    assert [note[:17] for note in traces.notes[1:]] == ["nothing of rank 1", "nothing of rank 2"]
    path = tmp_path / "trace.rank0.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n")[1])  # the header is gone
    assert read(tmp_path).steps == ()
    assert "no file has the schedule" in read(tmp_path).notes[-1]
    again = read_traces(find_traces([tmp_path]), schedules=[SCHEDULE])
    assert same(again.steps[0].timeline, of_step(3))


def test_a_clock_that_nobody_read_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(3), (3,)), machines="xxy")
    path = tmp_path / "trace.rank2.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], *lines[2:]]))
    traces = read(tmp_path)
    assert traces.steps[0].timeline.missing == (2,)
    assert traces.notes == (f"rank 2 left out: {path} has no reading of its clock, which is another host's",)


@pytest.mark.thorough(but=["4"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_breaks_good_lines_stay(tmp_path: Path, seed: int) -> None:
    """Random cuts and changes: broken lines are told with file and number, and all the others are read as before."""
    draw = random.Random(seed)
    write(tmp_path, dict.fromkeys(range(3), (3, 23, 43)), ahead=(0.0, 9.0, 9.0), machines="xyy")
    whole = {path: path.read_bytes() for path in find_traces([tmp_path])}
    for turn in range(25):
        for path, data in whole.items():
            path.write_bytes(data)
        path = draw.choice(list(whole))
        data = bytearray(whole[path])
        if turn % 2:
            del data[draw.randrange(len(data)) :]
        else:
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(data))
                data[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        path.write_bytes(data)
        left = bytes(data).split(b"\n")
        good = {number for number in (3, 23, 43) if step_of(whole[path], number) in left}
        rank = list(whole).index(path)
        has_clock = rank == 0 or b'{"clock"' in b"\n".join(line for line in whole[path].split(b"\n") if line in left)
        traces = read(tmp_path)
        steps = dict(traces.steps)
        assert set(steps) == {3, 23, 43}
        for number, timeline in steps.items():
            assert set(timeline.missing) <= {rank}
            assert all(s.compute for r, s in enumerate(timeline.ranks) if r != rank)
            if has_clock:
                assert (rank in timeline.missing) == (number not in good)
                assert same(timeline, of_step(number))
        if bytes(data) != whole[path] and set(whole[path].split(b"\n")) - set(bytes(data).split(b"\n")):
            assert any(str(path) in note for note in traces.notes)


def step_of(data: bytes, number: int) -> bytes:
    return next(line for line in data.split(b"\n") if line.startswith(b'{"step":%d,' % number))

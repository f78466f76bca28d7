"""Trace files: written by each process, put together, and read when parts of them are missing or broken."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.inside import (
    ClockReading,
    Traces,
    clock_line,
    find_gaps,
    find_traces,
    header_line,
    read_traces,
    step_line,
    trace_file,
)
from support.run_folder import header_of

from stagewright.schedules import Costs, Schedule, Timeline, attribute_idle, build, simulate

from .test_records import records_of

SCHEDULE = build("1f1b", num_ranks=3, num_microbatches=4)


def of_step(number: int, schedule: Schedule = SCHEDULE) -> Timeline:
    """A timeline that no other step has."""
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


def test_a_process_that_was_killed_has_fewer_steps(tmp_path: Path) -> None:
    write(tmp_path, {0: (3, 23, 43), 1: (3,), 2: (3, 23, 43)})
    traces = read(tmp_path)
    assert [timeline.missing for _, timeline in traces.steps] == [(), (1,), (1,)]
    assert traces.notes == (f"nothing of rank 1 in steps 23, 43: {tmp_path}/trace.rank1.jsonl ends with step 3",)


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    """Steps behind the checkpoint are run again; those of the first start do not count, nor are the two mixed."""
    write(tmp_path, {0: (3, 23, 43), 1: (3, 23), 2: (3, 23, 43)})
    fewer = build("gpipe", num_ranks=2, num_microbatches=4)
    write(tmp_path, {0: (23, 63), 1: (23,)}, run="b", first_step=20, schedule=fewer, ahead=(0, 0), started="2026-01-02")
    traces = read(tmp_path)
    assert [(number, timeline.schedule.name) for number, timeline in traces.steps] == [
        (3, "1f1b"),
        (23, "gpipe"),
        (63, "gpipe"),
    ]
    assert same(traces.steps[1].timeline, of_step(23, fewer))
    assert traces.notes == (f"nothing of rank 1 in step 63: {tmp_path}/trace.rank1.jsonl ends with step 23",)


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


@pytest.mark.thorough(but=["0"])
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
    """The line of a step."""
    return next(line for line in data.split(b"\n") if line.startswith(b'{"step":%d,' % number))

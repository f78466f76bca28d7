"""Traces that others wrote, real ones of torch.profiler and made-up ones; rules of our own files."""

import gzip
import json
import math
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import derive_versions, replicate

from stagewright.schedules import Costs, Op, Timeline, attribute_idle, build, check, critical_path, simulate
from stagewright.viz import exhibit_of_traces, read_perfetto, write_perfetto

KINETO = Path(__file__).parents[1] / "data" / "kineto"  # made by tests/support/torch_traces.py


def real(name: str) -> list[Path]:
    return sorted(KINETO.glob(f"{name}.rank*"))


@pytest.mark.parametrize(
    ("name", "family", "chunks"),
    [("gpipe", "gpipe", 1), ("1f1b-named", "1f1b", 1), ("interleaved", "interleaved", 2), ("zb-v", None, 2)],
)
def test_a_trace_of_torchs_schedules_is_a_measured_timeline(name: str, family: str | None, chunks: int) -> None:
    """Its order is that of our builder, and idle causes and the critical path work as on our own runs."""
    exhibit = exhibit_of_traces(real(name), name=name)
    assert exhibit.notes == ()
    (step,) = exhibit.measured
    timeline = step.timeline
    check(timeline.schedule)
    assert timeline.measured
    if family is not None:
        built = build(family, num_ranks=2, num_microbatches=4, num_chunks=chunks)
        assert timeline.schedule.programs == built.programs
        assert timeline.schedule.placement == built.placement
    else:
        assert timeline.schedule.placement == ((0, 3), (1, 2))
        assert {action.op for program in timeline.schedule.programs for action in program} == {Op.F, Op.I, Op.W}
    for trace, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True):
        assert sum(idle) == pytest.approx(timeline.makespan - trace.busy)
    path = critical_path(timeline)
    assert sum(each.seconds for each in path.steps) == pytest.approx(timeline.makespan)


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_waiting_inside_a_slice_is_no_compute(name: str) -> None:
    """torch's slices begin with the wait for their input; what is there of its messages is seen to arrive."""
    (step,) = exhibit_of_traces(real(name), name=name).measured
    slices = sum(
        each["dur"]
        for path in real(name)
        for each in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if each["ph"] == "X" and (each["name"].startswith(("Forward", "Backward")) or each["name"][4:5] in ("F", "B"))
    )
    busy = sum(trace.busy for trace in step.timeline.ranks)
    assert busy < 0.95 * slices * 1e-6
    assert any(trace.comm for trace in step.timeline.ranks)
    assert sum(idle.transfer for idle in attribute_idle(step.timeline)) > 0


def test_a_trace_without_names_of_actions_is_refused() -> None:
    message = (
        r"1f1b: no slice has the name of a pipeline's action \(torch's Schedule1F1B gives none\): expected names such"
        r' as PP:1F0, from record_function\("PP:1F0"\) around each action. As it is, open https://ui.perfetto.dev'
    )
    with pytest.raises(ValueError, match=message):
        exhibit_of_traces(real("1f1b"), name="1f1b")


def written(
    timeline: Timeline,
    folder: Path,
    *,
    name=lambda action: f"PP:{action}",
    merged: bool = False,
    seed: int = 0,
    about=lambda rank: {},
    extra=lambda rank: [],
    category: str = "user_annotation",
) -> list[Path]:
    """A Kineto-like file a rank, or one of all; events in any order, as the format allows."""
    shuffle = random.Random(seed).shuffle
    ranks = []
    for rank, trace in enumerate(timeline.ranks):
        where = {"pid": 1000 + rank, "tid": 7, "cat": category}
        events: list[dict[str, object]] = []
        for action, start, end in trace.compute:
            what = {**where, "name": name(action)}
            events.append({**what, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6})
        ranks.append([*events, *extra(rank)])
    files = [("all", [event for events in ranks for event in events], {})] if merged else []
    if not merged:
        files = [
            (f"rank{rank}", events, {"distributedInfo": {"rank": rank, "world_size": len(ranks)}, **about(rank)})
            for rank, events in enumerate(ranks)
        ]
    for stem, events, facts in files:
        shuffle(events)
        (folder / f"{stem}.json").write_text(json.dumps({**facts, "traceEvents": events}))
    return sorted(folder / f"{stem}.json" for stem, _, _ in files)


def same_times(found: Timeline, truth: Timeline) -> None:
    """Equal to the nanosecond, each from its own first start."""
    assert len(found.ranks) == len(truth.ranks)
    for ours, theirs in zip(found.ranks, truth.ranks, strict=True):
        assert ours.actions == theirs.actions
        for a, b in zip(ours.compute, theirs.compute, strict=True):
            assert a.start == pytest.approx(b.start - truth.start, abs=3e-9)
            assert a.end == pytest.approx(b.end - truth.start, abs=3e-9)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_timeline_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """In any order, of one file or several, at any origin of the clock."""
    draw = data.draw
    name, ranks = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"])), draw(st.integers(1, 4))
    schedule = build(name, num_ranks=ranks, num_microbatches=ranks * draw(st.integers(1, 3)))
    forward = draw(st.floats(1e-6, 10.0))
    truth = simulate(schedule, Costs(forward=forward, latency=forward / 3))
    shifted, folder = truth.shifted(draw(st.floats(0, 1e6))), tmp_path_factory.mktemp("trace")
    paths = written(shifted, folder, merged=draw(st.booleans()), seed=draw(st.integers(0, 99)))
    exhibit = exhibit_of_traces(paths, name="t")
    assert exhibit.notes == ()
    same_times(exhibit.measured[0].timeline, truth)


def example(name: str = "1f1b", *, num_ranks: int = 2, num_microbatches: int = 4, **options: int) -> Timeline:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    return simulate(schedule, Costs(forward=0.001, latency=0.0001))


def test_replicas_with_data_of_their_own_share_one_batch(tmp_path: Path) -> None:
    """Two ranks a stage that run the same microbatch numbers: k of the d-th is k * 2 + d."""
    truth = simulate(replicate(build("1f1b", num_ranks=2, num_microbatches=3), 2), Costs(forward=0.001))
    paths = written(truth, tmp_path, name=lambda action: f"PP:{action._replace(index=action.index // 2)}")
    exhibit = exhibit_of_traces(paths, name="t")
    assert exhibit.notes == ()
    same_times(exhibit.measured[0].timeline, truth)
    assert exhibit.measured[0].timeline.schedule.owners == truth.schedule.owners


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_stages_on_two_ranks_are_told_from_their_actions(name: str, tmp_path: Path) -> None:
    """Microbatch 0 of stage 3 on rank 3, microbatch 1 on rank 0: the owners follow."""
    truth = example(name, num_ranks=4, num_microbatches=8)
    exhibit = exhibit_of_traces(written(truth, tmp_path), name="t")
    assert exhibit.notes == ()
    same_times(exhibit.measured[0].timeline, truth)
    assert exhibit.measured[0].timeline.schedule.owners == truth.schedule.owners


@pytest.mark.parametrize("marked", [True, False])
def test_several_steps(marked: bool, tmp_path: Path) -> None:
    """By the profiler's marks, which number them; else the second time of an action is of the second step."""
    truth = example()
    again = truth.shifted(2 * truth.makespan)
    both = replace(
        truth,
        ranks=tuple(replace(a, compute=a.compute + b.compute) for a, b in zip(truth.ranks, again.ranks, strict=True)),
    )
    long = truth.makespan * 1e6

    def marks(rank: int) -> list[dict[str, object]]:
        where = {"pid": 1000 + rank, "tid": 7, "ph": "X", "cat": "user_annotation", "dur": 2 * long}
        return [{**where, "name": f"ProfilerStep#{7 + n}", "ts": 2 * n * long} for n in range(2 if marked else 0)]

    exhibit = exhibit_of_traces(written(both, tmp_path, extra=marks), name="t")
    assert [step.number for step in exhibit.measured] == ([7, 8] if marked else [0, 1])
    for step in exhibit.measured:
        same_times(step.timeline, truth)


def test_the_kernels_of_a_gpu_count_not_their_launch(tmp_path: Path) -> None:
    truth = example()

    def launches(rank: int) -> list[dict[str, object]]:
        where = {"pid": 1, "tid": 1, "ph": "X", "cat": "user_annotation", "dur": 1.0}
        return [{**where, "name": f"PP:{a}", "ts": n} for n, a in enumerate(truth.ranks[rank].actions)]

    exhibit = exhibit_of_traces(written(truth, tmp_path, category="gpu_user_annotation", extra=launches), name="t")
    assert len(exhibit.measured) == 1
    same_times(exhibit.measured[0].timeline, truth)


def test_two_actions_in_one_slice(tmp_path: Path) -> None:
    """torch's DualPipeV: a forward, and a backward behind it where autograd begins."""
    where = {"pid": 1, "tid": 1, "ph": "X"}
    events = [
        {**where, "cat": "user_annotation", "name": "PP:0F0", "ts": 0, "dur": 10},
        {**where, "cat": "user_annotation", "name": "PP:(0F1;0B0)OVERLAP_F_B", "ts": 10, "dur": 30},
        {**where, "cat": "cpu_op", "name": "aten::mm", "ts": 11, "dur": 5},
        {**where, "cat": "cpu_op", "name": "autograd::engine::evaluate_function: MmBackward0", "ts": 20, "dur": 15},
        {**where, "cat": "user_annotation", "name": "PP:0B1", "ts": 40, "dur": 10},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    (step,) = exhibit_of_traces([path], name="t").measured
    spans = [(str(a), round(s * 1e6), round(e * 1e6)) for a, s, e in step.timeline.ranks[0].compute]
    assert spans == [("0F0", 0, 10), ("0F1", 10, 20), ("0B0", 20, 40), ("0B1", 40, 50)]


def test_a_missing_rank_is_an_empty_row(tmp_path: Path) -> None:
    truth = example(num_ranks=3)
    paths = written(truth, tmp_path)
    exhibit = exhibit_of_traces([paths[0], paths[2]], name="t")
    timeline = exhibit.measured[0].timeline
    assert timeline.missing == (1,)
    assert timeline.schedule.placement == ((0,), (1,), (2,))
    assert timeline.ranks[2].actions == truth.ranks[2].actions
    assert exhibit.notes == ("t: rank 1 of 3 left no trace: its row is empty",)
    merged = written(replace(truth, ranks=(truth.ranks[0], truth.ranks[2])), tmp_path, merged=True)
    exhibit = exhibit_of_traces(merged, name="t")
    assert exhibit.measured[0].timeline.missing == (2,)
    assert exhibit.notes == ("t: stage 1 is in no trace: it is an empty row",)


def test_clocks_that_differ_are_said_and_different_zeros_are_one(tmp_path: Path) -> None:
    truth = example()
    late = replace(truth, ranks=(truth.shifted(0.003).ranks[0], truth.ranks[1]))
    exhibit = exhibit_of_traces(written(late, tmp_path, about=lambda rank: {"host_name": f"node{rank}"}), name="t")
    assert exhibit.notes == (
        "t: the clocks of node0, node1 are assumed to agree",
        "t: an input was used 2,900 us before it was made: the ranks' clocks differ by that much",
    )
    # Kineto counts from a base of its own choice, which each file tells.
    parts = [truth.ranks[0], truth.shifted(-5.0).ranks[1]]
    paths = written(
        replace(truth, ranks=tuple(parts)), tmp_path, about=lambda rank: {"baseTimeNanoseconds": rank * 5 * 10**9}
    )
    same_times(exhibit_of_traces(paths, name="t").measured[0].timeline, truth)


def test_a_file_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    (path, other) = written(example(), tmp_path)
    text = path.read_text()
    path.write_text(text[: len(text) * 2 // 3])
    with pytest.raises(ValueError, match=r"rank0\.json: .* expected a whole JSON file"):
        exhibit_of_traces([path, other], name="t")
    packed = tmp_path / "cut.json.gz"
    for data in (gzip.compress(text.encode())[:-20], b"\x1f\x8b nothing"):
        packed.write_bytes(data)
        with pytest.raises(ValueError, match=r"cut\.json\.gz: a gzip file that cannot be unpacked"):
            exhibit_of_traces([packed], name="t")


def test_events_without_times_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    where = {"ph": "X", "pid": 1, "tid": 1}
    events = [
        {**where, "name": "PP:0F0", "ts": 0, "dur": 5},
        {**where, "name": "PP:0B0", "ts": "5", "dur": 5},
        {**where, "name": "no time", "ts": None, "dur": 5},
        {**where, "name": "backwards", "ts": 9, "dur": -1},
        7,
    ]
    path.write_text(json.dumps(events))
    exhibit = exhibit_of_traces([path], name="t")
    (trace,) = exhibit.measured[0].timeline.ranks
    assert [(str(a), round(s * 1e6), round(e * 1e6)) for a, s, e in trace.compute] == [("0F0", 0, 5), ("0B0", 5, 10)]
    assert exhibit.notes == (f"{path}: 3 of 5 events have no time or no length: unreadable events are left out",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": 3}', "expected a trace: an object with a list of traceEvents"),
        ("[]", "no slice with a start and a length"),
        ('[{"ph": "i", "ts": 3}]', "no slice with a start and a length"),
    ],
)
def test_files_without_a_slice(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        exhibit_of_traces([path], name="t")


def test_one_rank_twice(tmp_path: Path) -> None:
    (path, _) = written(example(), tmp_path)
    other = tmp_path / "copy.json"
    other.write_text(path.read_text())
    with pytest.raises(ValueError, match=r"copy.json, .*rank0.json are all of rank 0: expected one file per rank"):
        exhibit_of_traces([path, other], name="t")


@pytest.mark.nightly
def test_torch_as_it_is_installed_writes_what_is_read(tmp_path: Path, gloo) -> None:
    """Live: names and files of the torch that runs, around its own schedules on two gloo processes."""
    from support import torch_traces

    for name in torch_traces.CHUNKS:
        gloo.run(torch_traces.trace_own, ranks=2, args=(name, str(tmp_path)))
        paths = sorted(tmp_path.glob(f"{name}.rank*.json"))
        if name == "1f1b":
            with pytest.raises(ValueError, match="no slice has the name of a pipeline's action"):
                exhibit_of_traces(paths, name=name)
            continue
        (step,) = exhibit_of_traces(paths, name=name).measured
        check(step.timeline.schedule)
        old = exhibit_of_traces(real(name), name=name).measured[0].timeline
        assert step.timeline.schedule == old.schedule
        assert math.isclose(sum(e.seconds for e in critical_path(step.timeline).steps), step.timeline.makespan)


Trace = dict[str, Any]


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Timelines of any family: uneven costs, messages, updates, sums; at any origin; measured ones of a few batches."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "2bw", "pipedream", "replicas"]))
    ranks = draw(st.integers(1, 3))
    sizes = {"num_ranks": ranks, "num_microbatches": ranks * draw(st.integers(1, 3))}
    if name == "replicas":
        schedule = replicate(build("1f1b", **sizes), 2)
    elif name in ("2bw", "pipedream"):
        schedule = build(name, **sizes, num_batches=3)
    else:
        schedule = build(name, **sizes)
    seconds = st.floats(1e-7, 10.0)
    stages = schedule.num_stages
    costs = Costs(
        forward=[draw(seconds) for _ in range(stages)],
        input_grad=[draw(seconds) for _ in range(stages)],
        weight_grad=draw(seconds),
        latency=draw(st.sampled_from([0.0, 1e-7, 0.3])),
        update=draw(st.sampled_from([0.0, 0.01])),
        reduce_grad=draw(st.sampled_from([0.0, 0.5])),
    )
    timeline = simulate(schedule, costs).shifted(draw(st.sampled_from([0.0, -3.0, 1.7e9 + 0.1])))
    errors = tuple(1e-5 * rank for rank in range(schedule.num_ranks)) if draw(st.booleans()) else ()
    return replace(timeline, clock_error=errors)


def slices_by_track(events: list[Trace]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Starts and ends in whole nanoseconds, as readers have them."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, length = (event[key] * 1000 for key in ("ts", "dur"))
            assert start == int(start) >= 0
            assert length == int(length) >= 0
            tracks[event["pid"], event["tid"]].append((int(start), int(start + length)))
    return tracks


def check_rules(events: list[Trace]) -> None:
    """Slices of a track nest; flows pair up, go forwards, and stand on slices; tracks have names, ids are unique."""
    tracks = slices_by_track(events)
    for slices in tracks.values():
        around: list[int] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)
    names = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert tracks.keys() <= names
    assert {pid for pid, _ in tracks} <= {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    flows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in flows[event["cat"], event["id"]]
            flows[event["cat"], event["id"]][event["ph"]] = event
    for ends in flows.values():
        leaves, arrives = ends["s"], ends["f"]
        assert arrives["bp"] == "e"
        assert leaves["ts"] <= arrives["ts"]
        for end in (leaves, arrives):
            at = round(end["ts"] * 1000)
            assert any(start <= at <= stop for start, stop in tracks[end["pid"], end["tid"]])
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)


@settings(max_examples=25, deadline=None)
@given(timeline=timelines())
def test_perfetto(tmp_path_factory: pytest.TempPathFactory, timeline: Timeline) -> None:
    """The rules, and the timelines themselves, come back to the last bit."""
    path = tmp_path_factory.mktemp("perfetto") / "t.json"
    write_perfetto([("a", timeline), ("b", timeline)], path)
    data = json.loads(path.read_text())
    check_rules(data["traceEvents"])
    assert read_perfetto(data, source="t") == [("a", timeline), ("b", timeline)]
    assert len(slices_by_track(data["traceEvents"])) > 0


def args_of(path: Path) -> dict[str, Trace]:
    events = json.loads(path.read_text())["traceEvents"]
    return {e["args"]["action"]: e["args"] for e in events if e["ph"] == "X" and "action" in e["args"]}


def test_slices_say_the_version_of_their_weights_and_the_error_of_their_clock(tmp_path: Path) -> None:
    schedule = build("2bw", num_ranks=2, num_microbatches=2, num_batches=3)
    timeline = replace(simulate(schedule, Costs(latency=0.5)), clock_error=(0.0, 12.5e-6))
    write_perfetto(timeline, tmp_path / "p.json")
    used = derive_versions(schedule).used
    args = args_of(tmp_path / "p.json")
    for stage, index in ((1, 0), (1, 5)):
        for op in "FB":
            assert args[f"{stage}{op}{index}"]["weight_version"] == used[stage, index]
            assert args[f"{stage}{op}{index}"]["clock_error_us"] == 12.5
    assert "weight_version" not in args["1U0"]
    assert args["1F0"]["idle_cause"] == "warm_up"
    assert json.loads((tmp_path / "p.json").read_text())["otherData"]["timeline"]["clock_error_us"] == [0.0, 12.5]

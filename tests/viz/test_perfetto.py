"""Traces for Perfetto: slices nest, flows pair up and stand on slices, times are microseconds."""

import json
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from support.inside import replicate

from stagewright.schedules import Costs, RankTrace, Span, Timeline, build, simulate
from stagewright.viz import write_perfetto


def written(timelines, tmp_path):
    path = tmp_path / "trace.json"
    write_perfetto(timelines, path)
    return json.loads(path.read_text())


def of_phase(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def named(trace, kind):
    """The text of each name that metadata give: (pid, tid) -> name."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == kind}


def example(*, latency=0.0, update=0.0, num_chunks=2):
    schedule = build("interleaved", num_ranks=2, num_microbatches=4, num_chunks=num_chunks)
    return simulate(schedule, Costs(forward=0.010, backward=0.020, latency=latency, update=update))


def test_lanes_for_compute_and_messages(tmp_path):
    trace = written(example(latency=0.035), tmp_path)
    assert named(trace, "process_name") == {(0, 0): "rank 0", (1, 0): "rank 1"}
    threads = named(trace, "thread_name")
    assert (threads[0, 0], threads[0, 100], threads[0, 101]) == ("compute", "receive", "receive 2")
    by_thread = defaultdict(Counter)
    for event in of_phase(trace, "X"):
        by_thread[threads[event["pid"], event["tid"]].split()[0]][event["name"].split()[0]] += 1
    assert by_thread == {"compute": {"F": 16, "B": 16}, "receive": {"act": 12, "grad": 12}}
    assert len(of_phase(trace, "s")) == len(of_phase(trace, "f")) == 12 + 12
    order = {
        (e["pid"], e["tid"]): e["args"]["sort_index"] for e in of_phase(trace, "M") if e["name"] == "thread_sort_index"
    }
    assert order[0, 0] < order[0, 100] < order[0, 101]


def test_sums_of_gradients_have_a_lane(tmp_path):
    schedule = replicate(build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2), 2)
    trace = written(simulate(schedule, Costs(latency=0.1, reduce_grad=5.0, update=0.5)), tmp_path)
    threads = named(trace, "thread_name")
    assert (threads[0, 200], threads[0, 201]) == ("together", "together 2")
    sums = [e for e in of_phase(trace, "X") if e["tid"] >= 200 and e["pid"] == 0]
    assert [e["args"]["collective"] for e in sums] == ["2REDUCE_GRAD0", "0REDUCE_GRAD0"]
    last = max(e["ts"] for e in of_phase(trace, "X") if e["pid"] == 0 and e["name"].startswith("B"))
    assert sums[0]["ts"] < last < sums[0]["ts"] + sums[0]["dur"]


def test_slices_say_what_they_are(tmp_path):
    trace = written(example(latency=0.002, update=0.004), tmp_path)
    by_action = {e["args"].get("action"): e for e in of_phase(trace, "X")}
    assert by_action["1F0"]["args"] == {
        "action": "1F0",
        "stage": 1,
        "microbatch": 0,
        "idle_before_us": 12_000.0,
        "idle_cause": "warm_up",
    }
    assert by_action["0F1"]["args"] == {"action": "0F1", "stage": 0, "microbatch": 1}
    assert by_action["2U0"]["args"] == {"action": "2U0", "stage": 2, "update_group": 0}
    grad = next(e for e in of_phase(trace, "X") if e["name"] == "grad 3")
    assert grad["args"]["from_stage"] == grad["args"]["to_stage"] + 1


def test_timelines_side_by_side(tmp_path):
    simulated, measured = example(), replace(example(latency=0.001).shifted(5.0), measured=True)
    trace = written([("simulated", simulated), ("measured", measured)], tmp_path)
    names = {pid: name for (pid, _), name in named(trace, "process_name").items()}
    assert names == {0: "simulated rank 0", 1: "simulated rank 1", 2: "measured rank 0", 3: "measured rank 1"}
    sort = {e["pid"]: e["args"]["sort_index"] for e in of_phase(trace, "M") if e["name"] == "process_sort_index"}
    assert sort == {0: 0, 1: 1, 2: 2, 3: 3}
    assert min(e["ts"] for e in of_phase(trace, "X") if e["pid"] == 2) == 0.0
    ids = Counter(e["id"] for e in of_phase(trace, "s"))
    assert set(ids.values()) == {1}
    facts = trace["otherData"]
    assert facts["measured"]["measured"] is True
    assert facts["simulated"]["makespan_bubble"] == simulated.makespan_bubble


def test_bytes_are_the_same_each_time(tmp_path):
    timeline = example(latency=0.003)
    for name in ("a", "b"):
        write_perfetto(timeline, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_arrow_back_in_time_is_left_out(tmp_path):
    """Clocks of two hosts that disagree: rank 1 seems to use what rank 0 has not begun to make."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    ahead, behind = simulate(schedule, Costs()).ranks
    early = tuple(Span(what, start - 3.0, end - 3.0) for what, start, end in behind.compute)
    timeline = Timeline(schedule=schedule, ranks=(ahead, RankTrace(compute=early)), measured=True)
    trace = written(timeline, tmp_path)
    assert [e["name"] for e in of_phase(trace, "s")] == ["grad 0"]
    assert min(e["ts"] for e in of_phase(trace, "X")) == 0.0


def test_a_window_of_a_stream_has_the_arrows_it_knows(tmp_path):
    """The first gradients come from a batch before it: no maker, no arrow."""
    timeline = simulate(build("2bw", num_ranks=2, num_microbatches=2), Costs(latency=0.25))
    ranks = tuple(replace(trace, compute=trace.compute[12:24]) for trace in timeline.ranks)
    trace = written(replace(timeline, ranks=ranks, measured=True), tmp_path)
    assert 0 < len(of_phase(trace, "s")) == len(of_phase(trace, "f")) < 16
    assert (
        trace["otherData"]["timeline"]["batch_seconds"] == replace(timeline, ranks=ranks, measured=True).batch_seconds
    )


def test_an_empty_timeline_names_its_ranks(tmp_path):
    schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    trace = written(Timeline(schedule=schedule, ranks=(RankTrace(compute=()),) * 2), tmp_path)
    assert set(named(trace, "process_name").values()) == {"rank 0", "rank 1"}
    assert not of_phase(trace, "X")


def test_refuses_nothing_and_names_that_stand_twice(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        write_perfetto([], tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"timelines named \['a', 'a'\]: expected another name for each"):
        write_perfetto([("a", example()), ("a", example())], tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()

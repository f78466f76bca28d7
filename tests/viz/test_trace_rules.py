"""Rules of trace files that hold for any timeline: what Perfetto relies on."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import derive_versions, replicate

from stagewright.schedules import Costs, Timeline, build, simulate
from stagewright.viz import read_perfetto, write_perfetto

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


@pytest.mark.thorough
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

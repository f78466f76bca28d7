"""Timelines as text, their colours, and traces for Perfetto: slices nest, flows pair up, times are microseconds.

Schedules, timelines and plans in notebooks (frames in Chromium), and from a terminal.
"""

import json
import re
import sys
import types
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inside import OP_HUES, as_html, palette, render_terminal, replicate

from stagewright.partition import Plan, PlanStage
from stagewright.schedules import (
    Costs,
    Idle,
    MemoryPart,
    MessageKind,
    Op,
    RankTrace,
    Schedule,
    Span,
    Timeline,
    build,
    simulate,
)
from stagewright.viz import Exhibit, MeasuredStep, show, write_perfetto


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with all colours: rich remembers the colours in which it first showed a style."""
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")


ANSI = re.compile(r"\x1b\[([0-9;]*)m")


def shown(schedule: Schedule, costs: Costs | None = None) -> Exhibit:
    return Exhibit(name="run", simulated=simulate(schedule, costs or Costs()))


def rows(text: str) -> list[str]:
    """Text between the bars."""
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("rank")]


def test_three_columns_a_second() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=3), Costs(forward=1.0, backward=2.0))
    text = render_terminal([Exhibit(name="run", simulated=timeline)], width=65, colour=False)
    assert text.splitlines() == [
        "1f1b:  P=2  V=1  M=3",
        "simulated:  makespan 12 s,  makespan bubble 25.0%,",
        "span bubble 25.0%",
        "rank 0 |F0-F1-::::::B0----F2-B1----:::B2----| 25%  late peer 25",
        "rank 1 |...F0-B0----F1-B1----F2-B2----......| 25%  drain 17",
        "        0              5              10 s",
        "F forward  B backward  . warm up, drain  : late peer",
    ]


SIZES = [(40, 64, False), (59, 3, True), (60, 1, False), (99, 3, False), (100, 1, True), (200, 64, True)]


@pytest.mark.thorough(but=["60-1-False"])
@pytest.mark.parametrize(("width", "ranks", "colour"), SIZES)
def test_every_line_fits_and_every_rank_has_one(width: int, ranks: int, colour: bool) -> None:
    simulated = simulate(build("interleaved", num_ranks=ranks, num_microbatches=5), Costs(latency=0.1))
    measured = replace(simulate(simulated.schedule, Costs(forward=1.5)), measured=True)
    exhibits = [
        Exhibit(name="a run", simulated=simulated, measured=(MeasuredStep(7, measured),)),
        shown(build("2bw", num_ranks=3, num_microbatches=4)),
    ]
    text = ANSI.sub("", render_terminal(exhibits, width=width, colour=colour))
    assert max(map(len, text.splitlines())) <= width
    found = rows(text)
    assert len(found) == 2 * ranks + 3
    assert len({len(row) for row in found}) == 1  # one scale for all
    ends = [len(row.rstrip()) for row in found]
    assert ends[ranks] >= ends[0]  # the slower one ends later
    assert colour or text.isascii()


def test_colours_are_those_of_the_palette(monkeypatch: pytest.MonkeyPatch) -> None:
    text = render_terminal([shown(build("zb-h1", num_ranks=2, num_microbatches=4))], width=120, colour=True)
    codes = ";".join(ANSI.findall(text))
    for op in "FIW":
        hue = next(hue for key, hue in OP_HUES.items() if key.value == op)
        assert f"48;2;{';'.join(str(int(hue[at : at + 2], 16)) for at in (1, 3, 5))}" in codes
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("COLORTERM")
    assert "\x1b" not in render_terminal([shown(build("gpipe", num_ranks=2, num_microbatches=4))], colour=True)


def test_it_asks_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    exhibit = shown(build("gpipe", num_ranks=2, num_microbatches=4))
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in render_terminal([exhibit])  # no terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    text = render_terminal([exhibit])
    assert "\x1b" in text
    assert max(map(len, ANSI.sub("", text).splitlines())) <= 77
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in render_terminal([exhibit])


def test_many_small_actions_in_a_column_show_as_what_takes_most_of_it() -> None:
    text = render_terminal([shown(build("gpipe", num_ranks=1, num_microbatches=300))], width=80, colour=False)
    (row,) = rows(text)
    third = len(row) // 3
    assert set(row[: third - 1]) == {"F"}
    assert set(row[third + 1 :]) == {"B"}


def test_missing_ranks_and_names_that_move_the_cursor() -> None:
    timeline = replace(simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs()), measured=True)
    lost = replace(timeline, ranks=(timeline.ranks[0], RankTrace(compute=())), missing=(1,))
    hostile = "\x1b[2Jname\r\n"
    exhibits = [Exhibit(name=hostile, measured=(MeasuredStep(1, each),)) for each in (lost, timeline)]
    text = render_terminal(exhibits, width=90, colour=False)
    assert "rank 1 |not recorded" in text
    assert text.isprintable() or set(re.sub("[ -~]", "", text)) == {"\n"}
    empty = Timeline(schedule=timeline.schedule, ranks=(RankTrace(compute=()),) * 2, measured=True)
    assert "nothing ran" in render_terminal([Exhibit(name="empty", measured=(MeasuredStep(0, empty),))], colour=False)
    at_once = RankTrace(compute=tuple(Span(what, 0.0, 0.0) for what in timeline.schedule.programs[0]))
    still = Timeline(schedule=timeline.schedule, ranks=(at_once, RankTrace(compute=())))
    assert len(rows(render_terminal([Exhibit(name="no time", simulated=still)], colour=False))) == 2


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="expected at least one Exhibit"):
        render_terminal([])
    with pytest.raises(ValueError, match="width=39: expected a number of columns, at least 40"):
        render_terminal([shown(build("gpipe", num_ranks=1, num_microbatches=1))], width=39)


def test_everything_has_a_colour_of_its_own():
    assert set(palette.OP_HUES) == set(palette.OP_WORDS) == {Op.F, Op.B, Op.I, Op.W, Op.U}
    assert len(set(palette.OP_HUES.values())) == 5
    assert set(palette.MESSAGE_HUES) == set(palette.MESSAGE_WORDS) == set(MessageKind)
    assert len(set(palette.MESSAGE_HUES.values())) == len(MessageKind)
    assert len(set(palette.MESSAGE_WORDS.values())) == len(MessageKind)
    assert tuple(palette.CAUSE_HUES) == Idle._fields
    assert len(set(palette.CAUSE_HUES.values())) == len(Idle._fields)


@pytest.mark.parametrize("op", palette.OP_HUES)
def test_shades_of_chunks_grow_paler_and_every_other_batch_is(op):
    shades = [sum(palette.box_colour(op, chunk=chunk, num_chunks=4, batch=0)) for chunk in range(4)]
    assert shades == sorted(shades)
    assert len(set(shades)) == 4
    alone, first = (palette.box_colour(op, chunk=0, num_chunks=number, batch=0) for number in (1, 4))
    assert alone == first
    full, odd, again, later = (palette.box_colour(op, chunk=0, num_chunks=1, batch=batch) for batch in (0, 1, 4, 7))
    assert again == full
    assert odd == later
    assert all(pale >= colour for pale, colour in zip(odd, full, strict=True))
    assert sum(odd) > sum(full) + 0.3


# Machado, Oliveira, Fernandes 2009, severity 1: linear RGB as it is seen.
SIGHT = {
    "common": np.eye(3),
    "protan": [(0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)],
    "deutan": [(0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)],
    "tritan": [(1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)],
}
TO_XYZ = np.array([(0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)])


def linear(colour):
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour])


def cielab(colour, sight):
    x, y, z = np.cbrt(TO_XYZ @ np.clip(np.array(SIGHT[sight]) @ linear(colour), 1e-3, 1) / (0.9505, 1, 1.089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(*hues):
    low, high = sorted(float(TO_XYZ[1] @ linear(palette.rgb(hue))) for hue in hues)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
def test_idle_causes_are_told_apart_and_are_no_blue_of_a_forward(sight):
    causes = [cielab(palette.rgb(hue), sight) for hue in palette.CAUSE_HUES.values()]
    assert min(np.linalg.norm(a - b) for a, b in combinations(causes, 2)) > 20
    forwards = [cielab(palette.box_colour(Op.F, chunk=c, num_chunks=2, batch=0), sight) for c in range(2)]
    held = cielab(palette.rgb(palette.MEMORY_HUES[MemoryPart.ACTIVATIONS]), sight)
    assert min(np.linalg.norm(a - b) for a in (*causes, held) for b in forwards) > 20


def test_idle_causes_show_on_both_grounds():
    assert min(contrast(hue, "#FFFFFF") for hue in palette.CAUSE_HUES.values()) > 1.6
    assert min(contrast(hue, "#1C2129") for hue in palette.CAUSE_HUES.values()) > 2.3


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


def test_sums_of_gradients_have_a_lane_beside_those_of_compute_and_messages(tmp_path):
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
    write_perfetto(example(latency=0.035), tmp_path / "b")
    assert (tmp_path / "trace.json").read_bytes() == (tmp_path / "b").read_bytes()
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


def test_arrows_are_those_that_a_window_knows_and_never_lead_back(tmp_path):
    """Clocks of two hosts that disagree: rank 1 seems to use what rank 0 has not begun to make."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    ahead, behind = simulate(schedule, Costs()).ranks
    early = tuple(Span(what, start - 3.0, end - 3.0) for what, start, end in behind.compute)
    timeline = Timeline(schedule=schedule, ranks=(ahead, RankTrace(compute=early)), measured=True)
    trace = written(timeline, tmp_path)
    assert [e["name"] for e in of_phase(trace, "s")] == ["grad 0"]
    assert min(e["ts"] for e in of_phase(trace, "X")) == 0.0
    # The first gradients come from a batch before it: no maker, no arrow.
    timeline = simulate(build("2bw", num_ranks=2, num_microbatches=2), Costs(latency=0.25))
    ranks = tuple(replace(trace, compute=trace.compute[12:24]) for trace in timeline.ranks)
    trace = written(replace(timeline, ranks=ranks, measured=True), tmp_path)
    assert 0 < len(of_phase(trace, "s")) == len(of_phase(trace, "f")) < 16
    assert (
        trace["otherData"]["timeline"]["batch_seconds"] == replace(timeline, ranks=ranks, measured=True).batch_seconds
    )


def test_an_empty_timeline_names_its_ranks_and_nothing_is_refused(tmp_path):
    schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    trace = written(Timeline(schedule=schedule, ranks=(RankTrace(compute=()),) * 2), tmp_path)
    assert set(named(trace, "process_name").values()) == {"rank 0", "rank 1"}
    assert not of_phase(trace, "X")
    with pytest.raises(ValueError, match="at least one"):
        write_perfetto([], tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"timelines named \['a', 'a'\]: expected another name for each"):
        write_perfetto([("a", example()), ("a", example())], tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


HOSTILE = "</script><script>document.title = 'broken'</script>\"'&<b>\" onload=\"parent.document.title='broken'"


def small() -> Schedule:
    return build("1f1b", num_ranks=2, num_microbatches=3)


def a_plan(num_microbatches: int | None) -> Plan:
    stages = tuple(PlanStage(nodes=(f"n{rank}",), ranks=(rank,), step_seconds=3.0) for rank in range(2))
    return Plan(
        stages=stages,
        costs=Costs(forward=1.0, backward=2.0),
        num_devices=2,
        cost_model="default",
        bottleneck=3.0,
        bound=3.0,
        num_microbatches=num_microbatches,
    )


def framed(browser: Any, shown: Schedule | Timeline | Plan) -> Any:
    """The frame of a thing in a page as notebooks are."""
    looked = browser.show_html("<!doctype html><title>notebook</title>" + as_html(shown))
    looked.page.frame_locator("iframe").locator("#base").wait_for()
    return looked


@pytest.mark.parametrize(
    ("shown", "caption"),
    [
        (small(), "simulated"),
        (simulate(small(), Costs(forward=0.5)), "simulated"),
        (replace(simulate(small(), Costs(forward=0.5)), measured=True), "measured, step 0"),
        (a_plan(4), "simulated"),
    ],
    ids=["schedule", "timeline", "measured", "plan"],
)
def test_a_cell_holds_the_page(browser: Any, shown: Schedule | Timeline | Plan, caption: str) -> None:
    looked = framed(browser, shown)
    frame = looked.page.frames[1]
    assert frame.evaluate("stagewright.page.panels.map((panel) => panel.caption)") == [caption]
    assert looked.page.title() == "notebook"


def test_a_hostile_name_stays_a_name_and_a_frame_reaches_nothing(browser: Any) -> None:
    looked = framed(browser, replace(small(), name=HOSTILE))
    frame = looked.page.frames[1]
    assert HOSTILE in frame.evaluate("document.getElementById('title').textContent")
    assert len(looked.page.frames) == 2
    reach = "(() => { try { return parent.document.title } catch (error) { return error.name } })()"
    assert frame.evaluate(reach) == "SecurityError"
    assert looked.page.title() == "notebook"


def test_what_cannot_be_shown_is_a_sentence() -> None:
    large = build("gpipe", num_ranks=2, num_microbatches=2_501)
    assert "has 10,004 actions, too many for a notebook" in as_html(large)
    assert "<iframe" in as_html(build("gpipe", num_ranks=2, num_microbatches=2))
    assert "leaves the number of microbatches open" in as_html(a_plan(None))
    backwards = tuple(program[::-1] for program in small().programs)
    stuck = replace(small(), name=HOSTILE, programs=backwards)
    assert "deadlocks" in as_html(stuck)
    assert "<script>" not in as_html(stuck)


def test_show_writes_a_page_and_opens_it_only_where_there_is_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    show(small())
    (page,) = tmp_path.glob("stagewright-*.html")
    assert capsys.readouterr().out == f"{page}: open it in a browser\n"
    assert "<canvas" in page.read_text(encoding="utf-8")
    assert opened == []
    page.unlink()
    monkeypatch.setenv("DISPLAY", ":0")
    show(small())
    (page,) = tmp_path.glob("stagewright-*.html")
    assert opened == [page.as_uri()]
    assert capsys.readouterr().out == f"{page}\n"


def test_show_displays_below_a_notebooks_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[object] = []
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=types.SimpleNamespace(display=displayed.append))
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    schedule = small()
    show(schedule)
    assert displayed == [schedule]
    assert not list(tmp_path.iterdir())

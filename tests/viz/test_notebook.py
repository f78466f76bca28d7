"""Schedules, timelines and plans in notebooks (frames in Chromium), and from a terminal."""

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.inside import as_html

from stagewright.partition import Plan, PlanStage
from stagewright.schedules import Costs, Schedule, Timeline, build, simulate
from stagewright.viz import show

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
    assert looked.said == []
    assert looked.page.title() == "notebook"


def test_a_hostile_name_stays_a_name_and_a_frame_reaches_nothing(browser: Any) -> None:
    looked = framed(browser, replace(small(), name=HOSTILE))
    frame = looked.page.frames[1]
    assert HOSTILE in frame.evaluate("document.getElementById('title').textContent")
    assert len(looked.page.frames) == 2
    reach = "(() => { try { return parent.document.title } catch (error) { return error.name } })()"
    assert frame.evaluate(reach) == "SecurityError"
    assert looked.page.title() == "notebook"
    assert looked.said == []


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

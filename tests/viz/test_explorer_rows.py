"""Rows of the page: pinned, hidden, one for equal replicas; the keys and the wheel that move along them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.inside import OP_HUES, replicate

from stagewright.schedules import Costs, Op, build, simulate
from stagewright.viz import Exhibit, MeasuredStep

from .test_explorer import example, view


def names(looked: Any) -> list[list[str]]:
    """Names of the rows by timeline, from the top: pinned ones first."""
    found: list[list[str]] = looked.evaluate(
        "[...stagewright.view.pins, ...stagewright.view.panels].map(({ rows }) => rows.map(({ name }) => name))"
    )
    return found


def middle(looked: Any, panel: int, row: int) -> tuple[float, float]:
    """A point in the name of a row [pixels of the window]."""
    y = looked.place(panel, row, 0)[1]
    return looked.evaluate("document.getElementById('base').getBoundingClientRect().left + 20"), y


def replicated(*factors: float) -> Exhibit:
    """Two replicas of two stages each, and of a step in which the ranks take so many times as long."""
    schedule = replicate(build("1f1b", num_ranks=2, num_microbatches=4), 2)
    simulated = simulate(schedule, Costs(forward=1.0, backward=2.0))
    measured = replace(simulated, measured=True)
    stretched = [
        replace(trace, compute=tuple(s._replace(end=s.start + by * (s.end - s.start)) for s in trace.compute))
        for trace, by in zip(simulated.ranks, factors, strict=False)
    ]
    steps = (MeasuredStep(1, replace(measured, ranks=tuple(stretched))),) if factors else ()
    return Exhibit(name="run", simulated=simulated, measured=steps)


def test_equal_replicas_are_one_row_that_opens(browser: Any) -> None:
    looked = browser.show(replicated(0.9, 0.8, 0.7, 1.0))
    assert names(looked) == [
        ["rank 0, 2 replicas", "rank 2, 2 replicas"],
        ["rank 0, slowest of 2", "rank 3, slowest of 2"],
    ]
    looked.page.mouse.move(*looked.place(1, 1, 1))
    assert "the slowest of ranks 2, 3, which do the same work" in looked.page.inner_text("#tooltip")
    looked.page.mouse.click(*middle(looked, 0, 1))
    assert looked.page.inner_text("#menu").startswith("rank 2, 2 replicas")
    looked.page.click("#menu >> text=\u00d72")
    assert names(looked)[0] == ["rank 0, 2 replicas", "rank 2", "rank 3"]
    looked.page.keyboard.press("r")
    assert names(looked) == [["rank 0", "rank 1", "rank 2", "rank 3"]] * 2
    looked.page.click("text=Replicas")
    looked.page.click("#rows h2")
    looked.page.click("#rows [aria-label='\u00d72 rank 2']")
    assert names(looked)[0] == ["rank 0, 2 replicas", "rank 2, 2 replicas"]
    looked.evaluate("stagewright.jump(stagewright.page.panels[0], 1, '0F3')")  # a replica that does not show
    assert names(looked)[0] == ["rank 0", "rank 1", "rank 2, 2 replicas"]
    assert looked.said == []


def test_replicas_at_other_times_stay_apart(browser: Any) -> None:
    exhibit = replicated()
    late = [
        (r, tuple(s._replace(end=s.end + 0.01 * r) for s in t.compute)) for r, t in enumerate(exhibit.simulated.ranks)
    ]
    ranks = tuple(replace(exhibit.simulated.ranks[r], compute=spans) for r, spans in late)
    looked = browser.show(replace(exhibit, simulated=replace(exhibit.simulated, ranks=ranks)))
    assert names(looked) == [["rank 0", "rank 1", "rank 2", "rank 3"]]


def test_a_pinned_row_stays_while_the_others_scroll(browser: Any) -> None:
    exhibit = example(num_ranks=32, num_microbatches=40)
    looked = browser.show(exhibit)
    looked.page.mouse.click(*middle(looked, 0, 2))
    assert looked.evaluate("document.activeElement.textContent") == "Pin"  # the menu takes the keyboard
    looked.page.keyboard.press("Enter")
    assert names(looked)[0] == ["rank 2"]
    assert "rank 2" not in names(looked)[1]
    before = looked.evaluate("(p => p.rows[0].top - stagewright.view.scroll)(stagewright.view.pins[0])")
    looked.page.mouse.move(40, 500)
    looked.page.mouse.wheel(0, 200)  # over the names rows scroll
    looked.until("stagewright.view.scroll > 100")
    looked.settle()
    assert looked.evaluate("(p => p.rows[0].top - stagewright.view.scroll)(stagewright.view.pins[0])") == before
    x, y = looked.evaluate(
        """() => {
            const view = stagewright.view, place = view.pins[0].rows[0], box = base.getBoundingClientRect();
            const { start, end } = place.row.compute;
            return [box.left + view.x((start[5] + end[5]) / 2), box.top + place.box + 3 - view.scroll];
        }"""
    )
    looked.page.mouse.move(x, y)
    name = exhibit.simulated.ranks[2].actions[5]  # type: ignore[union-attr]
    assert f"{name} on rank 2" in looked.page.inner_text("#tooltip")
    looked.page.mouse.move(40, 500)
    looked.settle()
    assert looked.colours([(x, y)]) == [OP_HUES[Op.F]]
    looked.page.mouse.move(x, y)
    looked.page.keyboard.press("p")
    assert len(names(looked)) == 1
    assert looked.said == []


def test_rows_and_timelines_are_hidden_and_brought_back(browser: Any) -> None:
    looked = browser.show(example(num_ranks=3, steps=(1,)))
    looked.page.mouse.click(*looked.place(0, 1, 2))
    looked.page.keyboard.press("h")  # the row of the chosen action
    assert names(looked) == [["rank 0", "rank 2"], ["rank 0", "rank 1", "rank 2"]]
    looked.page.click("#rows h2")
    assert "1 of 3 rows hidden" in looked.page.inner_text("#rows")
    looked.page.click("#rows [aria-label='Hide measured, step 1']")
    assert names(looked) == [["rank 0", "rank 2"]]
    assert looked.evaluate("document.activeElement.ariaLabel") == "Hide measured, step 1"
    looked.page.keyboard.press("Enter")
    assert len(names(looked)) == 2
    looked.page.keyboard.press("Shift+H")
    assert names(looked)[0] == ["rank 0", "rank 1", "rank 2"]
    looked.page.click("#rows [aria-label='Hide rank 2'] >> nth=0")
    looked.evaluate("stagewright.jump(stagewright.page.panels[0], 2, '2B1')")  # leads to what it names
    assert names(looked)[0] == ["rank 0", "rank 1", "rank 2"]
    looked.evaluate("stagewright.page.panels.forEach((panel) => stagewright.rows.hide(panel))")
    assert names(looked) == []
    looked.page.keyboard.press("Escape")
    looked.evaluate("stagewright.hover(null, null)")
    looked.page.keyboard.press("p")
    assert "Point at a row" in looked.page.inner_text("#told")
    assert looked.said == []


def test_letters_and_the_wheel_move_as_people_expect(browser: Any) -> None:
    looked = browser.show(example())
    whole = looked.evaluate("stagewright.view.length")
    looked.page.mouse.move(*looked.place(0, 0, 4))
    for _ in range(3):
        looked.page.keyboard.press("w")
    assert view(looked)[1] - view(looked)[0] == pytest.approx(whole / 1.2**3)
    start = view(looked)[0]
    looked.page.keyboard.press("d")
    assert view(looked)[0] > start
    looked.page.keyboard.press("a")
    assert view(looked)[0] == pytest.approx(start)
    for _ in range(3):
        looked.page.keyboard.press("s")
    assert view(looked) == pytest.approx([0, whole])
    looked.page.keyboard.down("Control")
    looked.page.mouse.wheel(0, -200)
    looked.page.keyboard.up("Control")
    looked.settle()
    near = view(looked)
    assert near[1] - near[0] < whole / 1.3
    assert looked.evaluate("window.visualViewport.scale") == 1  # the page itself does not grow
    looked.page.keyboard.down("Shift")
    looked.page.mouse.wheel(0, 100)
    looked.page.keyboard.up("Shift")
    looked.settle()
    assert view(looked)[0] > near[0]
    assert view(looked)[1] - view(looked)[0] == pytest.approx(near[1] - near[0])

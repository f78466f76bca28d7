"""Rows of the page: pinned, hidden, one for equal replicas; the keys and the wheel that move along them.

What a reader does there: search, select, measure, and save pictures and links of a view.
"""

import io
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread
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


def test_equal_replicas_are_one_row_that_opens_and_others_stay_apart(browser: Any) -> None:
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
    exhibit = replicated()
    late = [
        (r, tuple(s._replace(end=s.end + 0.01 * r) for s in t.compute)) for r, t in enumerate(exhibit.simulated.ranks)
    ]
    ranks = tuple(replace(exhibit.simulated.ranks[r], compute=spans) for r, spans in late)
    looked = browser.show(replace(exhibit, simulated=replace(exhibit.simulated, ranks=ranks)))
    assert names(looked) == [["rank 0", "rank 1", "rank 2", "rank 3"]]


@pytest.mark.thorough
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


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def test_search_finds_actions_by_name_and_in_words(browser: Any) -> None:
    exhibit = example("zb-h1", steps=(1,))
    looked = browser.show(exhibit)
    looked.page.keyboard.press("/")
    looked.page.keyboard.type("1I")
    assert looked.page.inner_text("#search output") == "8 found"  # four microbatches, simulated and measured
    for name in ("1I0", "1I1", "1I2"):
        looked.page.keyboard.press("Enter")
        assert f"{name} on rank 1" in looked.page.inner_text("#chosen")
    looked.page.keyboard.press("Shift+Enter")
    assert "1I1 on rank 1" in looked.page.inner_text("#chosen")
    assert looked.page.inner_text("#search output") == "2 of 8"
    for text, found in (
        ("stage 1 microbatch 3", "6 found"),
        ("weight gradient rank 0", "8 found"),
        ("F2", "4 found"),
        ("mb:2 forward", "4 found"),
        ("nonsense", "not understood"),
        ("", ""),
    ):
        looked.page.fill("#search input", text)
        assert looked.page.inner_text("#search output") == found
    looked.page.fill("#search input", "F")
    looked.page.keyboard.press("Escape")
    assert looked.page.input_value("#search input") == ""
    assert looked.evaluate("document.activeElement.id") == "base"


def test_what_is_found_is_framed(browser: Any) -> None:
    looked = browser.show(example())
    (x, y), (other, _) = looked.place(0, 0, 0), looked.place(0, 0, 1)  # 0F0, 0F1
    edge = looked.evaluate("stagewright.view.panels[0].rows[0].boxHeight") / 2 + 1
    before = looked.colours([(x, y - edge), (other, y - edge)])
    looked.page.fill("#search input", "0F0")
    looked.settle()
    found, beside = looked.colours([(x, y - edge), (other, y - edge)])
    assert (found, beside) == ("#D6004C", before[1])


def test_a_selection_tells_what_each_rank_does_in_it(browser: Any) -> None:
    exhibit = example()
    looked = browser.show(exhibit)
    y = looked.place(0, 0, 0)[1]
    looked.page.keyboard.down("Shift")
    looked.page.mouse.move(300, y)
    looked.page.mouse.down()
    looked.page.mouse.move(600, y, steps=3)
    looked.page.mouse.up()
    looked.page.keyboard.up("Shift")
    start, end = looked.evaluate("stagewright.state.range")
    assert view(looked) == [0, exhibit.simulated.makespan]  # nothing moves
    lines = re.split(r"\n(?=rank \d)", looked.page.inner_text("#selection"))[1:]
    for trace, line in zip(exhibit.simulated.ranks, lines, strict=True):
        busy = sum(max(min(end, span.end) - max(start, span.start), 0) for span in trace.compute)
        arrived = sum(start <= span.end < end for span in trace.comm)
        told = [seconds(each) for each in re.findall(r"([\d.]+ m?s)", line)]
        assert told[0] == pytest.approx(busy, rel=5e-3)
        assert sum(told) == pytest.approx(end - start, rel=5e-3)  # busy, and idle by cause
        assert f"{3 * arrived} MB in" in line
    looked.page.keyboard.press("f")
    assert view(looked) == pytest.approx([start, end])
    looked.page.keyboard.press("Escape")
    assert not looked.page.is_visible("#selection")


def test_the_axis_selects_too(browser: Any) -> None:
    looked = browser.show(example(steps=(1,)))
    top = looked.evaluate("document.getElementById('base').getBoundingClientRect().top")
    looked.page.mouse.move(300, top + 30)
    looked.page.mouse.down()
    looked.page.mouse.move(500, top + 30)
    looked.page.mouse.up()
    assert looked.page.inner_text("#selection").count("rank 0") == 2  # simulated and measured


def test_the_distance_between_two_actions(browser: Any) -> None:
    exhibit = example()
    first, second = exhibit.simulated.ranks[0].compute[0], exhibit.simulated.ranks[1].compute[3]
    wanted = [
        f"{first.what} on rank 0, {second.what} on rank 1",
        *(f"{gap:.4g} s" for gap in (second.start - first.start, second.start - first.end, second.end - first.end)),
    ]
    looked = browser.show(exhibit)
    looked.page.mouse.click(*looked.place(0, 0, 0))
    looked.page.keyboard.down("Shift")
    looked.page.mouse.click(*looked.place(0, 1, 3))
    looked.page.keyboard.up("Shift")
    assert [each for each in wanted if each not in looked.page.inner_text("#selection")] == []
    looked.page.keyboard.press("Escape")
    looked.page.focus("#base")
    looked.page.keyboard.press("Tab")  # Esc has let go: Tab leaves first
    looked.page.focus("#base")
    for key in ("Tab", "x", "ArrowDown"):
        looked.page.keyboard.press(key)
    for _ in range(9):
        at = looked.evaluate("[stagewright.state.chosen.row.rank, stagewright.state.chosen.i]")
        if at == [1, 3]:
            break
        looked.page.keyboard.press("ArrowRight" if at[1] < 3 else "ArrowLeft")
    assert at == [1, 3]
    looked.page.keyboard.press("x")
    assert [each for each in wanted if each not in looked.page.inner_text("#selection")] == []


SVG = "{http://www.w3.org/2000/svg}"


def saved(looked: Any, button: str) -> bytes:
    with looked.page.expect_download() as download:
        looked.page.click(button)
    assert download.value.suggested_filename == "run-a." + button[1:]
    return Path(download.value.path()).read_bytes()


def test_a_picture_is_saved_as_pixels_and_as_vectors(browser: Any) -> None:
    exhibit = replace(example("zb-h1", num_ranks=12, num_microbatches=16), name="<run> & a")
    looked = browser.show(exhibit)
    looked.page.set_viewport_size({"width": 1200, "height": 420})  # not all rows are in sight
    looked.settle()
    looked.page.mouse.click(*looked.place(0, 1, 2))
    looked.evaluate("stagewright.scroller.scrollTop = 60")
    looked.until("stagewright.view.scroll === 60")
    title, top = 38, looked.evaluate("stagewright.view.panels[0].rows.map(({ box }) => box)")
    wanted, spots = Counter(), {}  # type: ignore[var-annotated]
    for rank, trace in enumerate(exhibit.simulated.ranks):  # type: ignore[union-attr]
        starts = looked.evaluate(
            "rank => Array.from(stagewright.page.panels[0].rows[rank].compute.start, (at) => stagewright.view.x(at))",
            rank,
        )
        for x, action in zip(starts, trace.actions, strict=True):
            wanted[action.op] += 1
            spots[round(x, 2), top[rank] + title] = action.op
    root = ElementTree.fromstring(saved(looked, "#svg"))
    boxes = [each for each in root.iter(SVG + "rect") if (float(each.get("x", -1)), float(each.get("y", -1))) in spots]
    hues = {OP_HUES[op].lower(): op for op in (Op.F, Op.I)}
    drawn = Counter(hues[each.get("fill")] for each in boxes if each.get("fill") in hues)
    assert drawn == {op: wanted[op] for op in (Op.F, Op.I)}
    hatched = [each for each in boxes if each.get("fill", "").startswith("url(#")]
    assert len(hatched) == wanted[Op.W]
    texts = {each.text for each in root.iter(SVG + "text")}
    assert {"rank 11", "F forward", "W weight gradient", "late peer", "simulated"} <= texts
    assert any("<run> & a" in str(text) for text in texts)
    assert not list(root.iter(SVG + "image"))
    pixels = imread(io.BytesIO(saved(looked, "#png")))
    height = float(root.get("height", 0))
    assert pixels.shape[:2] == (2 * height, 2 * float(root.get("width", 0)))
    assert height > 420
    seen = [(spot, op) for spot, op in spots.items() if op in (Op.F, Op.I)]
    for (x, y), op in seen[:: len(seen) // 20]:
        pixel = pixels[round(2 * (y + 4)), round(2 * (x + 3))]
        assert "#" + "".join(f"{round(255 * part):02X}" for part in pixel[:3]) == OP_HUES[op]
    assert looked.evaluate("[stagewright.view.scroll, stagewright.view.height < 420]") == [60, True]  # as it was


@pytest.mark.thorough
def test_crowded_rows_are_saved_as_a_small_picture_in_the_vectors(browser: Any) -> None:
    looked = browser.show(replace(example("gpipe", num_ranks=2, num_microbatches=3000), name="run a"))
    text = saved(looked, "#svg")
    assert len(text) < 200_000
    assert len(list(ElementTree.fromstring(text).iter(SVG + "image"))) >= 2


def test_a_link_shows_the_view_again(browser: Any) -> None:
    exhibit = example(num_ranks=4, steps=(0, 1, 2))
    looked = browser.show(exhibit)
    looked.evaluate(
        """() => {
            const { page, rows, view } = stagewright;
            stagewright.chooseStep(page.exhibits[0], 1);
            rows.hide(page.panels[1], page.panels[1].rows[2]);
            rows.pin(page.panels[0], page.panels[0].rows[3]);
            stagewright.toggles.find(({ key }) => key === "i").flip();
            stagewright.toggles.find(({ key }) => key === "c").flip();
            view.set(2.5, 7.25);
            stagewright.jump(page.panels[1], 1, "1F2");
        }"""
    )
    before = view(looked)
    looked.page.click("#link")
    looked.until("!document.getElementById('told').hidden")
    link = looked.page.url
    assert link.startswith("file:")
    state = """() => ({
        rows: [...stagewright.view.pins, ...stagewright.view.panels].map((place) => place.rows.map(({ name }) => name)),
        shows: stagewright.view.shows,
        chosen: stagewright.state.chosen && stagewright.state.chosen.panel.name(1, stagewright.state.chosen.i),
        step: stagewright.page.exhibits[0].chosen,
    })"""
    wanted = looked.evaluate(state)
    assert wanted["rows"] == [["rank 3"], ["rank 0", "rank 1", "rank 2"], ["rank 0", "rank 1", "rank 3"]]
    looked.page.goto("about:blank")
    looked.page.goto(link)
    looked.settle()
    assert looked.evaluate(state) == wanted
    assert wanted["chosen"] == "1F2"
    assert view(looked) == pytest.approx(before, rel=1e-8)
    looked.page.evaluate("location.hash = 't=1,2'")  # a link that is typed into an open page
    looked.until("stagewright.rows.hidden.size === 0")
    assert view(looked) == pytest.approx([1, 2])
    assert looked.evaluate(state)["shows"]["idle"] is True


def test_what_a_link_names_and_the_page_has_not_is_said(browser: Any) -> None:
    looked = browser.show(example())
    looked.page.evaluate("location.hash = 'hide=0s9,0s1&at=0s0:7F7&step=4&colour=red&on=idle,smoke&t=3'")
    looked.until("!document.getElementById('told').hidden")
    told = looked.page.inner_text("#told")
    assert "Not on this page: colour, step=4, hide=0s9, on=smoke, t=3, at=0s0:7F7" in told
    assert looked.evaluate("[...stagewright.rows.hidden]") == ["0s1"]

"""Pictures that the page saves, by one drawing for pixels and vectors, and links of a view."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread
from support.inside import OP_HUES

from stagewright.schedules import Op

from .test_explorer import example, view

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
    for rank, trace in enumerate(exhibit.predicted.ranks):  # type: ignore[union-attr]
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
    assert {"rank 11", "F forward", "W weight gradient", "late peer", "predicted"} <= texts
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
    assert looked.said == []


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
    assert looked.said == []


def test_what_a_link_names_and_the_page_has_not_is_said(browser: Any) -> None:
    looked = browser.show(example())
    looked.page.evaluate("location.hash = 'hide=0p9,0p1&at=0p0:7F7&step=4&colour=red&on=idle,smoke&t=3'")
    looked.until("!document.getElementById('told').hidden")
    told = looked.page.inner_text("#told")
    assert "Not on this page: colour, step=4, hide=0p9, on=smoke, t=3, at=0p0:7F7" in told
    assert looked.evaluate("[...stagewright.rows.hidden]") == ["0p1"]
    assert looked.said == []

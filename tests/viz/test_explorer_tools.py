"""What a reader does on the page: search, select, measure."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .test_explorer import example, view


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def test_search_finds_actions_by_name_and_in_words(browser: Any) -> None:
    exhibit = example("zb-h1", steps=(1,))
    looked = browser.show(exhibit)
    looked.page.keyboard.press("/")
    looked.page.keyboard.type("1I")
    assert looked.page.inner_text("#search output") == "8 found"  # four microbatches, predicted and measured
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
    assert looked.said == []


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
    assert view(looked) == [0, exhibit.predicted.makespan]  # nothing moves
    lines = re.split(r"\n(?=rank \d)", looked.page.inner_text("#selection"))[1:]
    for trace, line in zip(exhibit.predicted.ranks, lines, strict=True):
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
    assert looked.said == []


def test_the_axis_selects_too(browser: Any) -> None:
    looked = browser.show(example(steps=(1,)))
    top = looked.evaluate("document.getElementById('base').getBoundingClientRect().top")
    looked.page.mouse.move(300, top + 30)
    looked.page.mouse.down()
    looked.page.mouse.move(500, top + 30)
    looked.page.mouse.up()
    assert looked.page.inner_text("#selection").count("rank 0") == 2  # predicted and measured


def test_the_distance_between_two_actions(browser: Any) -> None:
    exhibit = example()
    first, second = exhibit.predicted.ranks[0].compute[0], exhibit.predicted.ranks[1].compute[3]
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
    assert looked.said == []

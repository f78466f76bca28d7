"""Timelines as text: what stands in which column, with and without colours."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.inside import OP_HUES, render_terminal

from stagewright.schedules import Costs, RankTrace, Schedule, Span, Timeline, build, simulate
from stagewright.viz import Exhibit, MeasuredStep


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

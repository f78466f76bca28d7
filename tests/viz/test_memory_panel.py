"""Memory below the timelines of a figure: heights of parts and lines, on one scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.colors import to_rgba
from support.inside import MEMORY_HUES, MemoryPanel, ceiling_of, panels_of

from stagewright.schedules import Costs, MemoryPart, StageBytes, Timeline, build, simulate
from stagewright.viz import Exhibit, FigureStyle, MeasuredStep, comparison_figure

STAGES = (
    StageBytes(weights=100.0, gradients=100.0, activations=50.0),
    StageBytes(weights=300.0, gradients=300.0, activations=20.0, workspace=7.0),
)
STYLE = FigureStyle(memory=True)


def exhibit(**fields: object) -> Exhibit:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=4), Costs(latency=0.1))
    return Exhibit(**{"name": "x", "simulated": timeline, "memory": STAGES, **fields})  # type: ignore[arg-type]


def words(figure: object) -> list[str]:
    """Words of all legends."""
    return [text.get_text() for line in figure.legends for text in line.get_texts()]  # type: ignore[attr-defined]


def test_parts_are_stacked_to_the_curve() -> None:
    """The upper edge of the highest part is what the rank holds, at each time."""
    shown = exhibit()
    figure = comparison_figure(shown, style=STYLE)
    (panel,) = (p for p in panels_of([shown], memory=True) if isinstance(p, MemoryPanel))
    ceiling = ceiling_of([panel])
    assert ceiling == pytest.approx(1.06 * max(curve.peak for curve in panel.curves.values()))
    axes = figure.axes[2]  # the timeline, its idle bars, memory
    assert axes.get_ylim() == (2, 0)
    at = 0
    for rank, curve in panel.curves.items():
        below = 0.0
        for part, values in curve.parts.items():
            drawn = axes.collections[at]
            assert tuple(drawn.get_facecolor()[0]) == to_rgba(MEMORY_HUES[part])
            ys = drawn.get_paths()[0].vertices[:, 1]
            highest = (rank + 0.93 - ys.min()) / 0.86 * ceiling
            stacked = [
                sum(curve.parts[p][n] for p in list(curve.parts)[: list(curve.parts).index(part) + 1])
                for n in range(len(values))
            ]
            assert highest == pytest.approx(max(stacked))
            assert highest >= below
            below, at = highest, at + 1
        assert below == pytest.approx(curve.peak)
    assert len(axes.collections) == at
    assert {"weights", "gradients", "activations", "workspace"} <= set(words(figure))


def test_the_steps_are_where_they_happen() -> None:
    """Curves of a measured timeline, whose clock began long before, begin at 0 and end with it."""
    shifted = replace(simulate(build("gpipe", num_ranks=1, num_microbatches=1), Costs()), measured=True).shifted(1e3)
    shown = Exhibit(name="x", measured=(MeasuredStep(0, shifted),), memory=(StageBytes(activations=10.0),))
    axes = comparison_figure(shown, style=STYLE).axes
    memory = next(a for a in axes if a.get_title() == "" and any(t.get_text().strip() == "10 bytes" for t in a.texts))
    xs = memory.collections[0].get_paths()[0].vertices[:, 0]
    assert (xs.min(), xs.max()) == (0.0, pytest.approx(shifted.makespan))
    assert memory.get_xlim()[1] == pytest.approx(shifted.makespan)


@pytest.mark.thorough
def test_peaks_and_limit_are_lines() -> None:
    most = max(curve.peak for curve in exhibit().curves(exhibit().simulated) or ())  # type: ignore[arg-type]
    shown = exhibit(memory_limit=(1.5 * most,) * 2, predicted_peak=(most, most / 2), measured_peak=(most / 2,) * 2)
    figure = comparison_figure(shown, style=STYLE)
    axes = figure.axes[2]
    ceiling = 1.06 * 1.5 * most
    drawn = {(line.get_linestyle(), round(line.get_ydata()[0], 9)) for line in axes.lines}
    assert drawn == {
        (style, round(rank + 0.07 + 0.86 * (1 - value / ceiling), 9))
        for style, values in (("-", shown.memory_limit), ("--", shown.predicted_peak), (":", shown.measured_peak))
        for rank, value in enumerate(values or ())
    }
    assert words(figure)[-3:] == ["limit", "predicted peak", "measured peak"]
    far = comparison_figure(replace(shown, memory_limit=(100 * most,) * 2), style=STYLE)
    assert words(far)[-2:] == ["predicted peak", "measured peak"]
    assert {line.get_linestyle() for line in far.axes[2].lines} == {"--", ":"}


@pytest.mark.thorough
def test_it_is_drawn_where_asked_for_and_known() -> None:
    assert len(panels_of([exhibit()])) == 1
    assert [type(p).__name__ for p in panels_of([exhibit(memory=()), exhibit()], memory=True)] == [
        "TimelinePanel",
        "TimelinePanel",
        "MemoryPanel",
    ]
    assert words(comparison_figure(exhibit())) == words(comparison_figure(exhibit(memory=()), style=STYLE))
    # The idle bars' axis keeps its words, though memory stands below them.
    labels = [axes.get_xlabel() for axes in comparison_figure(exhibit(), style=STYLE).axes]
    assert labels == ["", "idle [% of makespan]", "time [s]"]


def test_a_missing_rank_holds_nothing_that_is_known() -> None:
    timeline: Timeline = exhibit().simulated  # type: ignore[assignment]
    measured = replace(
        timeline,
        measured=True,
        missing=(1,),
        ranks=(timeline.ranks[0], replace(timeline.ranks[1], compute=(), comm=())),
    )
    shown = exhibit(simulated=None, measured=(MeasuredStep(0, measured),))
    panel = panels_of([shown], memory=True)[1]
    assert list(panel.curves) == [0]
    comparison_figure(shown, style=STYLE)
    assert MemoryPart.WEIGHTS in panel.curves[0].parts

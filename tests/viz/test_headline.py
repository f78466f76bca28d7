"""The figures over a timeline, against the formulas of papers; lanes of overlapping spans, and gaps by cause.

Memory below the timelines of a figure: heights of parts and lines, on one scale.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from support.inside import (
    MEMORY_HUES,
    Delivery,
    HeadFigure,
    MemoryPanel,
    Sheet,
    assign_lanes,
    ceiling_of,
    find_arrows,
    find_gaps,
    headline,
    median_costs,
    panels_of,
    render_terminal,
)

from stagewright.schedules import (
    FAMILIES,
    Action,
    Costs,
    Link,
    Links,
    MemoryPart,
    Message,
    MessageKind,
    Op,
    RankTrace,
    Span,
    StageBytes,
    StepSamples,
    Timeline,
    attribute_idle,
    build,
    lower_bound,
    simulate,
)
from stagewright.viz import Exhibit, FigureStyle, MeasuredStep, comparison_figure

COSTS = Costs(forward=1.0, backward=2.0)


def by_label(exhibit: Exhibit) -> dict[str, HeadFigure]:
    return {figure.label: figure for figure in headline(exhibit)}


def slowed(timeline: Timeline, factor: float) -> Timeline:
    ranks = tuple(
        replace(rank, compute=tuple(s._replace(start=s.start * factor, end=s.end * factor) for s in rank.compute))
        for rank in timeline.ranks
    )
    return replace(timeline, ranks=ranks, measured=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_figures_of_a_prediction(name: str) -> None:
    timeline = simulate(build(name, num_ranks=4, num_microbatches=8), COSTS)
    found = by_label(Exhibit(name=name, simulated=timeline, costs=COSTS))
    assert [*found] == ["simulated", "lower bound"]
    assert found["simulated"][1:3] == (timeline.batch_seconds, timeline.bubble)
    assert found["lower bound"].seconds <= timeline.batch_seconds + 1e-9
    assert -1e-9 <= found["lower bound"].bubble <= timeline.bubble + 1e-9


def test_figures_of_a_run_with_and_without_its_costs() -> None:
    """Three steps: their median; the bound takes links and the optimizer into account."""
    schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    costs = Costs(forward=[1.0, 1.0, 1.0, 2.0], backward=2.0, update=0.5)
    links = Links(network=Link(latency=0.5))
    simulated = simulate(schedule, costs, links)
    steps = tuple(MeasuredStep(n, slowed(simulated, factor)) for n, factor in ((3, 1.5), (23, 2.0), (43, 1.25)))
    found = by_label(Exhibit(name="run", simulated=simulated, measured=steps, costs=costs, links=links))
    assert [*found] == ["simulated", "measured", "lower bound"]
    assert found["measured"].seconds == pytest.approx(1.5 * simulated.makespan)
    assert found["measured"].how == "median of 3 steps"
    assert found["lower bound"].seconds == lower_bound(schedule, costs, links)
    schedule = build("zb-h1", num_ranks=4, num_microbatches=8)
    costs = Costs(forward=1.0, input_grad=1.5, weight_grad=0.5, update=0.25)
    timeline = simulate(schedule, costs)
    assert median_costs(timeline).table(num_stages=4) == costs.table(num_stages=4)
    found = by_label(Exhibit(name="trace", measured=(MeasuredStep(7, replace(timeline, measured=True)),)))
    assert found["lower bound"].seconds == lower_bound(schedule, costs)
    assert found["measured"].how == "step 7"
    assert "its own actions" in found["lower bound"].how


@pytest.mark.thorough
def test_a_prediction_with_a_spread_is_the_median_of_its_samples() -> None:
    """In headline and pictures alike, and a measured step is held against that."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    timeline = simulate(schedule, COSTS)
    sampled = StepSamples(seconds=tuple(16.0 + n / 10 for n in range(99)), bubbles=(0.25,) * 99)
    measured = (MeasuredStep(3, slowed(timeline, 1.4)),)
    exhibit = Exhibit(name="x", simulated=timeline, measured=measured, costs=COSTS, sampled=sampled)
    figure = by_label(exhibit)["predicted"]
    assert (figure.seconds, figure.bubble) == (pytest.approx(20.9), 0.25)
    assert figure.how == "90%: 16.4 s .. 25.4 s; median of 99 steps with durations drawn as they vary"
    simulated, beside = panels_of([exhibit])
    assert simulated.title("s", 1.0).startswith("simulated:  makespan 15 s,  ")
    assert simulated.title("s", 1.0).endswith(";  predicted 20.9 s (90%: 16.4 s .. 25.4 s)")
    assert "makespan 21 s (1.005 times predicted)" in beside.title("s", 1.0)
    assert (beside.expected_end, beside.predicted_ends) == (figure.seconds, pytest.approx((16.4, 25.4)))
    assert simulated.predicted_ends is None
    early = replace(exhibit, measured=(MeasuredStep(3, slowed(timeline, 1.0)),))  # before what is predicted
    assert Sheet(panels_of([early]), FigureStyle()).scale.length == pytest.approx(25.4)
    for shown, name in ((exhibit, "predicted end"), (replace(exhibit, sampled=None), "simulated end")):
        legends = comparison_figure(shown).legends
        assert name in [text.get_text() for legend in legends for text in legend.get_texts()]
    text = render_terminal([exhibit], width=100, colour=False)
    assert "predicted 20.9 s (90%: 16.4 s .. 25.4 s)" in text


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


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=30).map(
    lambda pairs: sorted((start, start + length) for start, length in pairs)
)


@given(spans)
def test_spans_of_a_lane_do_not_overlap_and_lanes_are_as_few_as_overlap_at_once(spans):
    ends = {}
    for (start, end), lane in zip(spans, assign_lanes(spans), strict=True):
        assert ends.get(lane, start) <= start
        ends[lane] = end
    at_once = max((sum(s <= at < e for s, e in spans) for at in range(40)), default=0)
    assert len(set(assign_lanes([span for span in spans if span[0] < span[1]]))) == at_once


def delayed(timeline, *, factor):
    """The same run with every rank slower by `factor`, but its actions as long as before: gaps without a cause."""

    def slow(spans):
        return tuple(Span(what, start * factor, start * factor + (end - start)) for what, start, end in spans)

    ranks = tuple(RankTrace(compute=slow(rank.compute), comm=rank.comm) for rank in timeline.ranks)
    return replace(timeline, ranks=ranks, measured=True)


UNEVEN = Costs(forward=[1.0, 1.5, 0.5, 1.0], backward=[2.0, 2.5, 3.0, 1.0], latency=0.25, update=0.5)


@pytest.mark.parametrize(
    ("name", "num_ranks", "factor"),
    [("gpipe", 4, 1.0), ("1f1b", 4, 1.0), ("interleaved", 2, 1.0), ("1f1b", 4, 1.1), ("interleaved", 2, 1.2)],
)
def test_gaps_add_up_to_the_attribution(name, num_ranks, factor):
    timeline = simulate(build(name, num_ranks=num_ranks, num_microbatches=6), UNEVEN)
    if factor > 1:
        timeline = delayed(timeline, factor=factor)
    for idle, gaps in zip(attribute_idle(timeline), find_gaps(timeline), strict=True):
        total = {c: sum(getattr(gap, c) for gap in gaps.values()) for c in ("late_peer", "transfer", "unexplained")}
        assert total["late_peer"] == pytest.approx(idle.late_peer + idle.imbalance, abs=1e-12)
        assert total["transfer"] == pytest.approx(idle.transfer, abs=1e-12)
        assert total["unexplained"] == pytest.approx(idle.unexplained, abs=1e-12)
        assert sum(gap.warm_up for gap in gaps.values()) == pytest.approx(idle.warm_up, abs=1e-12)
        assert (idle.unexplained > 0) == (factor > 1)


def test_gap_names_its_largest_cause():
    """Rank 1 gets 1F0 after 1 s of work and 3 s on the way; rank 0 then waits for both, the way back too."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    first, second = find_gaps(simulate(schedule, Costs(forward=1.0, backward=2.0, latency=3.0)))
    assert second[Action(1, Op.F, 0)].cause == "warm_up"
    assert second[Action(1, Op.F, 0)].seconds == 4.0
    assert (first[Action(0, Op.B, 0)].late_peer, first[Action(0, Op.B, 0)].transfer) == (6.0, 3.0)
    assert first[Action(0, Op.B, 0)].cause == "late_peer"
    assert list(first) == [Action(0, Op.B, 0)]


def test_arrows_are_what_crosses_ranks():
    schedule = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    arrows = find_arrows(simulate(schedule, Costs()))
    assert len(arrows) == 3 * 2 * 2  # boundaries x microbatches x directions
    assert Delivery(Message(MessageKind.ACT, 1, 2, 0), Action(1, Op.F, 0), 1, Action(2, Op.F, 0), 0) in arrows
    assert Delivery(Message(MessageKind.GRAD, 2, 1, 1), Action(2, Op.B, 1), 0, Action(1, Op.B, 1), 1) in arrows

"""The figures over a timeline, against the formulas of papers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.inside import (
    HeadFigure,
    Sheet,
    busy_seconds,
    headline,
    median_costs,
    panels_of,
    render_terminal,
)
from support.inside import expected_least_seconds as least_seconds

from stagewright.schedules import FAMILIES, Costs, Link, Links, StepSamples, Timeline, build, lower_bound, simulate
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


@pytest.mark.thorough(but=["zb-h1"])
@pytest.mark.parametrize("name", FAMILIES)
def test_figures_of_a_prediction(name: str) -> None:
    timeline = simulate(build(name, num_ranks=4, num_microbatches=8), COSTS)
    found = by_label(Exhibit(name=name, simulated=timeline, costs=COSTS))
    assert [*found] == ["simulated", "lower bound"]
    assert found["simulated"][1:3] == (timeline.batch_seconds, timeline.bubble)
    assert found["lower bound"].seconds <= timeline.batch_seconds + 1e-9
    assert found["lower bound"].bubble <= timeline.bubble + 1e-9


def test_figures_of_a_run() -> None:
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


def test_where_costs_are_not_known_a_timeline_s_own_medians_stand_for_them() -> None:
    schedule = build("zb-h1", num_ranks=4, num_microbatches=8)
    costs = Costs(forward=1.0, input_grad=1.5, weight_grad=0.5, update=0.25)
    timeline = simulate(schedule, costs)
    assert median_costs(timeline).table(num_stages=4) == costs.table(num_stages=4)
    found = by_label(Exhibit(name="trace", measured=(MeasuredStep(7, replace(timeline, measured=True)),)))
    assert found["lower bound"].seconds == lower_bound(schedule, costs)
    assert found["measured"].how == "step 7"
    assert "its own actions" in found["lower bound"].how


def test_streams_are_counted_by_the_batch() -> None:
    schedule = build("2bw", num_ranks=4, num_microbatches=8)
    costs = Costs(forward=1.0, update=0.5)
    assert busy_seconds(schedule, costs) == 4 * 8 * 3
    assert least_seconds(schedule, costs) == 8 * 3 + 0.5


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

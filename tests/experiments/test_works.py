"""Findings of the experiments of the catalog, where a simulation says it; and one of them on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inside import Case, How, bubbles, ranges
from support.inside import JobsFigureFigure as Figure
from support.small import X, Y, make

from .on_ranks import figures_on_ranks


def value(figures: list[Figure], name: str, how: How = How.SIMULATED) -> float:
    (found,) = [figure.value for figure in figures if (figure.name, figure.how) == (name, how)]
    return found


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [("1f1b", 3 / 7), ("interleaved", 3 / 11), ("zb-h1", 1 / 5), ("2bw", 0.0)],  # P = M = 4, V = 2, I = W = F
)
def test_bubbles_are_those_of_the_closed_forms(schedule: str, bubble: float) -> None:
    figures = list(bubbles.simulated(Case.of({"schedule": schedule, "ranks": 4, "rounds": 1}), 1))
    assert value(figures, "bubble") == pytest.approx(bubble)
    assert value(figures, "bubble", How.CLOSED_FORM) == pytest.approx(bubble)
    assert {figure.case.count("microbatches") for figure in figures} == {4}


@pytest.mark.thorough
@pytest.mark.gloo
def test_emulated_on_ranks_of_the_local_back_end(tmp_path: Path) -> None:
    """On a busy machine the bubble may only be larger."""
    flush, stream = ({"schedule": name, "ranks": 2, "rounds": 1} for name in ("1f1b", "2bw"))
    figures = figures_on_ranks(tmp_path, "bubbles:emulated", flush, stream, ranks=2, repetitions=2)
    assert [figure.repetition for figure in figures if figure.name == "bubble"] == [0, 1, 0, 1]
    first, *_ = (figure.value for figure in figures if figure.name == "bubble")
    assert 0.3 < first < 1
    assert all(figure.value > 0.99 for figure in figures if figure.name == "batch, emulated / simulated")


@pytest.mark.thorough
def test_steps_are_counted_within_a_range_that_earlier_ones_told() -> None:
    """Figures come out, of ranks in one process; how many steps lie within is a question of the machine."""
    pipe = make()
    case = Case.of({"schedule": "1f1b", "ranks": 2, "steps": 12})
    figures = list(ranges.figures_of(case, pipe, lambda: pipe.train_step(X, Y), How.MEASURED, repetitions=2))
    shares = [figure.value for figure in figures if figure.name == ranges.WITHIN]
    assert len(shares) == 2
    assert all(0 <= share <= 1 for share in shares)
    short = Case.of({"schedule": "1f1b", "ranks": 2, "steps": 9})
    with pytest.raises(ValueError, match="steps: expected at least 10"):
        list(ranges.figures_of(short, pipe, lambda: pipe.train_step(X, Y), How.MEASURED, repetitions=1))

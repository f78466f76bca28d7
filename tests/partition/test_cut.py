"""cut_evenly against all cuts of small sequences."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import SLACK, cut_evenly

steady = settings(max_examples=150, deadline=None, derandomize=True)
weights = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=8)


def all_cuts(n: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in combinations(range(1, n), num_stages - 1)]


def heaviest(cut: tuple[int, ...], weights: list[float]) -> float:
    return max(sum(weights[a:b]) for a, b in zip(cut, [*cut[1:], len(weights)], strict=True))


@pytest.mark.thorough
@steady
@given(weights, st.data())
def test_the_heaviest_stage_is_as_light_as_can_be(weights: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))
    cut = cut_evenly(weights, num_stages=num_stages)
    assert cut in all_cuts(len(weights), num_stages)
    best = min(heaviest(other, weights) for other in all_cuts(len(weights), num_stages))
    # Each unit has a millionth of the mean more, so that units without weight spread.
    assert heaviest(cut, weights) == pytest.approx(best, rel=1e-5, abs=1e-5)


@pytest.mark.thorough
@steady
@given(weights, st.data())
def test_then_the_fewest_bytes_cross(weights: list[float], data: st.DataObject) -> None:
    n = len(weights)
    num_stages = data.draw(st.integers(1, n))
    crossing = [0.0] + [data.draw(st.sampled_from([0.0, 1.0, 2.0, 5.0, math.inf])) for _ in weights[1:]]
    possible = [cut for cut in all_cuts(n, num_stages) if all(crossing[i] < math.inf for i in cut[1:])]
    if not possible:
        with pytest.raises(ValueError, match=f"num_stages={num_stages} for a model of .* units that can be cut apart"):
            cut_evenly(weights, num_stages=num_stages, crossing_bytes=crossing)
        return
    cut = cut_evenly(weights, num_stages=num_stages, crossing_bytes=crossing)
    assert cut in possible
    best = min(heaviest(other, weights) for other in possible)
    assert heaviest(cut, weights) <= SLACK * best + 1e-4
    light = [other for other in possible if heaviest(other, weights) <= SLACK * best - 1e-4]
    assert sum(crossing[i] for i in cut[1:]) <= min(
        (sum(crossing[i] for i in other[1:]) for other in light), default=math.inf
    )


@pytest.mark.parametrize(
    ("n", "num_stages", "crossing", "most"),
    [(3, 4, None, 3), (3, 0, None, 3), (0, 1, None, 0), (4, 3, [0, math.inf, math.inf, 0], 2)],
)
def test_more_stages_than_places(n: int, num_stages: int, crossing: list[float] | None, most: int) -> None:
    with pytest.raises(
        ValueError, match=rf"num_stages={num_stages} for a model of {most} units .* expected 1 to {most}"
    ):
        cut_evenly([1.0] * n, num_stages=num_stages, crossing_bytes=crossing)


@pytest.mark.parametrize(
    ("weights", "crossing"),
    [
        ([1.0, -1.0], None),
        ([1.0, math.nan], None),
        ([1.0, math.inf], None),
        ([1.0, 1.0], [0.0, -1.0]),
        ([1.0, 1.0], [0.0, math.nan]),
        ([1.0, 1.0], [0.0]),
    ],
)
def test_no_weights(weights: list[float], crossing: list[float] | None) -> None:
    with pytest.raises(ValueError, match="expected a number of at least 0 for each unit"):
        cut_evenly(weights, num_stages=1, crossing_bytes=crossing)

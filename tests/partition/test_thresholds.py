"""The search over thresholds against the exact dynamic program."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import SCHEDULES, solve, solve_large

from stagewright.partition import Cluster, Node, Profile

from .small import CLUSTERS, profiles
from .test_dynamic import OPTIONS, check_solution, costs_of

steady = settings(max_examples=150, deadline=None, derandomize=True)
FLAT = st.builds(
    lambda size, speed: Cluster.from_levels([(size, speed)]), st.integers(1, 9), st.sampled_from([0.5, 3.0])
)


def light(profile: Profile) -> Profile:
    """Without weights, so that what is in flight decides what fits."""
    return replace(profile, nodes=tuple(replace(node, parameter_bytes=0.0) for node in profile.nodes))


@steady
@given(profiles(max_nodes=7) | profiles(max_nodes=7).map(light), FLAT, OPTIONS, st.booleans())
def test_exact_on_one_level(profile: Profile, cluster: Cluster, options: dict, straight: bool) -> None:
    costs = costs_of(profile, cluster, options)
    exact = [s.seconds for s in solve(costs, straight=straight)] or [math.inf]
    found = solve_large(costs, straight=straight)
    assert (math.inf if found is None else found.seconds) == pytest.approx(exact[0], rel=2e-7, abs=1e-12)
    if found is not None:
        check_solution(found, costs, profile, cluster, options)
        assert found.bound <= exact[0] * (1 + 1e-12)


@steady
@given(profiles(max_nodes=7), CLUSTERS, OPTIONS)
def test_bound_and_plan_on_several_levels(profile: Profile, cluster: Cluster, options: dict) -> None:
    costs = costs_of(profile, cluster, options)
    exact = solve(costs)
    found = solve_large(costs)
    if found is not None:
        check_solution(found, costs, profile, cluster, options)
        assert found.bound <= exact[0].seconds * (1 + 1e-12) <= found.seconds * (1 + 1e-9)
    else:
        assert options["limit"] < math.inf  # it may miss a plan that only just fits


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("straight", [False, True])
def test_microbatches_in_flight_decide_what_fits(schedule: str, straight: bool) -> None:
    figures = {"forward_seconds": 1, "backward_seconds": 1, "parameter_bytes": 0.1, "stash_bytes": 1}
    profile = Profile(nodes=tuple(Node(name=f"n{i}", **figures) for i in range(6)))
    cluster = Cluster.from_levels([(5, 0.01)])  # slow links: replicas do not pay
    for quarters in (*range(2, 20), *range(20, 60, 4)):
        options = {"schedule": schedule, "num_microbatches": None, "limit": quarters / 4}
        costs = costs_of(profile, cluster, options)
        exact, found = solve(costs, straight=straight), solve_large(costs, straight=straight)
        assert (found is None) == (not exact)
        if found is not None:
            assert found.seconds == pytest.approx(exact[0].seconds, rel=2e-7)

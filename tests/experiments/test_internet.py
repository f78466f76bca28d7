"""The experiment past one data centre: its world, and plans on real links against the planner's own figures."""

import itertools
from dataclasses import replace

import pytest
from support.inside import GIGABIT, REGIONS, Case, internet


def test_the_world_is_as_wide_as_the_issue_says():
    latencies = [a.latency(b) for a in REGIONS for b in REGIONS if a is not b]
    assert 0.010 <= min(latencies) < 0.012
    assert 0.135 < max(latencies) <= 0.150
    assert {region.card / GIGABIT for region in REGIONS} >= {0.1, 10.0}
    assert len({region.kind for region in REGIONS}) == 2


@pytest.mark.thorough
def test_alike_regions_take_what_the_planner_says(monkeypatch):
    """Where every pair of regions has the same link, the replay on real links is the planner's own simulation."""
    alike = tuple(replace(region, kind="fast", card=3 * GIGABIT) for region in REGIONS)
    monkeypatch.setattr(internet.Region, "latency", lambda self, other: 0.05)
    internet.path_of.cache_clear()
    for used in (2, 4):
        found = internet._plan(64, alike[:used], ("1f1b",), apart=True)
        replayed = internet.seconds_of(found, internet.places(found, alike[:used], 64), 64)
        assert replayed == pytest.approx(found.simulated_step_time, rel=0.02)
    internet.path_of.cache_clear()


@pytest.mark.thorough
def test_regions_are_put_where_messages_travel_least():
    found = internet._plan(64, REGIONS[:4], ("1f1b",), apart=True)
    order = internet.places(found, REGIONS[:4], 64)
    assert sorted(region.name for region in order) == sorted(region.name for region in REGIONS[:4])
    assert [region.kind for region in order] == [region.kind for region in REGIONS[:4]]  # devices stay what they are
    fast = [at for at, region in enumerate(order) if region.kind == "fast"]
    seconds = []
    for places in itertools.permutations(fast):
        moved = list(order)
        for at, source in zip(fast, places, strict=True):
            moved[at] = order[source]
        seconds.append(internet.seconds_of(found, moved, 64))
    assert seconds[0] <= 1.01 * min(seconds)
    assert max(seconds) > 1.001 * min(seconds)  # the places matter


def test_a_case_that_cannot_be_is_named():
    with pytest.raises(ValueError, match="devices of 64, 256, 1024, 4096 and 2 to 8 regions"):
        list(internet.plan_and_simulate(Case.of({"devices": 63, "regions": 2, "schedules": "flush"}), 1))

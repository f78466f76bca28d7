"""A plan that takes just as many bytes as there are fits; one byte in a million less, and it does not."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest

from stagewright.partition import Cluster, GivenStage, Node, Plan, Profile, evaluate, partition, plan

BELOW = 1 - 1e-6


def by_plan(profile: Profile, cluster: Cluster, M: int, limit: float, *, straight: bool = False) -> Plan:
    data = (1,) if straight else None
    free: dict[str, Any] = {"recompute": ("none",), "optimizer_sharding": ("none",), "schedules": "1f1b"}
    return plan(profile, cluster, global_batch=M, memory_limit=limit, data_sizes=data, **free)


def by_partition(profile: Profile, cluster: Cluster, M: int, limit: float, *, straight: bool = False) -> Plan:
    return partition(profile, cluster, num_microbatches=M, memory_limit=limit, straight=straight)


PLANNERS = (by_plan, by_partition)


@pytest.mark.parametrize(("devices", "M", "needed"), [(1, 1, 80.0), (1, 4, 90.0), (2, 1, 40.0), (2, 4, 50.0)])
def test_eighty_bytes_fit_in_eighty(devices: int, M: int, needed: float) -> None:
    """Two nodes of 10 bytes of weights, with gradients and twice as much of the optimizer; 5 bytes of each microbatch.

    The first backward's gradients come while its microbatch is still there: after a batch of one 4 x 20 bytes, before
    the last of several backwards 10 more; of two stages each half.
    """
    nodes = [
        Node(name=name, forward_seconds=1, backward_seconds=2, parameter_bytes=10.0, stash_bytes=5.0) for name in "ab"
    ]
    profile, cluster = Profile(nodes=nodes, microbatch_size=1), Cluster.from_levels([(devices, 1e9)])
    stages = [GivenStage("ab", [0])] if devices == 1 else [GivenStage("a", [0]), GivenStage("b", [1])]
    for part, over in ((1.0, False), (BELOW, True)):
        given = evaluate(profile, cluster, stages, num_microbatches=M, memory_limit=needed * part)
        assert max(given.memory_bytes.values()) == needed
        assert any("bytes more than there are" in note for note in given.notes) == over
    for planned in PLANNERS:
        assert max(planned(profile, cluster, M, needed).memory_bytes.values()) == needed
        with pytest.raises(ValueError, match=f"needs {needed:.0f} bytes of {needed - 1:.0f}, 1 too many"):
            planned(profile, cluster, M, needed * BELOW)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_at_every_edge_the_fastest_that_fits_is_found(seed: int) -> None:
    """Against all cuts of four nodes into stages of one device each, at each of their peaks and just below it."""
    rng = Random(seed)
    nodes = [
        Node(
            name=name,
            forward_seconds=rng.choice([1, 2, 3]),
            backward_seconds=rng.choice([2, 4]),
            activation_bytes=rng.choice([0.0, 0.3]),
            parameter_bytes=rng.choice([0.1, 7.3, 10.0]),
            stash_bytes=rng.choice([0.0, 0.7, 5.0]),
            workspace_bytes=rng.choice([0.0, 2.0]),
        )
        for name in "abcd"
    ]
    M, devices = rng.choice([1, 3, 6]), 3
    profile, cluster = Profile(nodes=nodes, microbatch_size=1), Cluster.from_levels([(devices, 1e9)])
    every = []
    for inner in (each for number in range(devices) for each in combinations(range(1, 4), number)):
        stages = [GivenStage("abcd"[a:b], [p]) for p, (a, b) in enumerate(pairwise((0, *inner, 4)))]
        given = evaluate(profile, cluster, stages, num_microbatches=M)
        every.append((max(given.memory_bytes.values()), given.simulated_step_time or 0.0))
    for limit in (part * peak for peak, _ in every for part in (1.0, BELOW)):
        fitting = [seconds for peak, seconds in every if peak <= limit * (1 + 1e-12)]
        for planned in PLANNERS:
            if not fitting:
                with pytest.raises(ValueError, match="nothing fits the memory"):
                    planned(profile, cluster, M, limit, straight=True)
                continue
            found = planned(profile, cluster, M, limit, straight=True)
            assert found.simulated_step_time == pytest.approx(min(fitting), rel=1e-9)
            assert max(found.memory_bytes.values()) <= limit * (1 + 1e-12)


@pytest.mark.thorough(but=["zb-v-2-8-30"])
@pytest.mark.parametrize(
    ("schedule", "chunks", "M", "number"), [("zb-v", 2, 8, 30), ("dualpipe-v", 2, 8, 30), ("interleaved-zb", 5, 4, 40)]
)
def test_a_limit_of_what_the_best_plan_takes_makes_none_slower(schedule: str, chunks: int, M: int, number: int) -> None:
    """Under a V the first of two stages holds nearly all that its rank does, which is more than half of the limit.
    Cuts of many chunks are moved past some that do not fit."""
    profile = unequal(0 if chunks > 2 else 1, number, longest=4.0 if chunks > 2 else 2.5)
    options: dict[str, Any] = {"global_batch": M, "schedules": (schedule,), "chunk_sizes": (chunks,)}
    options |= {"pipeline_sizes": (4,)}
    free = plan(profile, Cluster.parse("4:net=1000GB/s"), **options)
    most = max(free.memory_bytes.values())
    bound = plan(profile, Cluster.parse("4:net=1000GB/s"), memory_limit=most, **options)
    assert max(bound.memory_bytes.values()) <= most
    assert (bound.simulated_step_time or 0.0) <= (free.simulated_step_time or 0.0)


def unequal(seed: int, number: int, *, longest: float) -> Profile:
    rng, sizes = Random(seed), [1.0, 1.5, 2.5, longest]
    nodes = [
        Node(name=f"n{i}", forward_seconds=s, backward_seconds=2 * s, stash_bytes=1.0)
        for i in range(number)
        for s in [rng.choice(sizes[: 3 + (longest > 2.5)])]
    ]
    return Profile(nodes=nodes, microbatch_size=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "seed", "limit"), [("zb-v", 2, None), ("zb-v", 3, 12.0), ("interleaved-zb", 0, None)]
)
def test_no_cut_under_the_named_order_beats_one_with_an_order_for_its_costs(
    schedule: str, seed: int, limit: float | None
) -> None:
    """Against all cuts in its own order; and its order on all cuts with one moved to the next place."""
    profile, cluster, M = unequal(seed, 11, longest=4.0), Cluster.parse("3:net=1000GB/s"), 6
    sizes: dict[str, Any] = {"pipeline_sizes": (3,), "data_sizes": (1,), "chunk_sizes": (2,), "memory_limit": limit}
    found = plan(profile, cluster, global_batch=M, schedules=schedule, **sizes)
    own, S = found.build_schedule(), len(found.stages)
    assert found.order
    assert found.simulated_step_time == pytest.approx(
        evaluate(profile, cluster, found.stages, num_microbatches=M, schedule=own).simulated_step_time
    )
    names, ends = [node.name for node in profile.nodes], [0]
    for stage in found.stages:
        ends.append(ends[-1] + len(stage.nodes))
    assert max(found.memory_bytes.values()) <= (limit or 1e9)

    def seconds(inner: tuple[int, ...], order: Any) -> float:
        cuts = pairwise((0, *inner, len(names)))
        stages = [GivenStage(names[a:b], found.stages[s].ranks) for s, (a, b) in enumerate(cuts)]
        given = evaluate(profile, cluster, stages, num_microbatches=M, schedule=order)
        return 1e9 if max(given.memory_bytes.values()) > (limit or 1e9) else given.simulated_step_time or 0.0

    best = (found.simulated_step_time or 0.0) * (1 - 1e-9)
    assert best < min(seconds(inner, schedule) for inner in combinations(range(1, len(names)), S - 1))
    near = ((*ends[1:s], ends[s] + step, *ends[s + 1 : -1]) for s in range(1, S) for step in (-1, 1))
    assert best < min(seconds(inner, own) for inner in near if sorted({0, *inner, 11}) == [0, *inner, 11])

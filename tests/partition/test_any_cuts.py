"""What a plan says of any cuts, against all of them: whole nodes, unequal replicas, and little memory."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise, product

import pytest
from support.inside import LeastSeconds, MemoryRules, Model, Topology

from stagewright.partition import Cluster, GivenStage, Node, Profile, evaluate, plan

from .small import configuration

SEEDS = 16


def problem(seed: int) -> tuple[Profile, Cluster, int, float]:
    """Few nodes, one of them large, or all alike; without messages' seconds, and with memory for a part of them."""
    rng = random.Random(seed)
    large, weights = rng.choice([1, 1, 4, 9]), rng.choice([1.0, 20.0])
    nodes = [
        Node(
            name=f"n{i}",
            forward_seconds=seconds,
            backward_seconds=rng.choice([1, 2]) * seconds,
            parameter_bytes=weights * rng.choice([1, 1, 2]),
            stash_bytes=rng.choice([0.0, 0.1]),
            update_seconds=rng.choice([0, 0.3]),
        )
        for i in range(rng.randint(2, 4))
        for seconds in [rng.choice([1, 1, large])]
    ]
    every = 4 * sum(node.parameter_bytes for node in nodes)
    limit = max(4 * max(node.parameter_bytes for node in nodes), every * rng.choice([0.3, 0.5, 0.7])) * 1.2
    cluster = Cluster.from_levels([(rng.randint(2, 4), rng.choice([1e2, 1e6]))])
    return Profile(nodes=tuple(nodes), microbatch_size=1, optimizer_ratio=2.0), cluster, rng.randint(1, 8), limit


@pytest.mark.thorough(but=["sharding0"])
@pytest.mark.parametrize("sharding", [("none",), ("none", "full")])
def test_no_bound_is_above_any_cuts_that_fit(sharding: tuple[str, ...]) -> None:
    """Every cut with every number of replicas on ranks in a row, the weights divided over these or not: those that fit
    take as long as is told of all, of any replicas, and of theirs where these are equal."""
    for seed in range(SEEDS):
        profile, cluster, M, limit = problem(seed)
        names, size = [node.name for node in profile.nodes], cluster.num_devices
        model = Model(profile, MemoryRules(optimizer_ratio=2.0, sharding=sharding))
        bounds = LeastSeconds(Topology(cluster, memory_limit=limit))
        least_of_any, best = bounds.of_any("1f1b", model, M), math.inf
        for S in range(1, len(names) + 1):
            every = product(combinations(range(1, len(names)), S - 1), combinations(range(size + 1), S + 1), sharding)
            for inner, places, way in every:
                counts = [b - a for a, b in pairwise(places)]
                if places[0] > 0 or max(counts) > M:
                    continue
                stages = [
                    GivenStage(names[i:j], range(a, b), optimizer_shards=b - a if way == "full" else 1)
                    for (i, j), (a, b) in zip(pairwise((0, *inner, len(names))), pairwise(places), strict=True)
                ]
                given = evaluate(profile, cluster, stages, num_microbatches=M)
                if max(given.memory_bytes.values()) > limit or given.simulated_step_time is None:
                    continue
                seconds = given.simulated_step_time * (1 + 1e-9)
                best = min(best, seconds)
                assert least_of_any <= seconds, (seed, stages)
                if len({*counts}) == 1 and M % counts[0] == 0:
                    c = configuration(pipeline=S, data=counts[0], num_microbatches=M)
                    assert bounds.of(c, model) <= seconds, (seed, stages)
        if best < math.inf:
            options = {"recompute": ("none",), "optimizer_sharding": sharding, "memory_limit": limit}
            found = plan(profile, cluster, global_batch=M, schedules=("1f1b",), **options)  # type: ignore[arg-type]
            assert found.searched is not None
            assert found.searched.least <= best, seed

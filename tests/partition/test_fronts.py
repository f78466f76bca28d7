"""One treatment from each rank's front: against every treatment of every stage in every cut, by the same simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
from support.inside import (
    RECOMPUTE,
    Configuration,
    MemoryRules,
    Model,
    PlanEvaluator,
    Topology,
    _TreatedRank,
    stage_seconds,
)

from stagewright.partition import Cluster, Node, Profile, plan

CHOICES = ("none", "full", "layer", "selective", "layer:1", "layer:2")


def drawn(seed: int) -> tuple[Profile, Configuration, Cluster, float]:
    """A chain of four or five nodes on two or three ranks, or on two of two chunks or replicas; little memory."""
    rng = random.Random(seed)

    def figure(most: int) -> float:
        return rng.randint(0, most) / 4

    nodes = []
    for i in range(rng.choice((4, 4, 5))):
        stash = figure(16)
        nodes.append(
            Node(
                name=f"n{i}",
                forward_seconds=figure(8) + 0.25,
                backward_seconds=figure(16) + 0.25,
                activation_bytes=figure(4),
                parameter_bytes=figure(6),
                stash_bytes=stash,
                update_seconds=figure(4),
                runs_again=rng.random() < 0.8,
                selective_bytes=stash / 2,
                selective_seconds=figure(4),
            )
        )
    pipeline, data, chunks = rng.choice(((2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)))
    c = Configuration(
        pipeline=pipeline,
        data=data,
        tensor=1,
        schedule="1f1b" if chunks == 1 else "interleaved",
        num_chunks=chunks,
        microbatch_size=1,
        num_microbatches=rng.choice((2, 4, 6)) * data,
    )
    whole = sum(4 * node.parameter_bytes + 2 * node.stash_bytes + 6 * node.activation_bytes for node in nodes)
    bandwidth = rng.choice((2.0, 20.0))
    limit = whole * rng.uniform(0.2, 0.8) + 1
    return Profile(nodes=tuple(nodes), microbatch_size=1), c, Cluster.from_levels([(pipeline * data, bandwidth)]), limit


def every_step(
    profile: Profile, c: Configuration, cluster: Cluster, limit: float, sharding: tuple[str, ...]
) -> Iterator[float]:
    rules = MemoryRules(optimizer_ratio=2.0, recompute=RECOMPUTE, sharding=sharding)
    model = Model(profile, rules)
    free, tight = (PlanEvaluator(Topology(cluster, memory_limit=each), lambda *_: model) for each in (None, limit))
    ways = (1, c.data) if sharding == ("none", "full") else (1,)
    for inner in combinations(range(1, len(profile.nodes)), c.num_stages - 1):
        ends = (0, *inner, len(profile.nodes))
        base, flights = free.evaluate(c, ends, exact=True), tight.schedules.in_flight(c, exact=True)
        places, fitting = tight._by_rank(c, ends, flights, {}, lambda _, place: place), []
        for p, place in enumerate(places):
            rank = _TreatedRank(base.sums, flights[p], place, rules)
            options = [[*RECOMPUTE, *(f"layer:{k}" for k in range(1, ends[s + 1] - ends[s]))] for s in place.stages]
            choices = product(product(*options), product({*ways}, repeat=len(options)))
            fitting.append([(names, shards) for names, shards in choices if not rank.memory(names, shards).too_many])
        steps: dict[bytes, float] = {}
        for chosen in product(*fitting):
            treatments = [(chosen[p], s // c.pipeline) for s, p in enumerate(c.positions)]
            seconds = stage_seconds(
                base.sums,
                base.placement,
                c.positions,
                tensor=1,
                recompute=[names[v] for (names, _), v in treatments],
                shards=[shards[v] for (_, shards), v in treatments],
                action=0.0,
            )
            key = np.concatenate([seconds.backward, seconds.ring, seconds.step, seconds.gather]).tobytes()
            if key not in steps:
                steps[key] = free.simulate(replace(base, seconds=seconds)).simulated_seconds
        yield from steps.values()


def gap(seed: int, sharding: tuple[str, ...] = ("none",)) -> float | None:
    """By how much the plan is slower than the best there is, relative; None where nothing fits."""
    profile, c, cluster, limit = drawn(seed)
    least = min(every_step(profile, c, cluster, limit, sharding), default=math.inf)
    options = {"global_batch": c.num_microbatches, "memory_limit": limit, "optimizer_sharding": sharding}
    options |= {"pipeline_sizes": (c.pipeline,), "data_sizes": (c.data,), "schedules": (c.schedule,)}
    try:
        found = plan(profile, cluster, chunk_sizes=(2,), **options)  # type: ignore[arg-type]
    except ValueError as error:
        assert "nothing fits the memory" in str(error)  # noqa: PT017
        assert least == math.inf
        return None
    assert found.simulated_step_time is not None
    return found.simulated_step_time / least - 1


if __name__ == "__main__":
    import sys
    import time

    a, b = map(int, sys.argv[1:3])
    sh = ("none",) if len(sys.argv) < 4 else ("none", "full")
    t = time.process_time()
    gaps = [gap(seed, sh) for seed in range(a, b)]
    print(
        time.process_time() - t,
        sum(g is None for g in gaps),
        "of",
        len(gaps),
        [(a + i, round(g, 5)) for i, g in enumerate(gaps) if g and abs(g) > 1e-8],
    )

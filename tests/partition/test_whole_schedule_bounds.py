"""The linear program over a schedule: no cuts that fit, treated in any way, take less when they are simulated."""

from __future__ import annotations

import math
import random
from itertools import combinations
from typing import Any

import pytest
from support.inside import (
    DoesNotFitError,
    LeastSeconds,
    MemoryRules,
    Model,
    PlanEvaluator,
    SizesError,
    Topology,
    least_of_any_cuts,
)

from stagewright.partition import Cluster, Level, Node, Profile, plan

from .small import chain, configuration

RECOMPUTE = [("none",), ("full",), ("none", "full"), ("none", "full", "layer", "selective")]
SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("eager-1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


def node(rng: random.Random, kind: dict[str, float], name: str) -> Node:
    more: dict[str, float] = {}
    if rng.random() < 0.3:
        more = {"selective_bytes": kind["stash_bytes"] * rng.random(), "selective_seconds": 0.2 * rng.random()}
    if rng.random() < 0.3:
        more |= {"largest_parameter_bytes": kind["parameter_bytes"] * rng.uniform(0.2, 1), "small_parameter_bytes": 0.0}
    return Node(name=name, **kind, **more)


def problem(seed: int) -> tuple[random.Random, PlanEvaluator, Model]:
    """Nodes of few kinds, on links that keep ranks busy or are flat rings, with memory for a part of them."""
    rng = random.Random(seed)
    kinds = [
        {
            "forward_seconds": rng.uniform(0.1, 2),
            "backward_seconds": rng.uniform(0.1, 4),
            "activation_bytes": rng.choice([0, 0.1, 1, 5]) * rng.random(),
            "parameter_bytes": rng.choice([0.1, 1, 10]) * rng.random(),
            "buffer_bytes": rng.choice([0, 1]) * rng.random(),
            "stash_bytes": rng.choice([0.1, 1, 5]) * rng.random(),
            "update_seconds": rng.choice([0, 0.3, 2]) * rng.random(),
        }
        for _ in range(rng.randint(1, 3))
    ]
    nodes = [node(rng, rng.choice(kinds), f"n{i}") for i in range(rng.randint(3, 6))]
    shared = min(nodes[0].parameter_bytes, nodes[-1].parameter_bytes) * rng.random()
    profile = Profile(
        nodes=tuple(nodes),
        microbatch_size=1,
        tied=((("n0", nodes[-1].name), shared),) if rng.random() < 0.3 else (),
        action_seconds=rng.choice([0, 0.05]),
        around_seconds=rng.choice([0, 0.1]),
        sums_early=rng.random() < 0.2,
        sums_whole=rng.random() < 0.3,
        gathers_ahead=rng.random() < 0.2,
    )
    bandwidth, slower = rng.choice([0.5, 3, 10, 100]), rng.choice([1, 4])
    levels = [
        Level(
            name=f"level{at}",
            size=size,
            bandwidth=bandwidth / slower**at,
            latency=rng.choice([0, 0.05]),
            message_seconds=rng.choice([0, 0, 0.02]),
            sum_busy=rng.choice([0, 0, 0.3]),
        )
        for at, size in enumerate(rng.choice([(4,), (6,), (2, 2), (4, 2), (3, 2)]))
    ]
    more: dict[str, Any] = {"rings": "flat"} if rng.random() < 0.25 else {}
    every = 1 + sum(4 * each.parameter_bytes + 3 * each.stash_bytes for each in nodes)
    share = rng.choice([None, None, 0.2, 0.35, 0.6])
    rules = MemoryRules(
        optimizer_ratio=rng.choice([0.0, 2.0, 6.0]),
        recompute=rng.choice(RECOMPUTE),
        sharding=rng.choice([("none",), ("none", "full"), ("full",)]),
    )
    model = Model(profile, rules)
    topology = Topology(Cluster(levels=tuple(levels), **more), memory_limit=None if share is None else share * every)
    return rng, PlanEvaluator(topology, lambda _size, _tensor: model, norm=rng.choice([None, 0.1])), model


def least_simulated(evaluator: PlanEvaluator, c: Any, num_nodes: int) -> float:
    """Of every contiguous cut that fits, under its best treatments [s]."""
    best = math.inf
    for inner in combinations(range(1, num_nodes), c.num_stages - 1):
        try:
            for choice in evaluator.choices(c, (0, *inner, num_nodes), exact=True)[:6]:
                best = min(best, evaluator.simulate(choice).simulated_seconds)
        except (DoesNotFitError, SizesError):
            continue
    return best


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 150), marks=pytest.mark.thorough)], ids=["few", "many"]
)
def test_no_cuts_take_less_than_the_program_of_their_schedule(seeds: range) -> None:
    shares = list[float]()
    for seed in seeds:
        rng, evaluator, model = problem(seed)
        num_nodes, num_devices = len(model.profile.nodes), evaluator.topology.num_devices
        for _ in range(3):
            (schedule, chunks), data = rng.choice(SCHEDULES), rng.choice([1, 2, 3])
            pipeline = rng.randint(1, min(num_devices // data, 4))
            M = rng.randint(1, 6) * (pipeline if schedule == "interleaved" else 1) * data
            sizes = {"pipeline": pipeline, "data": data, "num_chunks": chunks, "num_microbatches": M}
            c = configuration(schedule=schedule, **sizes, by_replica=rng.random() < 0.3 and min(data, pipeline) > 1)
            if c.num_stages > num_nodes:
                continue
            least, best = least_of_any_cuts(evaluator, c), least_simulated(evaluator, c, num_nodes)
            assert least <= best * (1 + 1e-9), (seed, c.label())
            shares += [least / best] * (best < math.inf)
    assert sorted(shares)[len(shares) // 2] > 0.85  # not all of it is left out


def test_of_many_devices_the_least_is_that_of_the_program() -> None:
    """Ten pairs of equal nodes on 72 devices: messages and sums that other bounds of any cuts do not have."""
    profile, cluster = chain(4, activation_bytes=9.0, parameter_bytes=9.0), Cluster.from_levels([(8, 30.0), (9, 10.0)])
    sizes: dict[str, Any] = {"pipeline_sizes": (4,), "data_sizes": (18,), "schedules": ("1f1b",)}
    found = plan(profile, cluster, global_batch=72, microbatch_sizes=(1,), **sizes)
    model = Model(profile, MemoryRules(optimizer_ratio=2.0, sharding=("none", "full")))
    c = configuration(pipeline=4, data=18, num_microbatches=72)
    other = LeastSeconds(Topology(cluster)).of_configuration(c, model)
    assert other * 1.05 < found.searched.least <= found.simulated_step_time * (1 + 1e-9)

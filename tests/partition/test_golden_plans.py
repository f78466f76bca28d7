"""Plans of 60 random problems, as they were stored: a change of shape leaves them alone, and what they explain.

pytest tests/partition/test_golden_plans.py --update-golden      writes tests/data/golden_plans.json anew
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.grids import nightly

from stagewright.partition import Cluster, DeviceKind, Node, Plan, Profile, evaluate, partition, plan

LATER = (31, 43, 44, 45, 47, 57, 59)  # not only of `make nightly`
DATA = Path(__file__).parents[1] / "data"
STORED = DATA / "golden_plans.json"
CLUSTERS = (
    Cluster.from_levels([(2, 1e9)]),
    Cluster.from_levels([(4, 5e9)]),
    Cluster.parse("2x2:nvlink=20GB/s,net=1GB/s@100us"),
    replace(
        Cluster.parse("3x1:nvlink=20GB/s,net=2GB/s"),
        kinds=(DeviceKind(name="old", host_bandwidth=2e9), DeviceKind(name="new", speed=2.0, host_bandwidth=2e9)),
        nodes=("new", "old", "old"),
    ),
    Cluster.from_levels([(4, 2e10), (2, 2e9)]),
)
SCHEDULES = (["1f1b"], ["1f1b", "interleaved"], ["gpipe", "zb-h1"], ["zb-v", "1f1b"], ["2bw"], ["1f1b", "eager-1f1b"])


def problem(number: int) -> tuple[Profile, Cluster, dict[str, Any], dict[str, Any]]:
    draw = random.Random(number)

    def node(at: int) -> Node:
        stash = draw.randint(5, 40) * 1e6
        grads = [draw.randint(5, 30) * 1e-3 for _ in range(2)]
        return Node(
            name=f"n{at}",
            forward_seconds=draw.randint(5, 30) * 1e-3,
            backward_seconds=sum(grads),
            input_grad_seconds=grads[0],
            weight_grad_seconds=grads[1],
            activation_bytes=draw.randint(1, 9) * 1e5,
            parameter_bytes=draw.randint(0, 12) * 1e6,
            stash_bytes=stash,
            workspace_bytes=draw.randint(0, 9) * 1e5,
            update_seconds=draw.randint(0, 9) * 1e-3,
            selective_bytes=stash / 2,
            selective_seconds=draw.randint(1, 4) * 1e-3,
            keep_less_bytes=stash * 0.75,
            keep_less_seconds=1e-3,
        )

    nodes = [node(at) for at in range(draw.randint(3, 9))]
    names = [each.name for each in nodes]
    skips = [pair for pair in zip(names, names[2:], strict=False) if draw.random() < 0.3]
    profile = Profile(nodes=nodes, edges=[*pairwise(names), *skips], microbatch_size=1, action_seconds=1e-4)
    cluster, batch = draw.choice(CLUSTERS), draw.choice([1, 4, 6, 8, 12])
    whole = sum(4 * each.parameter_bytes + each.stash_bytes for each in nodes)
    limit = None if draw.random() < 0.4 else round(whole * draw.choice([0.3, 0.45, 0.6, 0.8, 1.2]))
    schedule = draw.choice(["1f1b", "1f1b", "2bw", "paci", "pipedream", "interleaved"])
    cut = {"memory_limit": limit, "schedule": schedule, "num_microbatches": None if draw.random() < 0.3 else batch}
    if schedule == "interleaved":
        cut |= {"num_microbatches": batch, "num_chunks": 2}
    more = draw.choice([{}, {}, {"optimizer_sharding": ["none"]}, {"max_grad_norm": 1.0}, {"recompute": ["none"]}])
    options = {"global_batch": batch, "memory_limit": limit, "schedules": draw.choice(SCHEDULES), **more}
    return profile, cluster, options, cut


def stored(found: Plan) -> dict[str, object]:
    stages = [
        f"{' '.join(each.nodes)} on {' '.join(map(str, each.ranks))}, {each.recompute}, {each.optimizer_shards} shards"
        for each in found.stages
    ]
    sizes = [found.schedule, found.num_chunks, found.num_microbatches, found.bottleneck, found.bound]
    return {"stages": stages, "sizes": sizes, "seconds": found.simulated_step_time}


def answer(make: Callable[[], Plan]) -> tuple[Plan | None, dict[str, object]]:
    try:
        found = make()
    except ValueError as error:
        return None, {"refused": str(error)}
    return found, stored(found)


def answers(number: int) -> dict[str, dict[str, object]]:
    profile, cluster, options, cut = problem(number)
    best, found = answer(lambda: plan(profile, cluster, **options))
    every = {"plan": found, "partition": answer(lambda: partition(profile, cluster, **cut))[1]}
    if best is not None:
        given = {"num_microbatches": best.num_microbatches, "schedule": best.schedule}
        same = evaluate(profile, cluster, best.stages, memory_limit=options["memory_limit"], **given)
        every["evaluate"] = stored(same)
        if number in LATER:
            every["explain"] = {"lines": best.explain().splitlines()}
    return every


def close(found: object, known: object) -> bool:
    if isinstance(found, dict) and isinstance(known, dict):
        return found.keys() == known.keys() and all(close(found[key], known[key]) for key in found)
    if isinstance(found, Sequence) and isinstance(known, list) and not isinstance(found, str):
        return len(found) == len(known) and all(map(close, found, known))
    return found == (pytest.approx(known, rel=1e-12, abs=0) if isinstance(known, float) else known)


@pytest.mark.thorough(but=["1", "14", "43", "47"])
@pytest.mark.filterwarnings("ignore:.*devices stay idle:UserWarning")
@pytest.mark.parametrize("number", [each if each < 30 or each in LATER else nightly(each) for each in range(60)])
def test_plans_are_those_that_were_stored(number: int, update_golden: bool) -> None:
    every, found = json.loads(STORED.read_text()) if STORED.exists() else {}, answers(number)
    if update_golden:
        every[str(number)] = found
        STORED.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    known = every[str(number)]
    assert close(found, known), json.dumps([found, known], indent=1)


def test_files_of_an_older_planner_are_read_and_explained_as_ever() -> None:
    """Six of plan() and three of partition(): unequal replicas, chunks, recompute, sharding, limits of memory."""
    for name, known in json.loads((DATA / "old_plans.json").read_text(encoding="utf-8")).items():
        old = Plan.from_json(json.dumps(known["json"]))
        assert old.explain().splitlines() == known["explain"], name
        assert Plan.from_json(old.to_json()) == old

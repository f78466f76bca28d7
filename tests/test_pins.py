"""Numbers and texts that a change of shape may not touch, as they were before it.

pytest tests/test_pins.py --update-golden      writes data/pins anew; a difference is a change of behaviour: say which
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stagewright.partition import Cluster, Node, Plan, Profile, evaluate, partition, plan

PINS = Path(__file__).parent / "data" / "pins"


def profile(draw: random.Random, size: int) -> Profile:
    nodes = [
        Node(
            name=f"layer{i}",
            forward_seconds=draw.randint(5, 30) * 1e-4,
            backward_seconds=draw.randint(10, 60) * 1e-4,
            input_grad_seconds=draw.randint(5, 30) * 1e-4,
            weight_grad_seconds=draw.randint(5, 30) * 1e-4,
            activation_bytes=draw.randint(1, 9) * 1e6,
            parameter_bytes=draw.randint(1, 40) * 1e7,
            stash_bytes=draw.randint(2, 30) * 1e7,
            workspace_bytes=draw.randint(1, 9) * 1e6,
            update_seconds=draw.randint(1, 9) * 1e-4,
        )
        for i in range(size)
    ]
    names = [node.name for node in nodes]
    skips = [(names[i], names[i + 3]) for i in range(0, size - 3, 4)]
    edges = (*pairwise(names), *skips)
    return Profile(nodes=tuple(nodes), edges=edges, microbatch_size=1)


CLUSTERS = {
    "two": Cluster.from_levels([(2, 1e9)]),
    "four": Cluster.from_levels([(4, 5e9)]),
    "two nodes": Cluster.from_levels([(2, 2e10), (2, 1e9)]),
    "eight": Cluster.from_levels([(4, 3e10), (2, 2e9)]),
}


def plans() -> Iterator[tuple[str, Plan]]:
    """Nine of plan() and partition(), with unequal replicas, chunks, recompute, sharding, limits of memory."""
    for number, name, options in [
        (0, "two", {"schedules": ["1f1b"]}),
        (1, "four", {}),
        (2, "four", {"schedules": ["interleaved"]}),
        (3, "two nodes", {"memory_limit": 4e9}),
        (4, "eight", {"schedules": ["1f1b", "zb-v"], "max_grad_norm": 1.0}),
        (6, "eight", {"memory_limit": 2.5e9, "recompute": ["full"]}),
    ]:
        found = plan(
            profile(random.Random(number), 10), CLUSTERS[name], global_batch=16, microbatch_sizes=[1], **options
        )
        yield f"plan {number} {name}", found
    made = profile(random.Random(7), 9)
    yield "partition two nodes", partition(made, CLUSTERS["two nodes"], num_microbatches=8, schedule="1f1b")
    yield "partition eight", partition(made, CLUSTERS["eight"], num_microbatches=12, schedule="1f1b")
    yield "partition pipedream", partition(made, CLUSTERS["eight"], cost_model="pipedream")


def held(name: str, found: dict[str, Any], update: bool) -> dict[str, Any]:
    """The content of the file; with `update` it is written."""
    path = PINS / f"{name}.json"
    if update:
        PINS.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    expected: dict[str, Any] = json.loads(path.read_text())
    return expected


def counted_anew(name: str, old: Plan) -> Plan:
    """A plan whose backwards are split, with I and W as they are counted since: as profiled, not as halves of B."""
    _, number, cluster = name.split(" ", 2)
    its = replace(profile(random.Random(int(number)), 10), max_grad_norm=1.0)
    assert old.schedule is not None
    assert old.num_microbatches is not None
    sizes = {"schedule": old.schedule, "num_microbatches": old.num_microbatches}
    return evaluate(its, CLUSTERS[cluster], old.stages, **sizes)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_plans_what_they_explain_and_their_files(update_golden: bool) -> None:
    """The files are of an older planner: only what is explained, of them and of the plans of today, is ever written
    anew."""
    made, expected = dict(plans()), held("plans", {}, False)
    read = {name: Plan.from_json(json.dumps(expected[name]["json"])) for name in made}
    found = {
        name: {
            "json": expected[name]["json"],
            "read": read[name].explain().splitlines(),
            "explain": one.explain().splitlines(),
        }
        for name, one in made.items()
    }
    assert found == held("plans", found, update_golden)
    for name, one in made.items():
        old = counted_anew(name, read[name]) if read[name].schedule == "zb-v" else read[name]
        assert (one.simulated_step_time or 0.0) <= (old.simulated_step_time or 0.0) * (1 + 1e-9)
        for each in (one, read[name]):
            assert Plan.from_json(each.to_json()) == each

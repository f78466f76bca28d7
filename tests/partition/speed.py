"""How long the partitioner takes: `python tests/partition/speed.py`, one line a case (rows for `make bench`).

Times are of `partition` (cuts included, reading and imports not), the best of five (of one where it takes seconds).
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stagewright.partition import Cluster, Node, Plan, Profile, partition, read_pipedream_profile

DATA = Path(__file__).parents[1] / "data" / "pipedream"


class Row(NamedTuple):
    """One case: seconds taken, seconds allowed, and the plan."""

    name: str
    seconds: float
    target: float
    plan: Plan


def timed(name: str, target: float, plan: Callable[[], Plan], *, repetitions: int = 5) -> Row:
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        result = plan()
        taken.append(time.perf_counter() - start)
    return Row(name, min(taken), target, result)


def published() -> Iterator[Row]:
    """Each published profile on 16 devices, flat, and resnet50 on 4x4, by both models.

    The target is 1/20 of what PipeDream's optimizer took, or 20 ms.
    """
    runs = json.loads((DATA / "runs.json").read_text(encoding="utf-8"))["runs"]
    for model, levels, compressed, straight, _, _, wall in runs:
        two_level = model == "resnet50" and len(levels) == 2
        flat = len(levels) == 1 and levels[0] == [16, 1.25e9]
        if straight or not compressed or not (flat or two_level):
            continue
        profile = read_pipedream_profile(DATA / f"{model}.txt")
        cluster = Cluster.from_levels([tuple(level) for level in levels])
        target = 1.0 if two_level else max(0.02, wall / 20)
        shape = "4x4" if two_level else "16"
        for cost_model in ("pipedream", "default"):
            yield timed(
                f"{model} on {shape}, {cost_model}",
                target,
                lambda profile=profile, cluster=cluster, cost_model=cost_model: partition(
                    profile, cluster, cost_model=cost_model, activation_compression_ratio=1.0
                ),
            )


def large_chain(*, num_microbatches: int | None) -> Row:
    """1,000 layers on 128 nodes of 8."""
    random = np.random.default_rng(0)
    nodes = tuple(
        Node(
            name=f"layer{i}",
            forward_seconds=seconds,
            backward_seconds=2 * seconds,
            activation_bytes=activation,
            parameter_bytes=weights,
            stash_bytes=4 * activation,
        )
        for i, (seconds, activation, weights) in enumerate(
            zip(
                random.uniform(1e-3, 3e-3, 1000),
                random.uniform(1e6, 3e7, 1000),
                random.uniform(1e6, 1e8, 1000),
                strict=True,
            )
        )
    )
    cluster = Cluster.parse("128x8:nvlink=300GB/s,net=12GB/s:80GB")
    name = f"1,000 layers on 128x8, M={num_microbatches}"
    profile = Profile(nodes=nodes, origin="formula")
    return timed(name, 10.0, lambda: partition(profile, cluster, num_microbatches=num_microbatches), repetitions=1)


def main() -> None:
    rows = [*published(), large_chain(num_microbatches=512), large_chain(num_microbatches=None)]
    for row in rows:
        met = "" if row.seconds <= row.target else "  MISSED"
        print(
            f"{row.name:34} {row.seconds * 1e3:9.1f} ms of {row.target * 1e3:8.1f}  {len(row.plan.stages):3} stages, "
            f"gap {row.plan.gap:.2%}{met}"
        )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()

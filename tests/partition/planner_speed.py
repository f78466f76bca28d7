"""How long the planner takes: `python tests/partition/planner_speed.py` (a row for `make bench`)."""

from __future__ import annotations

import resource
import time
from typing import NamedTuple

from stagewright.partition import Cluster, Plan, plan
from stagewright.partition.device_model import DeviceModel
from stagewright.partition.transformer import Transformer, TransformerSource


class Row(NamedTuple):
    """One case: seconds taken, seconds allowed, and the plan."""

    name: str
    seconds: float
    target: float
    plan: Plan


def plan_large() -> Row:
    """A transformer of 100 layers, 80 billion parameters, on 128 nodes of 8 A100s."""
    cluster = Cluster.parse("128x8:nvlink=300GB/s@5us,infiniband=25GB/s@10us:80GB")
    shape = Transformer(layers=100, hidden=8192, heads=64, vocabulary=51200, length=2048)
    source = TransformerSource(transformer=shape, device=DeviceModel.preset("A100-80GB"), cluster=cluster)
    start = time.perf_counter()
    found = plan(source, cluster, global_batch=1536)
    return Row("100 layers on 128x8", time.perf_counter() - start, 60.0, found)


def main() -> None:
    row = plan_large()
    print(row.plan.explain())
    print(f"{row.name}: {row.seconds:.1f} s of {row.target:.0f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()

"""How much of the space a search looks at, and what it says of the rest: counts, no seconds."""

from __future__ import annotations

import math
from typing import Any

from support.inside import DeviceModel, Transformer, TransformerSource

from stagewright.partition import Cluster, Plan, plan


def transformer(cluster: Cluster, *, layers: int, hidden: int, batch: int, **options: Any) -> Plan:
    shape = Transformer(layers=layers, hidden=hidden, heads=hidden // 128, vocabulary=51200, length=2048)
    source = TransformerSource(transformer=shape, device=DeviceModel.preset("A100-80GB"), cluster=cluster)
    return plan(source, cluster, global_batch=batch, **options)


def test_bounds_leave_most_configurations_uncut() -> None:
    """With few microbatches most of them lose by their way through the stages alone, and so do unequal replicas."""
    cluster = Cluster.parse("2x8:nvlink=300GB/s@5us,infiniband=25GB/s@10us:80GB")
    found = transformer(cluster, layers=32, hidden=4096, batch=7)
    assert found.searched is not None
    assert found.searched.considered == 306 + 64  # stages with tensor sizes of their own
    # 19 where an exchange of divided updates counted as half a sum: the first plans are slower, and more look better.
    # 21 where bounds knew that nodes are whole.
    # And 14 of unequal tensor sizes, of which only the first microbatch's way and the members' work are known.
    assert found.searched.cut <= 24 + 14
    assert (
        found.searched.simulated <= 11
    )  # 9 with a head of its own: bounds of cuts know the sum of tied weights, those before not


def test_what_is_left_out_is_no_faster_than_promised_over_tensor_ranks_and_with_little_memory() -> None:
    """Every configuration simulated, each way to cut it: of a search that stops at once all are above its promise."""
    cluster = Cluster.parse("2x2:nvlink=30GB/s@5us,infiniband=2GB/s@10us:80GB")
    options: dict[str, Any] = {"layers": 4, "hidden": 1024, "batch": 4, "memory_limit": 2.2e9}
    every = transformer(cluster, **options, num_runners_up=10_000, max_simulated=10_000)
    seconds = [every.simulated_step_time, *(each.simulated_step_time for each in every.runners_up)]
    assert every.searched is not None
    assert every.searched.unfit > 0
    assert every.searched.simulated >= len(seconds) > 10
    assert any(" tensor 2" in each.label for each in every.runners_up)
    for cut_short in ({"max_simulated": 1, "num_runners_up": 0}, {"seconds": 0.0}):
        found = transformer(cluster, **options, **cut_short)
        assert found.searched is not None
        assert found.simulated_step_time is not None
        promised = min(found.simulated_step_time, found.searched.least_left or math.inf)
        assert all(promised <= each * (1 + 1e-8) for each in seconds if each is not None)
        assert found.searched.least <= promised

"""How much of the space a search looks at, and what it says of the rest: counts, no seconds."""

from __future__ import annotations

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
    # And stages with tensor sizes of their own; replicas of tensor groups that do not divide 7; each replica in a row.
    assert found.searched.considered == 306 + 64 + 15 + 13
    # 19 where an exchange of divided updates counted as half a sum: the first plans are slower, and more look better.
    # 21 where bounds knew that nodes are whole.
    # And 14 of unequal tensor sizes, of which only the first microbatch's way and the members' work are known.
    # And 2 of replicas that do not divide 7, or that are in a row.
    assert found.searched.cut <= 24 + 14 + 2
    assert (
        found.searched.simulated <= 11
    )  # 9 with a head of its own: bounds of cuts know the sum of tied weights, those before not

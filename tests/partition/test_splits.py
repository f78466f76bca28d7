"""Plans that choose over how many ranks sequences and experts are divided."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from support.inside import DeviceModel, Transformer, TransformerSource, layout_of_plan

from stagewright.comm import World
from stagewright.partition import Cluster, GivenStage, Plan, evaluate, plan

A100 = DeviceModel.preset("A100-80GB")
PLAIN: dict[str, Any] = {"schedules": ("1f1b",), "recompute": ("none",), "optimizer_sharding": ("none",)}


def moe(seed: int) -> tuple[TransformerSource, int]:
    """Two layers with experts on two nodes of two devices each, and a batch."""
    draw = random.Random(seed).choice
    model = Transformer(
        experts=draw([2, 4]),
        layers=2,
        hidden=draw([512, 1024]),
        heads=4,
        vocabulary=draw([1000, 50000]),
        length=draw([512, 4096]),
        top_k=draw([1, 2]),
        style="llama",
        attention="flash",
    )
    nvlink, latency, ib = draw([300, 3]), draw([0, 50]), draw([25, 1])
    cluster = Cluster.parse(f"2x2:nvlink={nvlink}GB/s@{latency}us,ib={ib}GB/s@5us:80GB")
    splits = tuple(product((1, 2, 4), (1, 2)))
    return TransformerSource(transformer=model, device=A100, cluster=cluster, splits=splits), draw([4, 8])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [3, 4, 5, 15, 16])
def test_none_of_all_splits_is_faster(seed: int) -> None:
    """Every context, expert, P, D, T, microbatch and cut, by brute force. The fastest one of each seed has another
    split: experts, experts over more replicas, both with stages, the same with other sizes, both with tensor ranks."""
    source, batch = moe(seed)
    assert source.cluster is not None
    names = [node.name for node in source.profile(microbatch_size=1).nodes]
    least = float("inf")
    for (_, own), P, D, T, size in product(source.alternatives(), *3 * [(1, 2, 4)], (1, 2, 4)):
        c = own.context
        if P * D * T > 4 or T % c or T // c > 2 or D * c % own.expert or batch // size % D:
            continue
        for cut in combinations(range(1, len(names)), P - 1):
            ends = enumerate(pairwise((0, *cut, len(names))))
            stages = [GivenStage(names[a:b], range(i * D * T, (i + 1) * D * T), T) for i, (a, b) in ends]
            found = evaluate(own, source.cluster, stages, num_microbatches=batch // size, microbatch_size=size)
            least = min(least, found.simulated_step_time or 0.0)
    best = plan(source, source.cluster, global_batch=batch, **PLAIN)
    assert best.context * best.expert > 1
    assert best.simulated_step_time is not None
    assert best.simulated_step_time <= least * (1 + 1e-9)
    assert best.searched is not None
    assert best.searched.least <= least * (1 + 1e-9)
    assert Plan.from_json(best.to_json()) == best
    assert f"experts over {best.expert}" in best.explain()
    assert "note: with whole sequences and experts: " in best.explain()


def test_no_split_that_is_given_fits() -> None:
    source, batch = moe(15)
    assert source.cluster is not None
    with pytest.raises(ValueError, match=r"nothing fits the memory: nearest is .*experts over 2, 1f1b"):
        plan(source, source.cluster, global_batch=batch, memory_limit=1e6, **PLAIN)
    with pytest.raises(ValueError, match="expert: 0: expected a whole number of at least 1"):
        TransformerSource(transformer=source.transformer, device=A100, splits=((1, 0),))


def test_the_runtime_divides_experts_as_planned_and_sequences_not() -> None:
    source, batch = moe(15)
    assert source.cluster is not None
    best = plan(source, source.cluster, global_batch=batch, runnable=True, **PLAIN)
    mesh = layout_of_plan(best, World(rank=0, size=4), num_microbatches=None).place.mesh
    assert (best.context, best.expert) == (1, 2) == (mesh.context, mesh.expert)
    with pytest.raises(ValueError, match="a plan with context=2: expected 1, or a schedule by name with"):
        layout_of_plan(replace(best, context=2), World(rank=0, size=4), num_microbatches=None)
    with pytest.raises(
        ValueError, match=r"a plan with expert=4, \(2, 2\) replicas, tensor=1 and .* expected tensor=1 and"
    ):
        layout_of_plan(replace(best, expert=4), World(rank=0, size=4), num_microbatches=None)
    with pytest.raises(ValueError, match="the plan divides experts over 2 ranks, which are processes: expected 4"):
        layout_of_plan(best, World(rank=0, size=1), num_microbatches=None)


@pytest.mark.parametrize(("context", "expert"), [(1, 2), (2, 1), (2, 2), (1, 1)])
def test_exchanges_are_what_links_that_take_no_time_save(context: int, expert: int) -> None:
    model = Transformer(
        experts=4, top_k=2, layers=4, hidden=512, heads=4, vocabulary=1000, length=512, attention="flash"
    )
    clusters = [Cluster.parse(f"8:nvlink={speed}GB/s:80GB") for speed in (1, 1000000000)]
    slow, fast = (
        TransformerSource(transformer=model, device=A100, cluster=each, context=context, expert=expert)
        for each in clusters
    )
    exchanges = {}
    for way in ("forward", "backward"):
        one, other = (
            [getattr(node, f"{way}_seconds") for node in each.profile(microbatch_size=1, tensor=context).nodes]
            for each in (slow, fast)
        )
        saved = [a - b for a, b in zip(one, other, strict=True)]
        nodes = slow.profile(microbatch_size=1, tensor=context).nodes
        assert [getattr(node, f"{way}_exchange_seconds") for node in nodes] == pytest.approx(saved, rel=1e-6, abs=1e-9)
        exchanges[way] = saved
    stages = [
        GivenStage(("embedding", "layer0", "layer1"), range(2 * context), context),
        GivenStage(("layer2", "layer3", "head"), range(2 * context, 4 * context), context),
    ]
    found = evaluate(slow, clusters[0], stages, num_microbatches=4, microbatch_size=1)
    for way, by_node in exchanges.items():
        expected = [sum(by_node[:3]), sum(by_node[3:])]
        given = getattr(found.costs, f"{way}_exchange")
        assert (given if any(expected) else [given] * 2) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert Plan.from_json(found.to_json()).costs == found.costs

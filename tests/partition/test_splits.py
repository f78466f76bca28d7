"""Plans that choose over how many ranks sequences and experts are divided."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from support.inside import DeviceModel, Transformer, TransformerSource, layout_of_plan

from stagewright.comm import World
from stagewright.partition import Cluster, GivenStage, Plan, PlanStage, evaluate, plan
from stagewright.schedules import Costs, build, simulate, with_overlap

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
@pytest.mark.parametrize("seed", [3, 4, 5, 15, 39])
def test_none_of_all_splits_is_faster(seed: int) -> None:
    """Every context, expert, P, D, T, microbatch and cut, by brute force. The fastest one of each seed has another
    split: experts, experts over more replicas, both with stages, the same with other sizes, both with tensor ranks."""
    source, batch = moe(seed)
    names = [node.name for node in source.profile(microbatch_size=1).nodes]
    least = float("inf")
    for (_, own), P, D, T, size in product(source.alternatives(), *3 * [(1, 2, 4)], (1, 2, 4)):
        c = own.context
        if P * D * T > 4 or T % c or T // c > 2 or D % own.expert or batch // size % D:
            continue
        for cut in combinations(range(1, len(names)), P - 1):
            ends = enumerate(pairwise((0, *cut, len(names))))
            stages = [GivenStage(names[a:b], range(i * D * T, (i + 1) * D * T), T) for i, (a, b) in ends]
            found = evaluate(own, source.cluster, stages, num_microbatches=batch // size, microbatch_size=size)
            least = min(least, found.simulated_step_time or 0.0)
    best = plan(source, source.cluster, global_batch=batch, **PLAIN)
    assert best.context * best.expert > 1
    assert best.simulated_step_time <= least * (1 + 1e-9)
    assert best.searched.least <= least * (1 + 1e-9)
    assert Plan.from_json(best.to_json()) == best
    assert f"experts over {best.expert}" in best.explain()
    assert "note: with whole sequences and experts: " in best.explain()


def test_no_split_that_is_given_fits() -> None:
    """Four parts with two experts each, the last split, need 8 devices."""
    source, batch = moe(15)
    with pytest.raises(ValueError, match=r"nothing fits the memory: nearest is pipe 1 x context 4, 1f1b"):
        plan(source, source.cluster, global_batch=batch, memory_limit=1e6, **PLAIN)
    many = replace(source, splits=((4, 2),))
    with pytest.raises(ValueError, match="tensor x context x expert: 8: expected at most the 4 devices of the cluster"):
        plan(many, source.cluster, global_batch=batch, **PLAIN)
    with pytest.raises(ValueError, match="expert: 0: expected a whole number of at least 1"):
        TransformerSource(transformer=source.transformer, device=A100, splits=((1, 0),))


@pytest.mark.parametrize(
    ("split", "wrong", "text"),
    [
        ((2, 1), {"context": 4}, "a plan with context=4, .* replicas, tensor=2 and .*: expected tensor=4 with experts"),
        ((1, 2), {"expert": 8}, "a plan with expert=8, .* replicas, tensor=1 and .* is a multiple of 8"),
        ((2, 2), {"context": 1}, "a plan with expert=2, .2,. replicas, tensor=2 and .*: expected tensor=1 with"),
    ],
)
def test_the_runtime_divides_as_planned(split: tuple[int, int], wrong: dict[str, int], text: str) -> None:
    """Sequences too, which it refused: the mesh, and each rank's first process."""
    source, batch = moe(15)
    best = plan(replace(source, splits=(split,)), source.cluster, global_batch=batch, runnable=True, **PLAIN)
    layout = layout_of_plan(best, World(rank=0, size=4), num_microbatches=None)
    mesh, members = layout.place.mesh, best.context
    assert (best.context, best.expert) == (mesh.context, mesh.expert) == split
    assert layout.schedule.num_microbatches == members * (best.num_microbatches or 0)
    assert ", tensor " not in best.explain()  # as rows of stages had for parts of sequences
    for stage, owners in zip(best.stages, layout.schedule.owners, strict=True):
        assert [process for rank in owners for process in mesh.members(rank)] == [*stage.ranks]
    with pytest.raises(ValueError, match=text):
        layout_of_plan(replace(best, **wrong), World(rank=0, size=4), num_microbatches=None)
    what = "sequences .* context=1" if split[0] > 1 else "experts .* expert=1"
    with pytest.raises(ValueError, match="divides " + what.replace(".*", "over 2 ranks, which are .* expected 4 .*")):
        layout_of_plan(best, World(rank=0, size=1), num_microbatches=None)


@pytest.mark.parametrize("sizes", [{"context": 2}, {"expert": 2}])
def test_a_plan_pipeline_by_pipeline_has_figures_of_its_own_processes(sizes: dict[str, int]) -> None:
    """A trace gave a rank the memory limit of another stage's."""
    width = sizes.get("context", 1)
    rows = [[r for d in (0, 2) for r in range((p + d) * width, (p + d + 1) * width)] for p in (0, 1)]
    stages = [
        PlanStage(nodes=(str(p),), ranks=tuple(row), tensor=width, step_seconds=1, memory_limit=p + 1.0)
        for p, row in enumerate(rows)
    ]
    found = Plan(
        stages=tuple(stages),
        num_devices=4 * width,
        costs=Costs(forward=1, backward=2),
        cost_model="default",
        bottleneck=1,
        bound=1,
        schedule="1f1b",
        num_microbatches=4,
        **sizes,
    )
    layout = layout_of_plan(found, World(rank=0, size=4 * width), num_microbatches=None)
    mesh = layout.place.mesh
    assert mesh.order[0] == "data"
    limits = found.by_group(found.memory_limits, [mesh.members(rank)[0] for rank in range(mesh.num_ranks)])
    for stage, owners in enumerate(layout.schedule.owners):
        assert {limits[rank] for rank in owners} == {stage + 1.0}


def test_pairs_are_chosen_where_they_take_less_and_can_run() -> None:
    """Against the schedule with pairs, simulated apart from the search; the runtime has pairs of experts on the CPU."""
    model = Transformer(experts=4, top_k=2, layers=4, hidden=512, heads=4, vocabulary=1000, length=1024)
    cluster = Cluster.parse("4:nvlink=10GB/s:80GB")
    profile = TransformerSource(transformer=model, device=A100, cluster=cluster, expert=2).profile(
        microbatch_size=1, tensor=1
    )
    find = partial(
        plan, cluster=cluster, global_batch=16, pipeline_sizes=(2,), **{**PLAIN, "schedules": ("dualpipe-v",)}
    )
    found = find(profile)
    assert found.overlaps
    schedule = with_overlap(build("dualpipe-v", num_ranks=2, num_microbatches=8))
    own = simulate(schedule, found.costs, found.links).batch_seconds
    assert found.simulated_step_time == own
    assert own < simulate(replace(schedule, overlapped=()), found.costs, found.links).batch_seconds
    assert found.build_schedule().overlapped
    text = "less than the best of actions one after the other, pipe 2 x data 2 x experts over 2, dualpipe-v V=2, micro"
    assert any(text in note for note in found.notes)
    assert Plan.from_json(found.to_json()) == found
    # What can't run, or gains nothing
    assert not find(profile, runnable=True).overlaps
    assert find(replace(profile, device="cpu"), runnable=True).overlaps
    assert not find(profile, recompute=("full",)).overlaps
    needed = max(found.memory_bytes.values()) + 300e6  # of CUDA's context
    assert find(profile, memory_limit=needed).overlaps
    assert not find(profile, memory_limit=needed - 1).overlaps
    free = [replace(n, forward_exchange_seconds=0.0, backward_exchange_seconds=0.0) for n in profile.nodes]
    assert not find(replace(profile, nodes=free)).overlaps


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

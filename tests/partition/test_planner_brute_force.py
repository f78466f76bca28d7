"""The planner against everything that can be done by hand, simulated: it is never worse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.partition import Cluster, Level, Node, Plan, Profile, partition, plan
from stagewright.partition.planner.bounds import LeastSeconds
from stagewright.partition.planner.model import Model
from stagewright.partition.planner.space import Configuration
from stagewright.partition.topology import Topology
from stagewright.schedules import Costs, Links, Sum, Way, build, simulate
from stagewright.schedules.builders.replicas import replicate

from .small import hops_around, ring

RECOMPUTE = ("none", "full", "layer", "selective")
TENTHS = st.integers(0, 30).map(lambda n: n / 10)
CLUSTERS = st.sampled_from(
    [
        Cluster.from_levels([(1, 1.0)]),
        Cluster.from_levels([(3, 5.0)]),
        Cluster.from_levels([(2, 40.0), (2, 5.0)]),
        Cluster(
            levels=(Level(name="in", size=2, bandwidth=30.0, latency=0.1), Level(name="out", size=2, bandwidth=9.0))
        ),
        Cluster(
            levels=(
                Level(name="in", size=3, bandwidth=9.0),
                Level(name="out", size=2, bandwidth=9.0, partial_reduce=0.2),
            )
        ),
        Cluster(
            levels=(
                Level(name="in", size=2, bandwidth=30.0, latency=0.1),
                Level(name="out", size=2, bandwidth=9.0, latency=0.2, reduce_latency=0.4),
            ),
            rings="flat",
        ),
    ]
)


@st.composite
def chains(draw: st.DrawFn) -> Profile:
    nodes = [
        Node(
            name=f"n{i}",
            forward_seconds=draw(TENTHS) + 0.1,
            backward_seconds=draw(TENTHS),
            activation_bytes=draw(TENTHS),
            parameter_bytes=draw(TENTHS),
            stash_bytes=draw(TENTHS),
            update_seconds=draw(TENTHS) / 3,
            runs_again=draw(st.integers(0, 3)) > 0,
            selective_bytes=draw(TENTHS),
            selective_seconds=draw(TENTHS) / 3,
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    return Profile(nodes=tuple(nodes), microbatch_size=1)


def hop(cluster: Cluster, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """The largest latency and seconds a byte of these pairs of ranks, level by level."""
    worst = (0.0, 0.0)
    for a, b in pairs:
        size, latency, slowest = 1, 0.0, math.inf
        for level in cluster.levels:
            size *= level.size
            latency, slowest = max(latency, level.latency), min(slowest, level.bandwidth)
            if a // size == b // size:
                break
        worst = max(worst[0], latency), max(worst[1], 1 / slowest)
    return worst


def sum_latency(cluster: Cluster, members: Sequence[int]) -> float:
    """Seconds of a sum of nothing, level by level; or each step as long as the slowest hop around a flat ring."""
    if cluster.rings == "flat":
        steps = [
            max(e.latency if e.reduce_latency is None else e.reduce_latency for e in cluster.levels[: joined + 1])
            for joined in (cluster.level_between(a, b) for a, b in hops_around(members))
        ]
        return 2 * (len(members) - 1) * max(steps, default=0.0)
    groups, seconds, latency = list(members), 0.0, 0.0
    for level in cluster.levels:
        latency = max(latency, level.latency)
        sizes = Counter(member // level.size for member in groups).values()
        seconds += 2 * (max(sizes) - 1) * latency
        groups = sorted({member // level.size for member in groups})
    return seconds


def sum_seconds(cluster: Cluster, members: Sequence[int], num_bytes: float) -> float:
    """Seconds of a sum; of a few bytes around a flat ring all steps wait, or those in front of its two halves."""
    if not num_bytes or len(members) == 1:
        return 0.0
    latency, a_byte, steps = sum_latency(cluster, members), ring(cluster, members), 2 * (len(members) - 1)
    if cluster.rings == "levels":
        return latency + num_bytes * a_byte
    return max(latency + num_bytes * a_byte * len(members) / steps, 2 * latency / steps + num_bytes * a_byte)


def exchange_seconds(cluster: Cluster, members: Sequence[int], num_bytes: float) -> float:
    """Seconds for which the busiest member sends every other one its part, message by message."""
    if not num_bytes or len(members) == 1:
        return 0.0
    in_node = Counter(member // cluster.levels[0].size for member in members)
    is_partial = 1 < min(in_node.values()) < cluster.levels[0].size
    worst, latency = 0.0, 0.0
    for a in members:
        seconds = 0.0
        for b in (other for other in members if other != a):
            joined = cluster.level_between(a, b)
            way = cluster.levels[: joined + 1]
            each = num_bytes / len(members) / min(level.reduce_bandwidth or level.bandwidth for level in way)
            if joined:
                each *= in_node[a // cluster.levels[0].size] if cluster.rings == "flat" else 1
                each /= way[-1].partial_reduce if is_partial else 1.0
            seconds += each
            steps = (level.latency if level.reduce_latency is None else level.reduce_latency for level in way)
            latency = max(latency, *steps)
        worst = max(worst, seconds)
    return latency + worst


def network(
    pairs: list[list[tuple[int, int]]],
    hops: list[tuple[float, float]],
    crossing: Sequence[float],
    groups: list[list[int]],
    rings: list[float],
    *,
    gathers: list[float],
) -> Links:
    """A card a rank; by hop the pairs of ranks, latency and seconds a byte, bytes; by stage its ranks, its sum, and the
    gathering of updated weights."""
    ways = {}
    for each, (latency, seconds) in zip(pairs, hops, strict=True):
        for a, b in (pair for pair in each if pair[0] != pair[1]):
            for src, dst in ((a, b), (b, a)):
                ways[src, dst] = Way(latency=latency, seconds_per_byte=seconds, sending=src, receiving=dst)
    sums = []
    for s, (members, seconds, gather) in enumerate(zip(groups, rings, gathers, strict=True)):
        if seconds == 0:
            continue  # no weights, no sum that would queue
        around = tuple(zip(members, [*members[1:], members[0]], strict=True)) if len(members) > 1 else ()
        for src, dst in around:
            ways.setdefault((src, dst), Way(sending=src, receiving=dst))
        sums.append(Sum(stage=s, seconds=seconds, gather=gather, ways=around))
    return Links(network=ways, activation_bytes=tuple(crossing), sums=tuple(sums))


def step(
    profile: Profile,
    cluster: Cluster,
    ends: tuple[int, ...],
    *,
    schedule: str,
    pipeline: int,
    data: int,
    num_microbatches: int,
    shards: int,
    recompute: Sequence[str] | None = None,
    tensor: int = 1,
) -> float:
    """Seconds of a chain cut at `ends`, on ranks (p D + d) T + t: all replicas simulated, of T ranks the first [s]."""
    nodes, num_stages = profile.nodes, len(ends) - 1
    own = [nodes[a:b] for a, b in pairwise(ends)]
    crossing = [0.0, *(nodes[at - 1].activation_bytes for at in ends[1:-1]), 0.0]
    chunks = num_stages // pipeline
    single = build(
        schedule,
        num_ranks=pipeline,
        num_microbatches=num_microbatches // data,
        num_chunks=chunks if chunks > 1 else None,
    )
    firsts = [single.owner(s, 0) * data for s in range(num_stages)]
    pairs = [[(here + d, there + d) for d in range(data)] for here, there in pairwise(firsts)]
    every = [[(a * tensor + t, b * tensor + t) for a, b in each for t in range(tensor)] for each in pairs]
    hops = [hop(cluster, each) for each in every]
    rings, gathers = [], []
    for s, first in enumerate(firsts):
        weights = sum(node.parameter_bytes for node in own[s])
        members = range(first * tensor, (first + data) * tensor, tensor)
        parts = exchange_seconds(cluster, members, weights) if shards > 1 else 0.0
        rings.append(parts or sum_seconds(cluster, members, weights))
        gathers.append(parts)
    forward = [sum(node.forward_seconds for node in stage) for stage in own]
    costs = Costs(
        forward=forward,
        backward=[
            sum(node.backward_seconds for node in stage) + seconds_again(stage, choice)
            for stage, choice in zip(own, recompute or ["none"] * num_stages, strict=True)
        ],
        update=[sum(node.update_seconds for node in stage) / shards for stage in own],
    )
    groups = [[first + d for d in range(data)] for first in firsts]
    return simulate(
        replicate(single, data),
        costs,
        network(pairs, hops, [each / tensor for each in crossing[1:-1]], groups, rings, gathers=gathers),
    ).makespan


def by_hand(
    profile: Profile, cluster: Cluster, batch: int, chunks: int, schedule: str = "interleaved", *, tensor: int = 1
) -> Iterator[dict[str, Any]]:
    """Up to V chunks a rank under `schedule`, and 1F1B."""
    room = cluster.num_devices // tensor
    for pipeline in range(1, room + 1):
        for data in range(1, room // pipeline + 1):
            for V in range(1, chunks + 1):
                S = pipeline * V
                is_useless = V > 1 and pipeline == 1 and (data == 1 or schedule != "interleaved")
                if batch % data or len(profile.nodes) < S or is_useless:
                    continue
                for inner in combinations(range(1, len(profile.nodes)), S - 1):
                    yield {
                        "ends": (0, *inner, len(profile.nodes)),
                        "schedule": schedule if V > 1 else "1f1b",
                        "pipeline": pipeline,
                        "data": data,
                        "num_microbatches": batch,
                    }


@settings(max_examples=60, deadline=None)
@given(
    profile=chains(),
    cluster=CLUSTERS,
    batch=st.integers(1, 8),
    sharding=st.sampled_from([("none",), ("full",), ("none", "full")]),
)
def test_never_worse_than_any_configuration(
    profile: Profile, cluster: Cluster, batch: int, sharding: tuple[str, ...]
) -> None:
    """With a choice: than any that divides no optimizer. A search cut short says how much the rest may gain at most."""
    options: dict[str, Any] = {"global_batch": batch, "optimizer_sharding": sharding, "chunk_sizes": (2, 3)}
    found = plan(profile, cluster, **options)
    short = plan(profile, cluster, max_simulated=1, num_runners_up=0, **options)
    hurried = plan(profile, cluster, seconds=0.0, **options)
    assert found.simulated_step_time is not None
    assert found.searched is not None
    assert found.searched.faster_left(found.simulated_step_time) == 0
    for each in by_hand(profile, cluster, batch, 3):
        shards = each["data"] if sharding == ("full",) else 1
        least = step(profile, cluster, shards=shards, **each)
        assert found.simulated_step_time <= least * (1 + 1e-8), each
        assert found.searched.least <= bound(profile, cluster, each) <= least * (1 + 1e-8), each
        assert max(promised(short), promised(hurried)) <= least * (1 + 1e-8), each


def promised(found: Plan) -> float:
    """No configuration takes less, so the plan says."""
    assert found.simulated_step_time is not None
    assert found.searched is not None
    left = found.searched.least_left
    return min(found.simulated_step_time, math.inf if left is None else left)


@settings(max_examples=25, deadline=None)
@given(
    profile=chains(),
    cluster=CLUSTERS,
    batch=st.integers(1, 8),
    schedule=st.sampled_from(["hanayo", "zb-v", "v-half", "v-min", "dualpipe-v", "interleaved-zb"]),
)
def test_never_worse_where_stages_go_back_and_forth_or_backwards_are_split(
    profile: Profile, cluster: Cluster, batch: int, schedule: str
) -> None:
    """No bound hides what they gain over 1F1B."""
    found = plan(profile, cluster, global_batch=batch, schedules=("1f1b", schedule), chunk_sizes=(2,))
    assert found.searched is not None
    assert found.simulated_step_time == pytest.approx(simulate_plan(profile, cluster, found), rel=1e-9)
    for each in by_hand(profile, cluster, batch, 2, schedule):
        try:
            least = step(profile, cluster, shards=1, **each)
        except ValueError:  # too few microbatches
            continue
        assert found.simulated_step_time <= least * (1 + 1e-8), each
        assert found.searched.least <= bound(profile, cluster, each) <= least * (1 + 1e-8), each


def bound(profile: Profile, cluster: Cluster, each: dict[str, Any]) -> float:
    """Bound that the search knows of a configuration before it is cut."""
    configuration = Configuration(
        tensor=1,
        microbatch_size=1,
        num_chunks=(len(each["ends"]) - 1) // each["pipeline"],
        **{name: value for name, value in each.items() if name != "ends"},
    )
    return LeastSeconds(Topology(cluster)).of(configuration, Model(profile, optimizer_ratio=2.0))


def seconds_again(stage: Sequence[Node], recompute: str) -> float:
    if recompute == "full":
        return sum(node.forward_seconds for node in stage)
    again = [node for node in stage if node.runs_again]
    if recompute == "layer":
        return sum(node.forward_seconds for node in again)
    return sum(node.selective_seconds or 0.0 for node in again) if recompute == "selective" else 0.0


def kept_and_made(profile: Profile, a: int, b: int, recompute: str) -> tuple[float, float]:
    """Bytes of nodes a..b-1 of a chain that each microbatch keeps from F to B, and that its B makes again at once."""
    own = range(a, b)
    stash = {i: profile.nodes[i].stash_bytes for i in own}
    inputs = {i: profile.nodes[i - 1].activation_bytes if i else 0.0 for i in own}
    again = {i for i in own if profile.nodes[i].runs_again}
    if recompute == "none":
        return sum(stash.values()), 0.0
    if recompute == "full":
        return inputs[a], sum(stash.values())
    kept = dict(stash)
    for i in again:
        kept[i] = inputs[i] if recompute == "layer" else profile.nodes[i].selective_bytes or 0.0
    made = [stash[i] - (kept[i] if recompute == "selective" else 0.0) for i in again]
    return sum(kept.values()), max([0.0, *made])


def held(profile: Profile, each: dict[str, Any], p: int, recompute: str, tensor: int = 1) -> float:
    """Bytes on rank p of a 1F1B pipeline with Adam, as a person would count them."""
    P, (a, b) = each["pipeline"], each["ends"][p : p + 2]
    m = each["num_microbatches"] // each["data"]
    before = profile.nodes[a - 1].activation_bytes if a else 0.0
    behind = profile.nodes[b - 1].activation_bytes if b < len(profile.nodes) else 0.0
    flight = min(m, P - p)
    kept, made = kept_and_made(profile, a, b, recompute)
    weights = sum(node.parameter_bytes for node in profile.nodes[a:b])
    copy = weights if each["data"] > 1 else 0.0  # of the gradients, while they are summed over the replicas
    messages = before * (min(4, m) + min(2, m)) + behind * (min(4, m) + flight)
    return 4 * weights + copy + flight * kept + made + before + behind + messages / tensor


def fitting_recompute(
    profile: Profile, each: dict[str, Any], limit: float, tensor: int = 1
) -> Iterator[tuple[str, ...]]:
    """Alike on all stages, and of each stage what takes it the least time."""
    own = [profile.nodes[a:b] for a, b in pairwise(each["ends"])]
    fits = [[way for way in RECOMPUTE if held(profile, each, p, way, tensor) <= limit] for p in range(len(own))]
    for way in RECOMPUTE:
        if all(way in ways for ways in fits):
            yield (way,) * len(own)
    if all(fits):
        yield tuple(min(ways, key=lambda way: seconds_again(stage, way)) for ways, stage in zip(fits, own, strict=True))


@settings(max_examples=50, deadline=None)
@given(profile=chains(), cluster=CLUSTERS, batch=st.integers(1, 8), share=st.floats(0.1, 1.0))
def test_never_worse_within_the_memory(profile: Profile, cluster: Cluster, batch: int, share: float) -> None:
    limit = share * sum(4 * node.parameter_bytes + 2 * node.stash_bytes for node in profile.nodes) + 0.5
    fitting = [
        (each, recompute)
        for each in by_hand(profile, cluster, batch, 1)
        for recompute in fitting_recompute(profile, each, limit)
    ]
    try:
        found = plan(profile, cluster, global_batch=batch, memory_limit=limit, optimizer_sharding=("none",))
    except ValueError as error:
        assert "nothing fits the memory" in str(error)  # noqa: PT017
        assert not fitting
        return
    assert found.simulated_step_time is not None
    for each, recompute in fitting:
        least = step(profile, cluster, shards=1, recompute=recompute, **each)
        assert found.simulated_step_time <= least * (1 + 1e-8), (each, recompute)


@dataclass(frozen=True)
class Halves:
    """A profile, and what one of two tensor ranks has of it: half the work and weights, a third more of the rest."""

    whole: Profile

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        assert microbatch_size == 1
        return self.whole if tensor == 1 else replace(self.whole, nodes=tuple(map(self._half, self.whole.nodes)))

    def _half(self, node: Node) -> Node:
        return replace(
            node,
            forward_seconds=node.forward_seconds / 2 + 0.1,
            backward_seconds=node.backward_seconds / 2 + 0.2,
            parameter_bytes=node.parameter_bytes / 2,
            stash_bytes=node.stash_bytes * 0.75,
            update_seconds=node.update_seconds / 2,
        )

    def tensor_sizes(self, limit: int) -> Sequence[int]:
        return [1, 2][:limit]


@settings(max_examples=12, deadline=None)
@given(
    profile=chains(),
    cluster=st.sampled_from([Cluster.from_levels([(2, 40.0), (2, 5.0)]), Cluster.from_levels([(4, 9.0)])]),
    batch=st.integers(1, 6),
    share=st.floats(0.1, 0.8),
)
def test_what_is_left_out_takes_as_long_as_is_promised_with_tensor_ranks_and_little_memory(
    profile: Profile, cluster: Cluster, batch: int, share: float
) -> None:
    """Each way to cut, place and recompute that fits, simulated here: no promise of a search is above any of them."""
    source = Halves(profile)
    limit = share * sum(4 * node.parameter_bytes + 2 * node.stash_bytes for node in profile.nodes) + 0.5
    every = [
        step(shown, cluster, shards=1, recompute=recompute, tensor=tensor, **each)
        for tensor in (1, 2)
        for shown in [source.profile(microbatch_size=1, tensor=tensor)]
        for each in by_hand(shown, cluster, batch, 1, tensor=tensor)
        for recompute in fitting_recompute(shown, each, limit, tensor)
    ]
    options: dict[str, Any] = {"global_batch": batch, "memory_limit": limit, "optimizer_sharding": ("none",)}
    options["microbatch_sizes"] = (1,)
    for cut_short in ({}, {"max_simulated": 1, "num_runners_up": 0}, {"seconds": 0.0}):
        try:
            found = plan(source, cluster, **options, **cut_short)
        except ValueError as error:
            assert "nothing fits the memory" in str(error)  # noqa: PT017
            assert not every
            return
        assert found.searched is not None
        least = min(every, default=math.inf) * (1 + 1e-8)
        assert found.searched.least <= promised(found) <= least
        if not cut_short:
            assert found.simulated_step_time is not None
            assert found.simulated_step_time <= least
            assert found.searched.faster_left(found.simulated_step_time) == 0


@settings(max_examples=40, deadline=None)
@given(profile=chains(), cluster=CLUSTERS, batch=st.integers(1, 8), share=st.floats(0.3, 1.0), runnable=st.booleans())
def test_the_plan_is_its_own_simulation(
    profile: Profile, cluster: Cluster, batch: int, share: float, runnable: bool
) -> None:
    """Its own schedule, on all ranks, with its own seconds, takes what it says; memory within the limit."""
    whole = sum(4 * node.parameter_bytes + node.stash_bytes + 20 * node.activation_bytes for node in profile.nodes)
    try:
        found = plan(
            profile, cluster, global_batch=batch, memory_limit=whole * share + 1e-3, chunk_sizes=(2,), runnable=runnable
        )
    except ValueError as error:
        assert "nothing fits the memory" in str(error)  # noqa: PT017
        return
    assert max(found.memory_bytes.values()) <= (whole * share + 1e-3) * (1 + 1e-9)
    resimulated = simulate_plan(profile, cluster, found)
    assert found.simulated_step_time == pytest.approx(resimulated, rel=1e-9)
    assert Plan.from_json(found.to_json()) == found


def simulate_plan(profile: Profile, cluster: Cluster, found: Plan) -> float:
    """`Plan.build_schedule`, all ranks of it, with the seconds of the plan's stages and messages worked out here."""
    schedule = found.build_schedule()
    stages = found.stages
    output = {node.name: node.activation_bytes for node in profile.nodes}
    pairs = [
        [(schedule.owner(s, k), schedule.owner(s + 1, k)) for k in range(schedule.num_microbatches)]
        for s in range(len(stages) - 1)
    ]
    hops = [hop(cluster, each) for each in pairs]
    weights = {node.name: node.parameter_bytes for node in profile.nodes}
    held = [sum(weights[name] for name in stage.nodes) for stage in stages]
    gathers = [
        exchange_seconds(cluster, stage.ranks, w) if stage.optimizer_shards > 1 else 0.0
        for stage, w in zip(stages, held, strict=True)
    ]
    rings = [
        parts or sum_seconds(cluster, stage.ranks, w) for stage, w, parts in zip(stages, held, gathers, strict=True)
    ]
    costs = Costs(
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        update=[
            max(0.0, stage.update_seconds - seconds - parts)
            for stage, seconds, parts in zip(stages, rings, gathers, strict=True)
        ],
    )
    crossing = [output[stage.nodes[-1]] for stage in stages[:-1]]
    groups = [list(stage.ranks) for stage in stages]
    return simulate(schedule, costs, network(pairs, hops, crossing, groups, rings, gathers=gathers)).makespan


@settings(max_examples=30, deadline=None)
@given(profile=chains(), batch=st.integers(2, 8), chunks=st.integers(2, 3))
def test_chunks_of_the_partitioner(profile: Profile, batch: int, chunks: int) -> None:
    """V stages a rank on a straight pipeline of 2: the best of all cuts."""
    cluster = Cluster.from_levels([(2, 20.0)])
    if len(profile.nodes) < 2 * chunks:
        return
    found = partition(
        profile, cluster, schedule="interleaved", num_chunks=chunks, num_microbatches=batch, straight=True
    )
    assert found.num_chunks == chunks
    assert len(found.stages) == 2 * chunks
    every = [
        step(
            profile,
            cluster,
            (0, *inner, len(profile.nodes)),
            schedule="interleaved",
            pipeline=2,
            data=1,
            num_microbatches=batch,
            shards=1,
        )
        for inner in combinations(range(1, len(profile.nodes)), 2 * chunks - 1)
    ]
    assert found.simulated_step_time == pytest.approx(min(every), rel=1e-9)

"""A planner by hand: every configuration, its seconds by a simulation of all ranks, its bytes as a person would count.

Schedules and their simulator are those of the package; nothing of its planner and solver is used.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from operator import mul
from typing import Any

from support.inside import replicate

from stagewright.partition import Cluster, Node, Plan, Profile
from stagewright.schedules import AllReduce, Costs, Link, Links, Op, build, simulate

from .small import hops_around, ring

COUNTED = ("layer", "selective", "keep_less")
RECOMPUTE = ("none", "full", *COUNTED)


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


def level_between(cluster: Cluster, first: int, last: int) -> int:
    """The level over which two devices are joined; 0 for a device and itself."""
    sizes = accumulate((level.size for level in cluster.levels), mul)
    return next(number for number, size in enumerate(sizes) if first // size == last // size)


def sum_latency(cluster: Cluster, members: Sequence[int]) -> float:
    """Seconds of a sum of nothing, level by level; or each step as long as the slowest hop around a flat ring."""
    if cluster.rings == "flat":
        steps = [
            max(e.latency if e.reduce_latency is None else e.reduce_latency for e in cluster.levels[: joined + 1])
            for joined in (level_between(cluster, a, b) for a, b in hops_around(members))
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
    """Seconds of the half of a sum that goes up or down the levels; over a flat ring those for which the busiest member
    sends every other one its part, message by message."""
    if cluster.rings == "levels":
        return sum_seconds(cluster, members, num_bytes) / 2
    if not num_bytes or len(members) == 1:
        return 0.0
    in_node = Counter(member // cluster.levels[0].size for member in members)
    worst, latency = 0.0, 0.0
    for a in members:
        seconds = 0.0
        for b in (other for other in members if other != a):
            joined = level_between(cluster, a, b)
            way = cluster.levels[: joined + 1]
            each = num_bytes / len(members) / min(level.reduce_bandwidth or level.bandwidth for level in way)
            if joined:
                each *= in_node[a // cluster.levels[0].size]
            seconds += each
            steps = (level.latency if level.reduce_latency is None else level.reduce_latency for level in way)
            latency = max(latency, *steps)
        worst = max(worst, seconds)
    return latency + worst


def apart(
    profile: Profile, own: Sequence[Sequence[Node]], places: Sequence[object]
) -> tuple[list[float], list[float], dict[tuple[int, ...], float]]:
    """By stage, bytes whose gradients its replicas alone sum, and the optimizer's step; bytes that stages share.

    Of stages on one place the first has what they share.
    """
    summed = [sum(node.parameter_bytes for node in stage) for stage in own]
    update = [sum(node.update_seconds for node in stage) for stage in own]
    ties = {}
    for names, shared in profile.tied:
        where = [(s, node) for s, stage in enumerate(own) for node in stage if node.name in names]
        holders: dict[object, int] = {}
        for s, node in where:
            if places[s] in holders:
                summed[s] -= shared
                update[s] -= node.update_seconds * min(1.0, shared / node.parameter_bytes) if shared else 0.0
            holders.setdefault(places[s], s)
        if len(holders) > 1:
            for s in holders.values():
                summed[s] -= shared
            ties[tuple(sorted({s for s, _ in where}))] = shared
    return [round(each, 9) for each in summed], update, ties


def sums_of(
    profile: Profile, cluster: Cluster, places: Sequence[Sequence[int]], held: Sequence[float], shards: Sequence[int]
) -> tuple[list[float], list[float]]:
    """By stage, seconds of the sum of its gradients over its ranks, and of the gather of weights updated in parts."""
    rings, gathers = [], []
    for members, weights, number in zip(places, held, shards, strict=True):
        own, updated = (weights * ratio for ratio in (profile.gradient_ratio, profile.gather_ratio))
        parts = exchange_seconds(cluster, members, own) if number > 1 else 0.0
        rings.append(parts or sum_seconds(cluster, members, own))
        gathers.append(exchange_seconds(cluster, members, updated) if number > 1 else 0.0)
    return rings, gathers


def tied_sums(
    profile: Profile, cluster: Cluster, places: Sequence[Sequence[int]], ties: dict[tuple[int, ...], float]
) -> list[tuple[tuple[int, ...], float]]:
    """Seconds of the sums of what stages share, over the ranks of all of them."""
    every = {stages: sorted({rank for s in stages for rank in places[s]}) for stages in ties}
    return [(s, sum_seconds(cluster, every[s], size * profile.gradient_ratio)) for s, size in ties.items()]


def network(
    pairs: list[list[tuple[int, int]]],
    hops: list[tuple[float, float]],
    crossing: Sequence[float],
    groups: list[list[int]],
    rings: list[float],
    *,
    gathers: list[float],
    is_ahead: bool,
) -> Links:
    """A card a rank; by hop the pairs of ranks, latency and seconds a byte, bytes; by stage its ranks, its sum, and the
    gathering of updated weights, before the batch or after the update."""
    ways = {}
    for each, (latency, seconds) in zip(pairs, hops, strict=True):
        for a, b in (pair for pair in each if pair[0] != pair[1]):
            for src, dst in ((a, b), (b, a)):
                ways[src, dst] = Link(latency=latency, seconds_per_byte=seconds, sending=src, receiving=dst)
    sums = []
    for s, (members, seconds, gather) in enumerate(zip(groups, rings, gathers, strict=True)):
        if seconds == 0:
            continue  # no weights, no sum that would queue
        around = tuple(zip(members, [*members[1:], members[0]], strict=True)) if len(members) > 1 else ()
        for src, dst in around:
            ways.setdefault((src, dst), Link(sending=src, receiving=dst))
        sums.append(AllReduce(stage=s, seconds=seconds, gather=gather, ways=around, unshards=is_ahead))
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
    summed, update, ties = apart(profile, own, firsts)
    places = [range(first * tensor, (first + data) * tensor, tensor) for first in firsts]
    rings, gathers = sums_of(profile, cluster, places, summed, [shards] * num_stages)
    forward = [sum(node.forward_seconds for node in stage) for stage in own]
    again = [seconds_again(*each) for each in zip(own, recompute or ["none"] * num_stages, strict=True)]
    backward = [sum(node.backward_seconds for node in stage) for stage in own]
    costs = Costs(
        forward=forward,
        backward=[whole + more for whole, more in zip(backward, again, strict=True)],
        input_grad=[whole / 2 + more for whole, more in zip(backward, again, strict=True)],
        weight_grad=[whole / 2 for whole in backward],
        update=[each / shards for each in update],
        tied=tied_sums(profile, cluster, places, ties),
    )
    groups = [[first + d for d in range(data)] for first in firsts]
    return simulate(
        replicate(single, data),
        costs,
        network(
            pairs,
            hops,
            [each / tensor for each in crossing[1:-1]],
            groups,
            rings,
            gathers=gathers,
            is_ahead=profile.gathers_ahead,
        ),
    ).makespan


def configurations(
    profile: Profile, cluster: Cluster, batch: int, chunks: int, schedule: str = "interleaved", *, tensor: int = 1
) -> Iterator[dict[str, Any]]:
    """Arguments of `step`: up to V chunks a rank under `schedule`, and 1F1B."""
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


def seconds_again(stage: Sequence[Node], recompute: str) -> float:
    if recompute == "full":
        return sum(node.forward_seconds for node in stage)
    again = [node for node in stage if node.runs_again]
    kind, _, number = recompute.partition(":")
    many = int(number or 99) if kind != "none" else 0
    return sum(
        node.forward_seconds if kind == "layer" else getattr(node, f"{kind}_seconds") or 0.0 for node in again[:many]
    )


def kept_and_made(profile: Profile, a: int, b: int, recompute: str) -> tuple[float, float]:
    """Bytes of nodes a..b-1 of a chain that each microbatch keeps from F to B, and that its B makes again at once."""
    own = range(a, b)
    stash = {i: profile.nodes[i].stash_bytes for i in own}
    inputs = {i: profile.nodes[i - 1].activation_bytes if i else 0.0 for i in own}
    again = {i for i in own if profile.nodes[i].runs_again}
    recompute, _, number = recompute.partition(":")
    again = {*sorted(again)[: int(number or 99)]}
    if recompute == "none":
        return sum(stash.values()), 0.0
    if recompute == "full":
        return inputs[a], sum(stash.values())
    kept = dict(stash)
    for i in again:
        known = inputs[i] if recompute == "layer" else getattr(profile.nodes[i], f"{recompute}_bytes")
        kept[i] = stash[i] if known is None else known
    made = [stash[i] - (0.0 if recompute == "layer" else kept[i]) for i in again]
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
    for names, shared in profile.tied:
        weights -= shared * max(0, sum(node.name in names for node in profile.nodes[a:b]) - 1)
    copy = weights if each["data"] > 1 else 0.0  # of the gradients, while they are summed over the replicas
    messages = before * (min(4, m) + min(2, m)) + behind * (min(4, m) + flight)
    return 4 * weights + copy + flight * kept + made + before + behind + messages / tensor


def fitting_recompute(
    profile: Profile, each: dict[str, Any], limit: float, tensor: int = 1
) -> Iterator[tuple[str, ...]]:
    """Alike on all stages, and of each stage what takes it the least time."""
    own = [profile.nodes[a:b] for a, b in pairwise(each["ends"])]
    counts = product(COUNTED, range(1, max(map(len, own))))
    ways = (*RECOMPUTE, *(f"{kind}:{number}" for kind, number in counts))
    fits = [[way for way in ways if held(profile, each, p, way, tensor) <= limit] for p in range(len(own))]
    for way in RECOMPUTE:
        if all(way in ways for ways in fits):
            yield (way,) * len(own)
    if all(fits):
        yield tuple(min(ways, key=lambda way: seconds_again(stage, way)) for ways, stage in zip(fits, own, strict=True))


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
    nodes = {node.name: node for node in profile.nodes}
    held, _, ties = apart(
        profile, [[nodes[name] for name in stage.nodes] for stage in stages], [stage.ranks for stage in stages]
    )
    places = [stage.ranks for stage in stages]
    rings, gathers = sums_of(profile, cluster, places, held, [stage.optimizer_shards for stage in stages])
    costs = Costs(
        forward=found.seconds(Op.F),
        backward=found.seconds(Op.B),
        input_grad=found.seconds(Op.I),
        weight_grad=found.seconds(Op.W),
        update=[
            max(0.0, update - seconds - parts)
            for update, seconds, parts in zip(found.update_seconds, rings, gathers, strict=True)
        ],
        tied=tied_sums(profile, cluster, places, ties),
    )
    crossing = [output[stage.nodes[-1]] for stage in stages[:-1]]
    groups = [list(stage.ranks) for stage in stages]
    return simulate(
        schedule, costs, network(pairs, hops, crossing, groups, rings, gathers=gathers, is_ahead=profile.gathers_ahead)
    ).makespan

"""Small random profiles, and a partitioner that tries everything: nothing is shared with the code under test."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from support.inside import Configuration

from stagewright.partition import Cluster, Node, Profile

TENTHS = st.integers(0, 30).map(lambda n: n / 10)


@st.composite
def profiles(draw: st.DrawFn, *, chain: bool = False, max_nodes: int = 9) -> Profile:
    """Connected graphs; times, sizes and what is kept are small numbers, so that ties are frequent."""
    size = draw(st.integers(1, max_nodes))
    nodes = [
        Node(
            name=f"n{i}",
            forward_seconds=draw(TENTHS),
            backward_seconds=draw(TENTHS),
            activation_bytes=draw(TENTHS),
            parameter_bytes=draw(TENTHS),
            buffer_bytes=draw(TENTHS),
            stash_bytes=draw(TENTHS),
            workspace_bytes=draw(TENTHS),
        )
        for i in range(size)
    ]
    names = [node.name for node in nodes]
    edges = list(pairwise(names))
    if not chain:
        edges = [(names[draw(st.integers(max(0, i - 3), i - 1))], names[i]) for i in range(1, size)]
        for i in range(2, size):
            if draw(st.booleans()):
                edges.append((names[draw(st.integers(0, i - 1))], names[i]))
    return Profile(nodes=tuple(nodes), edges=tuple(edges))


CLUSTERS = st.sampled_from(
    [
        Cluster.from_levels([(1, 1.0)]),
        Cluster.from_levels([(3, 0.7)]),
        Cluster.from_levels([(5, 2.0)]),
        Cluster.from_levels([(2, 4.0), (2, 0.5)]),
        Cluster.from_levels([(1, 9.0), (4, 1.0)]),
        Cluster.from_levels([(2, 0.5), (2, 4.0)]),  # slower inside than outside
        Cluster.from_levels([(2, 8.0), (1, 2.0), (2, 1.0)]),
        replace(Cluster.from_levels([(2, 4.0), (2, 0.5)]), rings="flat"),
    ]
)


def chain(names: int | str, **figures: float) -> Profile:
    values: dict[str, Any] = {"forward_seconds": 1.0, "backward_seconds": 2.0, **figures}
    every = [f"n{i}" for i in range(names)] if isinstance(names, int) else names
    return Profile(nodes=tuple(Node(name=name, **values) for name in every), microbatch_size=1)


def configuration(**sizes: Any) -> Configuration:
    """Four microbatches of 1F1B on a pipeline of two, unless they are said to be others."""
    usual: dict[str, Any] = {"pipeline": 2, "data": 1, "tensor": 1, "schedule": "1f1b"}
    return Configuration(**usual | {"num_chunks": 1, "microbatch_size": 1, "num_microbatches": 4} | sizes)


@dataclass(frozen=True)
class OverTensors:
    """A profile, and what one of several tensor ranks has of it: more than its part of the seconds."""

    whole: Profile
    more: float
    sizes: tuple[int, ...] = (1, 2, 4)

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        assert microbatch_size == 1
        factor = (self.more if tensor > 1 else 1.0) / tensor
        nodes = (
            replace(
                node,
                forward_seconds=node.forward_seconds * factor,
                backward_seconds=node.backward_seconds * factor,
                parameter_bytes=node.parameter_bytes / tensor,
                stash_bytes=node.stash_bytes / tensor,
                update_seconds=node.update_seconds / tensor,
            )
            for node in self.whole.nodes
        )
        tied = tuple((names, shared / tensor) for names, shared in self.whole.tied)
        return replace(self.whole, nodes=tuple(nodes), tied=tied, tensor=tensor)

    def tensor_sizes(self, limit: int) -> list[int]:
        return [size for size in self.sizes if size <= limit]


def down_sets(profile: Profile) -> list[frozenset[str]]:
    """All sets of nodes that hold what their nodes need."""
    names = [node.name for node in profile.nodes]
    found = []
    for bits in range(2 ** len(names)):
        chosen = frozenset(name for i, name in enumerate(names) if bits >> i & 1)
        if all(src in chosen for src, dst in profile.edges or () if dst in chosen):
            found.append(chosen)
    return found


def crossing(profile: Profile, before: frozenset[str]) -> float:
    """Bytes of the tensors made in `before` that something behind it takes."""
    leaving = {src for src, dst in profile.edges or () if src in before and dst not in before}
    return sum(node.activation_bytes for node in profile.nodes if node.name in leaving)


def ring(cluster: Cluster, members: Sequence[int], links: tuple[float, ...] | None = None) -> float:
    """Seconds a byte of a sum, in rings through all members, of the slowest level's hops; or around a flat ring."""
    slowest_card = 1.0 if links is None else min(links[member] for member in members)
    if cluster.rings == "flat":
        worst = 0.0
        for a, b in hops_around(members):
            size, slowest = 1, math.inf
            for number, level in enumerate(cluster.levels):
                size, slowest = size * level.size, min(slowest, level.bandwidth)
                if a // size == b // size:
                    worst = max(worst, 1 / slowest / (slowest_card if number else 1.0))
                    break
        return 2 * (len(members) - 1) / len(members) * worst
    groups, pace_of_all, part, slowest, shares_cards = list(members), math.inf, 1.0, math.inf, False
    for number, level in enumerate(cluster.levels):
        slowest = min(slowest, level.bandwidth)
        sizes = Counter(member // level.size for member in groups).values()
        if number == 0:
            shares_cards = 1 < min(sizes) < level.size
        pace = (
            slowest * (slowest_card if number > 0 else 1.0) * (level.partial_reduce if number and shares_cards else 1.0)
        )
        if max(sizes) > 1:
            pace_of_all = min(pace_of_all, pace / part)
        part /= min(sizes)
        groups = sorted({member // level.size for member in groups})
    return 2 * (1 - 1 / len(members)) / pace_of_all


def hops_around(members: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours in a ring of these ranks; none of one alone."""
    return list(zip(members, [*members[1:], members[0]], strict=True)) if len(members) > 1 else []


def stage_seconds(
    profile: Profile,
    cluster: Cluster,
    cut: tuple[frozenset[str], frozenset[str]],
    devices: range,
    *,
    schedule: str = "1f1b",
    num_microbatches: int | None = None,
    limit: float = math.inf,
    speeds: tuple[float, ...] | None = None,
    links: tuple[float, ...] | None = None,
    around: tuple[range, range] | None = None,
) -> float:
    """The formulas of `solve.dynamic`, device by device; devices count from the end of the pipeline. With devices of
    the stages after and before, `around`, messages are as slow as the slowest that share a microbatch."""
    own = [node for node in profile.nodes if node.name in cut[1] - cut[0]]
    r, e, M = len(devices), devices.stop, num_microbatches
    share = 1 / r if M is None else math.ceil(M / r) / M
    weights = sum(node.parameter_bytes for node in own)

    def bandwidth(first: int, last: int) -> float:
        size, slowest = 1, math.inf
        for number, level in enumerate(cluster.levels):
            size *= level.size
            slowest = min(slowest, level.bandwidth)
            if first // size == last // size:
                return slowest * (min(links[first : last + 1]) if links is not None and number > 0 else 1.0)
        raise AssertionError

    def slowest(first: range, last: range) -> float:
        pairs = [(first[::-1][k % len(first)], last[::-1][k % len(last)]) for k in range(len(first) * len(last))]
        return min(bandwidth(a, b) for a, b in (sorted(pair) for pair in pairs))

    compute = sum(node.forward_seconds + node.backward_seconds for node in own) * share
    if speeds is not None:
        compute /= min(speeds[device] for device in devices)
    talk = weights * ring(cluster, devices, links) / (r if M is None else M)
    if cut[0]:
        if e >= cluster.num_devices:
            return math.inf
        pace = slowest(devices, around[1]) if around else bandwidth(devices[0], e)
        talk += crossing(profile, cut[0]) / pace / r
    if len(cut[1]) < len(profile.nodes):
        pace = slowest(around[0], devices) if around else bandwidth(devices[0] - 1, devices[-1])
        sent = crossing(profile, cut[1]) / pace
        talk = max(talk + sent / r, 0 if around else sent / devices[0])  # the consumer has no more than are left
    depth = math.ceil(e / r)
    if schedule == "1f1b" and M is not None:
        depth = min(depth, math.ceil(M / r))
    copies = {"1f1b": 1, "2bw": 2, "paci": 1, "pipedream": depth}[schedule] + 1 + 2.0
    before, behind = crossing(profile, cut[0]), crossing(profile, cut[1])
    kept = weights * copies + sum(node.buffer_bytes for node in own)
    held = kept + sum(depth * node.stash_bytes for node in own)
    held += max(node.workspace_bytes for node in own) + before + behind  # gradients of output and input, while B runs
    # Receives ahead on either side, two gradients sent, and an activation sent for each microbatch in flight.
    for size in (before, behind):
        ahead = 4 if M is None else min(max(4, 2**24 / max(size, 1)), math.ceil(M / r) + (schedule != "1f1b"))
        held += size * ahead
    held += before * 2 + behind * depth
    # Gradients that are being summed: behind a flush a bucket; in a stream copies sent and received.
    bucket = (min(weights, 2.0**24) if schedule == "1f1b" else 2 * weights) if r > 1 else 0.0
    held = max(held, kept + bucket) if schedule == "1f1b" else held + bucket
    return max(compute, talk) if held <= limit * (1 + 1e-12) else math.inf


def least_bottleneck(profile: Profile, cluster: Cluster, **options: Any) -> float:
    """Over all cuts and all replica counts, from the last stage to the first; with `links`, of whole plans."""
    sets = down_sets(profile)
    everything = frozenset(node.name for node in profile.nodes)
    best = math.inf

    def extend(stages: list[tuple[tuple[frozenset[str], frozenset[str]], range]], slowest: float) -> None:
        nonlocal best
        rest, used = (stages[-1][0][0], stages[-1][1].stop) if stages else (everything, 0)
        if not rest:
            if "links" in options:
                on = [range(0), *(devices for _, devices in stages), range(0)]
                slowest = max(
                    stage_seconds(profile, cluster, *stage, around=(on[i], on[i + 2]), **options)
                    for i, stage in enumerate(stages)
                )
            best = min(best, slowest)
            return
        for before in sets:
            if not before < rest:
                continue
            for r in range(1, cluster.num_devices - used + 1):
                stage = (before, rest), range(used, used + r)
                seconds = stage_seconds(profile, cluster, *stage, **options)
                if max(slowest, seconds) < best:
                    extend([*stages, stage], max(slowest, seconds))

    extend([], 0.0)
    return best

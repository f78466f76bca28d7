"""Speeds of hosts, by profiles of one model on each of them, as kinds of devices of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cluster import Cluster
from .profile import Profile

_ALIKE = 0.05  # hosts whose speeds differ by less are of one kind


def host_speeds(profiles: Sequence[Profile]) -> tuple[float, ...]:
    """[H] speeds of hosts, of the first one, by a profile of one model on each: 1 and few others. Hosts within 5% of an
    earlier one are as fast as that, or within what the steps of a profile varied by."""
    alike = max([_ALIKE, *(each.step_spread for each in profiles)])
    found: list[float] = []
    for each in profiles:
        speed = profiles[0].parts_seconds / each.parts_seconds
        found.append(next((other for other in found if abs(speed / other - 1) < alike), round(speed, 4)))
    return tuple(found)


def with_host_speeds(
    cluster: Cluster, hosts: Sequence[Sequence[int]], profiles: Sequence[Profile], *, names: Sequence[str] = ()
) -> Cluster:
    """The same cluster with hosts that are as fast as profiles of one model on each of them say.

    Speeds (`host_speeds`) are relative to the first, whose profile a plan is then made of. Where the nodes of the
    cluster are not the hosts (one rank on each, or hosts of unequal size), each rank becomes a node of its own.

    `hosts`: ranks of each; `profiles`: one a host, in this order; `names`: of their files, for messages. Raises
    ValueError for another number of profiles, and for profiles of models or microbatches that differ.
    """
    if len(profiles) != len(hosts):
        shown = "; ".join(", ".join(map(str, ranks)) for ranks in hosts)
        raise ValueError(
            f"--profiles {' '.join(names)}: {len(profiles)} for {len(hosts)} hosts (of ranks {shown}): expected one a "
            f"host, in the order of ranks"
        )
    first = profiles[0]
    for number, each in enumerate(profiles):
        same = [node.name for node in each.nodes] == [node.name for node in first.nodes]
        if not same or (each.microbatch_size, each.tensor) != (first.microbatch_size, first.tensor):
            one, other = (names[number], names[0]) if names else (f"profile {number}", "profile 0")
            raise ValueError(f"{one}: another model or microbatch than {other}: expected profiles of one model")
    speeds = host_speeds(profiles)
    kinds = {
        speed: replace(cluster.kinds[0], name=f"device {number}", speed=speed)
        for number, speed in enumerate(dict.fromkeys(speeds))
    }
    of_host = [kinds[speed].name for speed in speeds]
    levels, nodes = cluster.levels, of_host
    size = levels[0].size
    if [tuple(ranks) for ranks in hosts] != [tuple(range(i, i + size)) for i in range(0, cluster.num_devices, size)]:
        by_rank = {rank: kind for ranks, kind in zip(hosts, of_host, strict=True) for rank in ranks}
        levels = (replace(levels[0], name="host", size=1), *levels)
        nodes = [by_rank[rank] for rank in range(cluster.num_devices)]
    return replace(cluster, levels=levels, kinds=tuple(kinds.values()), nodes=tuple(nodes))

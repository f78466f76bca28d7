"""How long a ring takes to sum a buffer over a group of devices.

Level by level, from the inside out: the devices that share a group of the level scatter the sum among themselves,
so that the levels above carry only a part, and gather it again on the way back.

    level     members in one group     bytes on the way       seconds
    node      k                        N                      2 (k-1) (latency + N / k / bandwidth)
    net       n                        N / k                  2 (n-1) (latency + N / k / n / bandwidth)

Patarasuk and Yuan 2009 for one ring; NCCL's rings over a node with one adapter a device come to the same bandwidth.
"""

from __future__ import annotations

from ..cluster import Cluster
from ..strict import count, number


def all_reduce_seconds(num_bytes: float, *, members: int, stride: int = 1, cluster: Cluster) -> float:
    """Seconds of one sum over devices 0, stride, 2 stride, ... [s].

    Arguments:
        num_bytes: of the buffer that each member holds [bytes].
        members: devices of the group.
        stride: from one member to the next (the tensor size, for data-parallel replicas where tensor ranks stand
            side by side).

    A group that does not fill the groups of a level evenly is one ring at the pace of the widest level that it
    spans. Raises ValueError for a group that the cluster does not hold.

    >>> cluster = Cluster.parse("4x8:nvlink=300GB/s,net=25GB/s")
    >>> all_reduce_seconds(8e9, members=8, cluster=cluster) == 2 * 7 / 8 * 8e9 / 300e9
    True
    >>> all_reduce_seconds(8e9, members=4, stride=8, cluster=cluster) == 2 * 3 / 4 * 8e9 / 25e9
    True
    """
    num_bytes = number("num_bytes", num_bytes)
    seconds = 0.0
    sizes = ring_sizes(members=members, stride=stride, cluster=cluster)
    for size, bandwidth, level in zip(sizes, cluster.path_bandwidths, cluster.levels, strict=True):
        seconds += 2 * (size - 1) * (level.latency + num_bytes / size / bandwidth)
        num_bytes /= size
    return seconds


def ring_sizes(*, members: int, stride: int = 1, cluster: Cluster) -> tuple[int, ...]:
    """By level, innermost first, how many take part in each ring; 1 where the group does not use the level.

    >>> ring_sizes(members=8, stride=4, cluster=Cluster.parse("4x8:nvlink=300GB/s,net=25GB/s"))
    (2, 4)
    """
    members, stride = count("members", members), count("stride", stride)
    last = (members - 1) * stride
    if last >= cluster.num_devices:
        raise ValueError(
            f"a group of {members} devices, {stride} apart, on {cluster.num_devices} devices: expected at most "
            f"{(cluster.num_devices - 1) // stride + 1} members"
        )
    return _even_sizes(members, stride, cluster) or _one_ring(members, cluster.level_between(0, last), cluster)


def _even_sizes(members: int, stride: int, cluster: Cluster) -> tuple[int, ...] | None:
    """The members in one group, level by level; None where groups would hold unequal numbers of them."""
    sizes = []
    for level in cluster.levels:
        inside = min(members, max(1, level.size // stride))
        if members > 1 and (max(level.size, stride) % min(level.size, stride) or members % inside):
            return None
        sizes.append(inside)
        members //= inside
        stride = max(1, stride // level.size)
    return tuple(sizes)


def _one_ring(members: int, widest: int, cluster: Cluster) -> tuple[int, ...]:
    return tuple(members if number_ == widest else 1 for number_ in range(len(cluster.levels)))

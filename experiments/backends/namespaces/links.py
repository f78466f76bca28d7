"""Commands that make links of a shape: interfaces, addresses and shapers, as lines for a shell in a node's network.

Three ways to connect nodes, by the required shape:

    no latency                             veth pairs into a bridge: all in the kernel
    one latency, and the kernel has netem  the same, with netem at the bridge
    latency without netem, or sites        TUN devices, connected by the process of `wire.py`

A shaper lets a burst pass at once. The burst is small if the shaper alone makes the rate. Before the wire, which times
each packet exactly, the shaper only holds the sender back, with a burst so large that packets are not split.

Arrival times of packets between nodes: the arithmetic of a wire, without clock or sockets.

    sender's card          wire           receiver's card
    |== size/rate ==|----- latency -----|== while others arrive, wait ==|

A card sends one packet after the other: each leaves `size / rate` after the later of its own start and the end of the
previous one. It arrives a latency later, and takes no further time at a card as fast as the sender's, since bits
arrive while others leave; packets of several senders queue there. Packets between sites pass a second, slower card at
either end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from ..records import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link within a site, or between sites: one-way latency [s], seconds per byte at either card (0: no limit)."""

    latency: float = 0.0
    seconds_per_byte: float = 0.0


class Card:
    """A node's card in one direction: when it is free [s], for all packets and for those between sites."""

    def __init__(self, near: Link, far: Link) -> None:
        self._seconds_per_byte = (near.seconds_per_byte, far.seconds_per_byte)
        self._free = [0.0, 0.0]

    def sent(self, start: float, size: int, is_far: bool) -> float:
        free = self._free
        end = free[0] = max(start, free[0]) + size * self._seconds_per_byte[0]
        if is_far:
            end = free[1] = max(end, max(start, free[1]) + size * self._seconds_per_byte[1])
        return end

    def received(self, last_bit: float, size: int, is_far: bool) -> float:
        """The arrival time of a packet whose last bit comes at `last_bit` at the earliest."""
        free = self._free
        end = free[0] = max(last_bit, free[0] + size * self._seconds_per_byte[0])
        if is_far:
            end = free[1] = max(end, free[1] + size * self._seconds_per_byte[1])
        return end


class Crossing:
    """Packets in flight. Those from one node to another keep their order.

    Arguments:
        sites: of each node.
        near: link within a site.
        far: link between sites.
        room: for packets in flight [bytes]; one that does not fit is dropped, as by a full switch.
    """

    def __init__(self, *, sites: tuple[int, ...], near: Link, far: Link, room: int) -> None:
        self._sites = sites
        self._latency = (near.latency, far.latency)
        self._out = [Card(near, far) for _ in sites]
        self._in = [Card(near, far) for _ in sites]
        self._room = room
        # (time, number, whether it has arrived at the card, source, target, size, packet); numbers keep the order
        self._events: list[tuple[float, int, bool, int, int, int, Any]] = []
        self._count = 0
        self.dropped = 0

    def enter(self, packet: Any, *, size: int, source: int, target: int, now: float) -> bool:
        """Accept a packet that a node sends now. Returns False if there is no room for it."""
        if size > self._room:
            self.dropped += 1
            return False
        self._room -= size
        is_far = self._sites[source] != self._sites[target]
        arrives = self._out[source].sent(now, size, is_far) + self._latency[is_far]
        self._count += 1
        heappush(self._events, (arrives, self._count, False, source, target, size, packet))
        return True

    def next_time(self) -> float | None:
        """The time of the next event [s]; None: nothing is in flight."""
        return self._events[0][0] if self._events else None

    def leave(self, now: float) -> Iterator[tuple[float, int, Any]]:
        """Packets due by now: due time, target and packet."""
        events = self._events
        while events and events[0][0] <= now:
            time, number, is_here, source, target, size, packet = heappop(events)
            if not is_here:
                end = self._in[target].received(time, size, self._sites[source] != self._sites[target])
                if end > time:
                    heappush(events, (end, number, True, source, target, size, packet))
                    continue
            self._room += size
            yield time, target, packet


INTERFACE = "eth0"

_NETWORK = "10.66.0.0/16"
_MTU = 9000  # [bytes] so that headers take less than 1% of a link, not 4%
_MB = 1 << 20
_QUEUE = 64 * _MB  # [bytes] more than TCP's windows, so that full queues lose no packets
_WINDOW = 6 * _MB  # [bytes] Linux's own limit of a socket
_SENT_AT_ONCE = 0.0002  # [s] of a link's rate in a burst: the largest delay of timers
_UNLIMITED = 100e9 / 8  # [bytes/s] for a shaper that requires a rate


def address(node: int, shape: Shape) -> str:
    """Address of a node, from its site and its number; visible only to nodes."""
    return f"10.66.{site(node, shape) + 1}.{node + 1}"


def site(node: int, shape: Shape) -> int:
    return shape.sites[node] if shape.sites else 0


def needs_wire(shape: Shape, *, has_netem: bool) -> bool:
    """Whether a process has to carry the packets, since the kernel cannot delay them as required."""
    if len(set(shape.sites)) > 1 and (shape.site_latency != shape.latency or shape.site_bandwidth is not None):
        return True
    return shape.latency > 0 and not has_netem


def wire_links(shape: Shape) -> tuple[Link, Link]:
    """Links within a site and between sites."""
    pairs = ((shape.latency, shape.bandwidth), (shape.site_latency, shape.site_bandwidth))
    near, far = (Link(latency=latency, seconds_per_byte=1 / rate if rate else 0.0) for latency, rate in pairs)
    return near, far


def wire_room(shape: Shape, num_nodes: int) -> int:
    """Most bytes in the wire: twice those in flight on links of that latency, and queues at each card."""
    return min(2048, num_nodes * 64) * _MB + 2 * num_nodes * _in_flight(shape)


def switch_script(processes: Sequence[int], shape: Shape) -> str:
    """Script of the switch: a bridge, a cable to each node (by a process there), and shapers towards each node."""
    lines = ["ip link add bridge0 type bridge", f"ip link set bridge0 mtu {_MTU} up"]
    for node, process in enumerate(processes):
        port = f"port{node}"
        lines += [
            f"ip link add {port} mtu {_MTU} type veth peer name {INTERFACE} mtu {_MTU} netns {process}",
            f"ip link set {port} addrgenmode none master bridge0 up",
        ]
        place = "root"
        if shape.latency > 0:
            packets = 10_000 + 2 * _in_flight(shape) // 1500
            lines.append(
                f"tc qdisc add dev {port} root handle 1: netem delay {1e6 * shape.latency:.0f}us limit {packets}"
            )
            place = "parent 1:1"
        if shape.bandwidth is not None:
            lines.append(_token_bucket(port, place, shape.bandwidth, _small_burst(shape.bandwidth)))
    return "\n".join(lines)


def node_script(node: int, shape: Shape, *, on_wire: bool) -> str:
    """Script of a node with its interface: its address, TCP's windows, and a shaper for its packets."""
    lines = [
        f"ip address add {address(node, shape)}/16 dev {INTERFACE}",
        f"ip link set {INTERFACE} addrgenmode none mtu {_MTU} txqueuelen 10000 up",
        *_tcp(shape),
    ]
    far = shape.site_bandwidth if len(set(shape.sites)) > 1 else None
    if far is not None and far < (shape.bandwidth or _UNLIMITED):
        lines += _two_rates(site(node, shape), shape.bandwidth or _UNLIMITED, far)
    elif shape.bandwidth is not None:
        burst = (_large_burst if on_wire else _small_burst)(shape.bandwidth)
        lines.append(_token_bucket(INTERFACE, "root", shape.bandwidth, burst))
    return "\n".join(lines)


def _tcp(shape: Shape) -> list[str]:
    """Linux's default TCP settings, independent of this machine's, with windows for the longest link."""
    window = max(_WINDOW, min(2 * _in_flight(shape), 1024 * _MB))
    return [
        f"ip route replace {_NETWORK} dev {INTERFACE} congctl cubic",
        f'echo "4096 131072 {window}" > /proc/sys/net/ipv4/tcp_rmem',
        f'echo "4096 65536 {window}" > /proc/sys/net/ipv4/tcp_wmem',
    ]


def _in_flight(shape: Shape) -> int:
    """Bytes sent within a round trip over the longest link, twice those in flight on a full link."""
    far = shape.bandwidth if shape.site_bandwidth is None else shape.site_bandwidth
    near = 2 * shape.latency * (shape.bandwidth or _UNLIMITED)
    return round(max(near, 2 * shape.site_latency * (far or _UNLIMITED) if shape.sites else 0.0))


def _token_bucket(device: str, place: str, bandwidth: float, burst: int) -> str:
    return f"tc qdisc add dev {device} {place} tbf rate {_rate(bandwidth)} burst {burst} limit {_QUEUE}"


def _two_rates(own_site: int, bandwidth: float, far: float) -> list[str]:
    kind = f"tc class add dev {INTERFACE} parent"
    near, burst = bandwidth - far, _large_burst(bandwidth)

    def rates(assured: float, most: float, burst: int) -> str:
        return f"htb rate {_rate(assured)} ceil {_rate(most)} burst {burst} cburst {burst} quantum {1 << 17}"

    return [
        f"tc qdisc add dev {INTERFACE} root handle 1: htb default 3",
        f"{kind} 1: classid 1:1 {rates(bandwidth, bandwidth, burst)}",
        f"{kind} 1:1 classid 1:2 {rates(near, bandwidth, burst)}",
        f"{kind} 1:1 classid 1:3 {rates(far, far, _large_burst(far))}",
        f"tc filter add dev {INTERFACE} parent 1: protocol ip u32 match ip dst 10.66.{own_site + 1}.0/24 flowid 1:2",
    ]


def _small_burst(bandwidth: float) -> int:
    return max(2 * _MTU, round(bandwidth * _SENT_AT_ONCE))


def _large_burst(bandwidth: float) -> int:
    return max(1 << 17, round(bandwidth * 5 * _SENT_AT_ONCE))


def _rate(bandwidth: float) -> str:
    return f"{round(8 * bandwidth)}bit"

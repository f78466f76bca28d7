"""Commands that make links of a shape: interfaces, addresses and shapers, as lines for a shell in a node's network.

Three ways to connect nodes, by the required shape:

    no latency                             veth pairs into a bridge: all in the kernel
    one latency, and the kernel has netem  the same, with netem at the bridge
    latency without netem, or sites        TUN devices, connected by the process of `wire.py`

A shaper lets a burst pass at once. The burst is small if the shaper alone makes the rate. Before the wire, which times
each packet exactly, the shaper only holds the sender back, with a burst so large that packets are not split.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Shape
from .crossing import Link

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
            lines.append(f"tc qdisc add dev {port} root handle 1: netem delay {_time(shape.latency)} limit {packets}")
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


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}us"

"""Commands that make links of a shape: interfaces, addresses and shapers, as lines for a shell in a node's network.

Three ways to join nodes, by what is asked for:

    no latency                             veth pairs into a bridge: all in the kernel
    one latency, and the kernel has netem  the same, with netem at the bridge
    latency without netem, or sites        TUN devices, joined by the process of `wire.py`

A shaper lets a burst pass at once. It is small where the shaper alone makes the rate. In front of the wire, which makes
each packet exact, it only holds the sender back, and is large enough that packets need not be cut for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Shape
from .crossing import Link

INTERFACE = "eth0"

_NETWORK = "10.66.0.0/16"
_MTU = 9000  # [bytes] headers take less than 1% of a link then, not 4%
_MB = 1 << 20
_QUEUE = 64 * _MB  # [bytes] more than TCP's windows fill, so that packets are not lost for want of room
_WINDOW = 6 * _MB  # [bytes] Linux's own limit of a socket
_SENT_AT_ONCE = 0.0002  # [s] of a link's rate in a burst: timers are not later than that
_UNLIMITED = 100e9 / 8  # [bytes/s] for a shaper that must be told a rate


def address(node: int, shape: Shape) -> str:
    """Address of a node: its site, then itself. Nothing outside the nodes sees it."""
    return f"10.66.{site(node, shape) + 1}.{node + 1}"


def site(node: int, shape: Shape) -> int:
    return shape.sites[node] if shape.sites else 0


def needs_wire(shape: Shape, *, has_netem: bool) -> bool:
    """Whether a process has to carry the packets, since the kernel cannot hold them back as asked for."""
    if len(set(shape.sites)) > 1 and (shape.site_latency != shape.latency or shape.site_bandwidth is not None):
        return True
    return shape.latency > 0 and not has_netem


def near_link(shape: Shape) -> Link:
    return Link(latency=shape.latency, seconds_per_byte=_seconds_per_byte(shape.bandwidth))


def far_link(shape: Shape) -> Link:
    return Link(latency=shape.site_latency, seconds_per_byte=_seconds_per_byte(shape.site_bandwidth))


def wire_room(shape: Shape, num_nodes: int) -> int:
    """Bytes that the wire may hold: twice what links of that latency hold, and queues at each card."""
    return min(2048, num_nodes * 64) * _MB + 2 * num_nodes * _in_flight(shape)


def switch_script(processes: Sequence[int], shape: Shape) -> str:
    """For the switch: a bridge, a cable to each node (by a process there), and what goes to each node shaped."""
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
    """For a node that has its interface: its address, TCP's windows, and what it sends shaped."""
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
    """TCP as Linux has it, whatever this machine's own settings; windows as large as the longest link needs."""
    window = max(_WINDOW, min(2 * _in_flight(shape), 1024 * _MB))
    return [
        f"ip route replace {_NETWORK} dev {INTERFACE} congctl cubic",
        f'echo "4096 131072 {window}" > /proc/sys/net/ipv4/tcp_rmem',
        f'echo "4096 65536 {window}" > /proc/sys/net/ipv4/tcp_wmem',
    ]


def _in_flight(shape: Shape) -> int:
    """Bytes sent within a round trip over the longest link, twice what is on their way when it is full."""
    far = shape.bandwidth if shape.site_bandwidth is None else shape.site_bandwidth
    near = 2 * shape.latency * (shape.bandwidth or _UNLIMITED)
    return round(max(near, 2 * shape.site_latency * (far or _UNLIMITED) if shape.sites else 0.0))


def _token_bucket(device: str, place: str, bandwidth: float, burst: int) -> str:
    return f"tc qdisc add dev {device} {place} tbf rate {_rate(bandwidth)} burst {burst} limit {_QUEUE}"


def _two_rates(own_site: int, bandwidth: float, far: float) -> list[str]:
    """One rate for all, and a lower one for what leaves the site."""
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


def _seconds_per_byte(bandwidth: float | None) -> float:
    return 0.0 if bandwidth is None else 1 / bandwidth


def _rate(bandwidth: float) -> str:
    return f"{round(8 * bandwidth)}bit"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}us"

"""A cluster: devices in groups, and the links inside and between the groups."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from . import quantities
from .strict import check_figures, count, fail, number, parse_object, printable, read_text

_JSON_VERSION = 1
RINGS = ("levels", "flat")
SENDS = ("beside", "blocking", "rendezvous")
_FORM = "4x8:nvlink=300GB/s@2us,net=12GB/s@10us:80GB (sizes outermost first, links innermost first)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device.

    Arguments:
        name: unique in the cluster.
        speed: times the speed of the device of the profile.
        memory_bytes: of one device [bytes]; None where it does not matter.
        link_speed: times the bandwidth of the links out of its node, for a slow network card; a message is as slow
            as the slower of its ends.
        host_bandwidth: of the link from one device to its host's memory, each direction, while all of its node use
            theirs [bytes/s]; None: unknown, and no activations are offloaded.
    """

    name: str = "device"
    speed: float = 1.0
    memory_bytes: float | None = None
    link_speed: float = 1.0
    host_bandwidth: float | None = None

    def __post_init__(self) -> None:
        where = f"device kind {printable('device kind', self.name)!r}"
        check_figures(self, where, positive=("speed", "link_speed", "memory_bytes", "host_bandwidth"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of links.

    Arguments:
        name: for people.
        size: how many groups of the level below (devices, at the innermost) it joins.
        bandwidth: of one device across this level, each direction [bytes/s].
        latency: of a message across it [s].
        reduce_bandwidth: the same of a device in a ring that sums gradients, copies and additions included [bytes/s];
            None: as `bandwidth`.
        reduce_latency: of each step of such a ring [s]; None: as `latency`. Over gloo it is the way there and back: a
            rank sends when it has heard that the next one waits.
        message_seconds: for which a rank is busy with one message that it sends across this level, and as long with one
            that it receives, in addition to the latency [s].
        message_bandwidth: at which a rank's processor sends or receives bytes, in addition to `message_seconds`, and
            does not compute [bytes/s]; None: bytes take none of its time.
        sum_busy: share of a sum's seconds for which its ranks' processors are busy with it and can't compute (0 to 1):
            where the transport's threads have no core of their own.
        partial_reduce: times the bandwidth of sums over nodes of which each has several members, but not all of its
            devices: their rings share network cards (0 to 1). No flat ring does.
        devices_per_card: neighbours that share one network card on their ways across this level, whose bandwidth it is
            then; None: each has its own.
        sends: "beside": messages overlap with compute; "blocking": a rank continues computing only when its message has
            left; "rendezvous": so does the receiver, from its end of the action before the one that takes the message
            (NCCL's send and receive in the order of a device's computations, as DeepSpeed's pipeline has them), if the
            message is larger than two buffers (see `schedules.Link`).
        buffer_bytes: size of the buffer that a device has at its end of such a link, for "rendezvous" alone. NCCL's
            2 MiB between nodes are two channels (ncclTopoGetNchannels, 2.22) of NCCL_STEPS = 8 chunks of 128 KiB
            (NCCL_P2P_NET_CHUNKSIZE), which the proxies of both ends fill as soon as their hosts have called.
    """

    name: str
    size: int
    bandwidth: float
    latency: float = 0.0
    reduce_bandwidth: float | None = None
    reduce_latency: float | None = None
    message_seconds: float = 0.0
    message_bandwidth: float | None = None
    sum_busy: float = 0.0
    partial_reduce: float = 1.0
    devices_per_card: int | None = None
    sends: str = "beside"
    buffer_bytes: float = 2 * 8 * 2**17

    def __post_init__(self) -> None:
        where = f"level {printable('level', self.name)!r}"
        object.__setattr__(self, "size", count(f"{where}: size", self.size))
        check_figures(self, where, positive=("bandwidth", "reduce_bandwidth", "message_bandwidth", "partial_reduce"))
        if self.sum_busy > 1:
            fail(f"{where}: sum_busy", self.sum_busy, "a number of at least 0 and at most 1")
        if self.devices_per_card is not None:
            count(f"{where}: devices_per_card", self.devices_per_card)
        if self.sends not in SENDS:
            fail(f"{where}: sends", self.sends, f"one of {', '.join(SENDS)}")
        if self.partial_reduce > 1:
            fail(f"{where}: partial_reduce", self.partial_reduce, "a number above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices 0..D-1 in groups of equal size, level by level.

    Arguments:
        levels: innermost first; `levels[0].size` devices make a node.
        kinds: of devices.
        nodes: by node, the name of its kind; None: all of the first kind.
        rings: how sums go over several levels: "levels", inside of each group first, as NCCL does; "flat", in one ring
            of all members, as gloo does. See `topology`.
        node_links: (node, node, bandwidth [bytes/s], latency [s]) of links from one node to another, in this direction
            alone, or within a node, that are slower than their level says.

    Raises ValueError for no level, an unknown kind, another number of nodes, other rings, or a level whose
    `partial_reduce` is below 1 where rings are "flat".

    >>> Cluster.parse("4x8:nvlink=300GB/s,net=12GB/s").num_devices
    32
    """

    levels: tuple[Level, ...]
    kinds: tuple[DeviceKind, ...] = (DeviceKind(),)
    nodes: tuple[str, ...] | None = None  # never None once made
    rings: str = "levels"
    node_links: tuple[tuple[int, int, float, float], ...] = ()

    def __post_init__(self) -> None:
        levels, kinds = tuple(self.levels), tuple(self.kinds)
        if not levels or not kinds:
            raise ValueError(f"cluster with levels={levels}, kinds={kinds}: expected at least one of each")
        names = [kind.name for kind in kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"device kinds {', '.join(names)}: expected unique names")
        num_nodes = math.prod(level.size for level in levels[1:])
        nodes = (names[0],) * num_nodes if self.nodes is None else tuple(self.nodes)
        if len(nodes) != num_nodes:
            raise ValueError(f"{len(nodes)} kinds of nodes for {num_nodes} nodes: expected one a node")
        for i, name in enumerate(nodes):
            if name not in names:
                raise ValueError(f"node {i}: unknown device kind {name!r}: expected one of {', '.join(names)}")
        if self.rings not in RINGS:
            raise ValueError(f"rings={self.rings!r}: expected one of {', '.join(RINGS)}")
        inside = levels[0].size  # neighbours below a level; within the innermost one all
        for at, level in enumerate(levels):
            if inside % (level.devices_per_card or 1):
                expected = f"a divisor of the {inside} devices that the links below join"
                fail(f"level {level.name!r}: devices_per_card", level.devices_per_card, expected)
            inside *= level.size if at else 1
            if self.rings == "flat" and level.partial_reduce < 1:
                raise ValueError(
                    f"level {level.name!r}: partial_reduce={level.partial_reduce!r} with rings='flat': expected 1, "
                    f"since one ring comes into a node over one card, however many of its devices are members; or "
                    f"rings='levels'"
                )
        node_links = tuple(_node_link(each, num_nodes) for each in self.node_links)
        if len({link[:2] for link in node_links}) < len(node_links):
            fail("node_links", node_links, "one from each node to another")
        if node_links and any(kind.link_speed != 1 for kind in kinds):
            raise ValueError(
                "node_links and kinds with a link_speed: expected one of them: both say how fast links are"
            )
        for field, value in (("levels", levels), ("kinds", kinds), ("nodes", nodes), ("node_links", node_links)):
            object.__setattr__(self, field, value)

    @property
    def num_devices(self) -> int:
        """D."""
        return math.prod(level.size for level in self.levels)

    @property
    def used_kinds(self) -> tuple[DeviceKind, ...]:
        """The kinds that some node has."""
        used = set(self.nodes or ())
        return tuple(kind for kind in self.kinds if kind.name in used)

    @property
    def path_bandwidths(self) -> tuple[float, ...]:
        """[L] bandwidth of the slowest link on the way across each level, the levels below included [bytes/s]."""
        return tuple(accumulate((level.bandwidth for level in self.levels), min))

    @property
    def ring_bandwidths(self) -> tuple[float, ...]:
        """[L] bandwidth of a device in a ring of sums across each level, the levels below included [bytes/s]."""
        return tuple(accumulate((level.reduce_bandwidth or level.bandwidth for level in self.levels), min))

    @property
    def ring_latencies(self) -> tuple[float, ...]:
        """[L] of a step in a ring of sums across each level, the levels below included [s]."""
        steps = (each.latency if each.reduce_latency is None else each.reduce_latency for each in self.levels)
        return tuple(accumulate(steps, max))

    def reordered(self, order: Sequence[int]) -> Cluster:
        """The same with the nodes in another order: node i is what node `order[i]` was."""
        nodes, place = self.nodes or (), {node: at for at, node in enumerate(order)}
        node_links = tuple((place[a], place[b], bandwidth, latency) for a, b, bandwidth, latency in self.node_links)
        return replace(self, nodes=tuple(nodes[at] for at in order), node_links=node_links)

    @classmethod
    def from_levels(
        cls, levels: Sequence[tuple[int, float]], *, speed: float = 1.0, memory_bytes: float | None = None
    ) -> Cluster:
        """Equal devices; `levels` as (groups of the level below, bytes/s), innermost first."""
        names = ("link",) if len(levels) == 1 else tuple(f"level{i}" for i in range(1, len(levels) + 1))
        made = tuple(
            Level(name=name, size=size, bandwidth=bandwidth)
            for name, (size, bandwidth) in zip(names, levels, strict=True)
        )
        return cls(levels=made, kinds=(DeviceKind(speed=speed, memory_bytes=memory_bytes),))

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read the short form: sizes, outermost first; links, innermost first, with latency or not; memory or not; at
        the end ":flat" where sums go in one ring.

        ValueError for anything else, missing and unknown units included.
        """
        levelled = text.removesuffix(":flat")
        sizes, _, rest = levelled.partition(":")
        links, _, memory = rest.partition(":")
        numbers = sizes.split("x")
        if not all(re.fullmatch(r"[1-9]\d*", each) for each in numbers):
            raise ValueError(f"cluster {text!r}: sizes {sizes!r}: expected {_FORM}")
        named = [each.partition("=") for each in links.split(",")] if links else []
        if len(named) != len(numbers):
            raise ValueError(
                f"cluster {text!r}: {len(named)} links for {len(numbers)} sizes: expected one a size, as in {_FORM}"
            )
        levels = []
        for size, (name, _, value) in zip(reversed(numbers), named, strict=True):
            speed, _, latency = value.partition("@")
            where = f"cluster {text!r}: link {name!r}"
            levels.append(
                Level(
                    name=name,
                    size=int(size),
                    bandwidth=quantities.bandwidth(f"{where}: bandwidth", speed),
                    latency=quantities.latency(f"{where}: latency", latency) if latency else 0.0,
                )
            )
        held = quantities.size(f"cluster {text!r}: memory", memory) if memory else None
        rings = "levels" if levelled == text else "flat"
        return cls(levels=tuple(levels), kinds=(DeviceKind(memory_bytes=held),), rings=rings)

    def to_json(self) -> str:
        """One JSON object with a version; `from_json` reads it."""
        data = {
            "version": _JSON_VERSION,
            "levels": [asdict(level) for level in self.levels],
            "kinds": [asdict(kind) for kind in self.kinds],
            "nodes": list(self.nodes or ()),
            "rings": self.rings,
            "node_links": self.node_links,
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str, *, source: str = "cluster") -> Cluster:
        """Read `to_json`'s form. ValueError names `source`, the field and what was expected."""
        record = parse_object(text, source=source)
        record.version(_JSON_VERSION)
        figures, sends = ("bandwidth", "partial_reduce"), {"sends": SENDS}
        levels = [each.made(Level, positive=figures, choices=sends) for each in record.objects("levels")]
        positive = ("speed", "memory_bytes", "link_speed", "host_bandwidth")
        kinds = [each.made(DeviceKind, positive=positive, needed=("name",)) for each in record.objects("kinds")]
        nodes = record.take("nodes", "a list", default=None)
        if nodes is not None and not (isinstance(nodes, list) and all(isinstance(name, str) for name in nodes)):
            raise ValueError(f"{record.at('nodes')}: {nodes!r}: expected the name of a kind for each node")
        given = {"levels": levels, "kinds": kinds, "nodes": None if nodes is None else tuple(nodes)}
        given["node_links"] = tuple(record.items("node_links", default=[]))
        return record.made(cls, given, choices={"rings": RINGS})

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a JSON file."""
        return cls.from_json(read_text(path), source=str(path))


def _node_link(given: object, num_nodes: int) -> tuple[int, int, float, float]:
    match given:
        case [int(src), int(dst), bandwidth, latency] if 0 <= min(src, dst) <= max(src, dst) < num_nodes:
            where = f"link from node {src} to node {dst}"
            return (
                src,
                dst,
                number(f"{where}: bandwidth", bandwidth, positive=True),
                number(f"{where}: latency", latency),
            )
    return fail("node_links", given, f"(node, node, bytes/s, seconds) of nodes 0 to {num_nodes - 1}")

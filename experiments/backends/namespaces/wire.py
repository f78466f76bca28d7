"""The process that carries packets between nodes if the kernel cannot delay them.

Each node's eth0 is a TUN device whose other end is here: this process reads a packet of the node, holds it for its
travel time (`links.py`), and writes it to the addressed node. Packets are as large as TCP passes them to a card with
segmentation offload: up to 64 KiB, with a header for the segmentation, and without checksums. This is some ten times
cheaper than frames of the usual size.

The traffic shaper of each device (`links.py`) holds the sender back; the times here make each packet exact.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from ....schedules.wording import duration, size
from .links import INTERFACE, Crossing, Link

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_PR_SET_TIMERSLACK = 29

_HEADER = 10  # [bytes] before each packet: struct virtio_net_hdr
_BUFFER = 1 << 16 | 64  # the largest packet and the header
_SMALL = 1 << 14  # [bytes] smaller packets are copied, so that 40 bytes don't occupy a whole buffer
_AT_A_TIME = 32  # packets read from one node before the next node's turn
_LATE = 0.001  # [s] of delay from which packets are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSpec:
    """Cards that a wire connects, and its links."""

    processes: tuple[int, ...]  # a process id on each node, which identifies its network
    addresses: tuple[str, ...]  # of the nodes, IPv4
    sites: tuple[int, ...]  # of the nodes
    near: Link  # link within a site
    far: Link  # link between sites
    room: int  # for packets in flight [bytes]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WireSpec:
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("processes", "addresses", "sites")}
        return cls(**lists, near=Link(**fields["near"]), far=Link(**fields["far"]), room=fields["room"])


@dataclass(slots=True, kw_only=True)
class WireRecord:
    """Counts of packets that a wire has carried."""

    packets: int = 0  # delivered
    nbytes: int = 0  # delivered
    dropped: int = 0  # without room
    late: int = 0  # delivered more than a millisecond late, on a busy machine
    worst: float = 0.0  # the longest delay [s]
    cpu: float = 0.0  # CPU time [s]

    def describe(self) -> str:
        return (
            f"wire: {self.packets} packets, {size(self.nbytes)}, {self.dropped} dropped, "
            f"{self.late} late by more than {duration(_LATE)} (at most {duration(self.worst)}), "
            f"{duration(self.cpu)} of a core"
        )


def carry(spec: WireSpec, devices: Sequence[int], lifeline: int) -> WireRecord:
    """Carry packets between the nodes' TUN devices, which don't block, until the pipe `lifeline` closes."""
    record = WireRecord()
    crossing = Crossing(sites=spec.sites, near=spec.near, far=spec.far, room=spec.room)
    nodes = {bytes(map(int, address.split("."))): node for node, address in enumerate(spec.addresses)}
    spare: list[bytearray] = []
    watched = [*devices, lifeline]
    clock = time.monotonic
    while True:
        due = crossing.next_time()
        ready, _, _ = select.select(watched, (), (), None if due is None else max(0.0, due - clock()))
        for device in ready:
            if device == lifeline:
                record.dropped = crossing.dropped
                record.cpu = time.process_time()
                return record
            source = devices.index(device)
            for _ in range(_AT_A_TIME):
                buffer = spare.pop() if spare else bytearray(_BUFFER)
                try:
                    length = os.readv(device, (buffer,))
                except BlockingIOError:
                    spare.append(buffer)
                    break
                target = nodes.get(bytes(buffer[_HEADER + 16 : _HEADER + 20]))  # of IPv4; other protocols match no node
                if target is None:
                    spare.append(buffer)
                    continue
                packet = memoryview(buffer)[:length]
                if length < _SMALL:
                    packet = memoryview(bytes(packet))
                    spare.append(buffer)
                if not crossing.enter(packet, size=length - _HEADER, source=source, target=target, now=clock()):
                    _give_back(packet, spare)
        now = clock()
        for due, target, packet in crossing.leave(now):
            with suppress(OSError):  # the node is gone, or its interface down
                os.write(devices[target], packet)
            record.packets += 1
            record.nbytes += len(packet) - _HEADER
            behind = now - due
            if behind > _LATE:
                record.late += 1
                record.worst = max(record.worst, behind)
            _give_back(packet, spare)


def _give_back(packet: memoryview, spare: list[bytearray]) -> None:
    buffer = packet.obj
    if isinstance(buffer, bytearray):
        spare.append(buffer)


def open_devices(spec: WireSpec) -> list[int]:
    """Make a TUN device on each node and open it here."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    devices = []
    for process in spec.processes:
        there = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
        _enter(libc, there)
        os.close(there)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        devices.append(device)
    _enter(libc, home)
    os.close(home)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    return devices


def _enter(libc: ctypes.CDLL, network: int) -> None:
    if libc.setns(network, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def main(words: Sequence[str]) -> int:
    """Carry packets by the specification in the first word; print "ready", and at the end the record, as JSON."""
    spec = WireSpec.from_json(words[0])
    devices = open_devices(spec)
    with suppress(OSError):  # a higher priority than computing ranks, if permitted
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    record = carry(spec, devices, sys.stdin.fileno())
    print(json.dumps(asdict(record)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

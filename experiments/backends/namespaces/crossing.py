"""Arrival times of packets between nodes: the arithmetic of a wire, without clock or sockets.

    sender's card          wire           receiver's card
    |== size/rate ==|----- latency -----|== while others arrive, wait ==|

A card sends one packet after the other: each leaves `size / rate` after the later of its own start and the end of the
previous one. It arrives a latency later, and takes no further time at a card as fast as the sender's, since bits
arrive while others leave; packets of several senders queue there. Packets between sites pass a second, slower card at
either end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any


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

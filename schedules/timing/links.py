r"""Links: sizes of messages, the network that carries them, and all-reduces over several ranks.

    rank 0 ----\                   /---- rank 2      A message occupies its pair's link, and the network cards at
               [card 0] --- [card 1]                 both ends, for bytes * seconds_per_byte, and arrives `latency`
    rank 1 ----/                   \---- rank 3      after that. 0 -> 2 and 1 -> 3 queue: they share both cards.

First come, first served: a message is ready when its maker ends (of those ready at one time, the one from the lower
rank is first), and waits until everything that it occupies is free. Later messages queue after it, even if they could
start earlier. A card sends and receives at the same time.

A message leaves no earlier than one latency after its receive is posted (see `receives_ahead`), unless the posted
receives keep its link busy for a round trip, or the link has no rate. Cards count it from when it is ready and posted.

The processor of a rank while an all-reduce takes a share of it:

    processor   |   F3   |  B2 at half rate  |  B3   |
    all-reduce           |  busy share 1/2   |

While collectives take a share b of the processor, an action runs at rate 1 - b. With several at once the largest share
counts, since seconds measured at the same time include the wait for each other. (Fair sharing would slow down a
collective
that takes more than half instead, by as much: both end at the same time.)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from numbers import Integral, Real
from typing import NamedTuple

from ..dependencies import Wire
from ..ir import Schedule
from ..messages import MessageKind

ON_CARD = "card"


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (isinstance(value, Real) and value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value!r}: expected a finite number, at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link from one rank to another, in one direction.

    Arguments:
        latency: of a message, after its last byte has left [s].
        seconds_per_byte: of the slowest part of the path; 0: no limit.
        sending, receiving: network cards at both ends, shared by all links that name them.
        blocks: whether a rank continues computing only when its message has left.
        meets: and whether that is only once the receiver has ended the action before the one that takes it; each rank
            has one such message at a time. Where all ranks would wait for each other, senders compute on.
        buffer: bytes that the transport holds at each end of a link that meets. A sender computes on once no more bytes
            than that are left to send. A message of at most two buffers does not wait for its receiver. An activation
            leaves once its sender has the gradient that it takes next, if that was sent before, as in DeepSpeed.
    """

    latency: float = 0.0
    seconds_per_byte: float = 0.0
    sending: Hashable = None
    receiving: Hashable = None
    blocks: bool = False
    meets: bool = False
    buffer: float = 0.0

    def __post_init__(self) -> None:
        _check(latency=self.latency, seconds_per_byte=self.seconds_per_byte, buffer=self.buffer)
        if self.meets and not self.blocks:
            raise ValueError("meets=True with blocks=False: expected blocks=True, too")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """The links inside a group of ranks that no smaller group joins."""

    num_ranks: int  # consecutive ranks of a group
    latency: float = 0.0  # see `Link`
    seconds_per_byte: float = 0.0  # likewise
    # consecutive ranks that share one network card on these links; None: each pair has its own link
    ranks_per_card: int | None = None

    def __post_init__(self) -> None:
        _check(latency=self.latency, seconds_per_byte=self.seconds_per_byte)
        for name, value in (("num_ranks", self.num_ranks), ("ranks_per_card", self.ranks_per_card)):
            if not ((value is None and name == "ranks_per_card") or (isinstance(value, Integral) and value >= 1)):
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")

    def way(self, src: int, dst: int) -> Link:
        if self.ranks_per_card is None:
            return Link(latency=self.latency, seconds_per_byte=self.seconds_per_byte)
        sending, receiving = ((self.num_ranks, rank // self.ranks_per_card) for rank in (src, dst))
        return Link(latency=self.latency, seconds_per_byte=self.seconds_per_byte, sending=sending, receiving=receiving)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """All-reduce of the gradients of a stage over several ranks before each of its updates.

    It is ready when the last rank of the stage begins it (after its backwards of the update group, see `collectives`),
    and the stage's updates wait for it. It overlaps with compute, if the program allows.

    Arguments:
        stage: whose gradients.
        seconds: duration once everything that it occupies is free [s].
        ways: links that it occupies, as (sending rank, receiving rank), with their cards; None: both directions of the
            cards of its ranks, as a ring does.
        gather: all-gather of the weights, of which each rank updates a shard, over the same links [s]; 0: each rank
            updates all of them.
        early: by how much it may start before that, with buckets that the last backward makes [s].
        unshards: whether they are gathered before a batch's first forward, one stage ahead, since ranks keep only
            shards between batches; else after each update.
    """

    stage: int
    seconds: float
    ways: tuple[tuple[int, int], ...] | None = ()
    gather: float = 0.0
    unshards: bool = False
    early: float = 0.0

    def __post_init__(self) -> None:
        _check(seconds=self.seconds, gather=self.gather, early=self.early)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceNetwork:
    """Places of a pipeline on one or several ranks each; every rank has a card, on which everything that it sends
    queues."""

    places: tuple[tuple[int, ...], ...]  # [P] ranks of each
    # of messages between two places, the lower one first, for any of their ranks; in the reverse direction, the route
    # with the higher one first if there is one. ON_CARD as `sending`: they take `cards`.
    routes: Mapping[tuple[int, int], Link]
    # [P] by rank of each, the card of its host, which other places may share; all-reduces over several take these
    cards: tuple[tuple[int, ...], ...] = ()
    _place: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {rank: place for place, ranks in enumerate(self.places) for rank in ranks}
        object.__setattr__(self, "_place", places)
        if any(way.sending for way in self.routes.values()) and [*map(len, self.cards)] < [*map(len, self.places)]:
            raise ValueError(f"cards={self.cards!r:.60}: expected one for each rank of {len(self.places)} places")

    def pair(self, src: int, dst: int) -> tuple[int, int] | None:
        """The two places of these ranks in the order of their route; None without one."""
        here, there = self._place.get(src, -1), self._place.get(dst, -1)
        pairs = (here, there), (min(here, there), max(here, there))
        return next((pair for pair in pairs if pair in self.routes), None)

    def way(self, src: int, dst: int) -> Link | None:
        pair = self.pair(src, dst)
        if pair is None:
            return None
        route = self.routes[pair]
        card = self._card if route.sending is not None else int
        return replace(route, sending=card(src), receiving=card(dst))

    def _card(self, rank: int) -> Hashable:
        place = self._place[rank]
        return (ON_CARD, self.cards[place][self.places[place].index(rank)])

    def cards_of_sum(self, ranks: Sequence[int]) -> list[Hashable]:
        """The cards of an all-reduce of a place's ranks, whether all of them are simulated or one for all."""
        own = self.cards[self._place[ranks[0]]] if self.cards else ()
        return [*ranks, *((ON_CARD, card) for card in dict.fromkeys(own) if len({*own}) > 1)]


Network = Link | Sequence[LinkLevel] | Mapping[tuple[int, int], Link] | PlaceNetwork
Bytes = float | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Sizes of messages, and the network that carries them.

    Arguments:
        network: one link for all pairs of ranks; levels, the innermost first, each a multiple of the one before; the
            link of each pair that sends; or places of a pipeline.
        activation_bytes: of the messages over each edge of the stage graph: one number, or one per edge, in the order
            of `schedule.stage_edges` (S - 1 in a chain).
        gradient_bytes: of the messages back over it, likewise; None: as many as of activations.
        index_factors: by action index, factors of those bytes, as for slices of unequal length, repeated beyond the
            last; None: all are equal.
        sums: at most one per stage.

    Raises ValueError for numbers that are negative or not finite, levels that do not fit, and two sums of a stage.

    >>> nodes = (LinkLevel(num_ranks=2), LinkLevel(num_ranks=4, seconds_per_byte=1e-9, ranks_per_card=2))
    >>> Links(network=nodes, activation_bytes=8e6).way(1, 2).seconds_per_byte
    1e-09
    """

    network: Network
    activation_bytes: Bytes = 0.0
    gradient_bytes: Bytes | None = None
    sums: tuple[AllReduce, ...] = ()
    index_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("activation_bytes", "gradient_bytes", "index_factors"):
            given = getattr(self, name)
            for number in given if isinstance(given, Iterable) else () if given is None else (given,):
                _check(**{name: number})
            if isinstance(given, Iterable):
                object.__setattr__(self, name, tuple(given))
        if not isinstance(self.network, Link | Mapping | PlaceNetwork):
            sizes = [level.num_ranks for level in self.network]
            if not sizes or any(b % a for a, b in pairwise(sizes)):
                raise ValueError(f"levels of {sizes} ranks: expected at least one, each a multiple of the one before")
        stages = [each.stage for each in self.sums]
        if len(set(stages)) < len(stages):
            raise ValueError(f"sums of the stages {stages}: expected at most one per stage")

    def on(self, places: Sequence[Sequence[int]]) -> Links:
        """The same with each place of the network on these ranks, [P]."""
        assert isinstance(self.network, PlaceNetwork)
        return replace(self, network=replace(self.network, places=tuple(map(tuple, places))))

    def way(self, src: int, dst: int) -> Link:
        match self.network:
            case Link():
                return self.network
            case PlaceNetwork():
                if (way := self.network.way(src, dst)) is not None:
                    return way
            case Mapping():
                if (src, dst) in self.network:
                    return self.network[src, dst]
            case levels:
                for level in levels:
                    if src // level.num_ranks == dst // level.num_ranks:
                        return level.way(src, dst)
        raise ValueError(f"no way from rank {src} to rank {dst}: expected one in the network of the links")

    def channels(self, src: int, dst: int, way: Link | None = None) -> list[Hashable]:
        """Names of everything that a message occupies: its pair's link, and a direction of each network card."""
        way = way or self.way(src, dst)
        cards = [(side, card) for side, card in (("out", way.sending), ("in", way.receiving)) if card is not None]
        return [(src, dst), *cards]

    def channels_of_sum(self, each: AllReduce, ranks: Iterable[int]) -> list[Hashable]:
        """Names of everything that an all-reduce of these ranks occupies, and the gather after it."""
        if each.ways is None:
            own = list(dict.fromkeys(ranks))
            cards = self.network.cards_of_sum(own) if isinstance(self.network, PlaceNetwork) else own
            return [(side, card) for card in cards for side in ("out", "in")]
        return list(dict.fromkeys(name for src, dst in each.ways for name in self.channels(src, dst)))


def wire_bytes(schedule: Schedule, links: Links, wires: Iterable[Wire]) -> dict[Wire, float]:
    """Bytes of each message over each wire of a schedule, before `index_factors`.

    A message for several consumers has the bytes of the largest of their edges: the tensors of one are assumed to be
    among those of another.
    """
    edges = schedule.stage_edges
    back = links.activation_bytes if links.gradient_bytes is None else links.gradient_bytes
    by_edge: dict[tuple[MessageKind, int, int], float] = {}
    for (src, dst, _), activations, gradients in zip(
        edges,
        _spread("activation_bytes", links.activation_bytes, len(edges)),
        _spread("gradient_bytes", back, len(edges)),
        strict=True,
    ):
        by_edge[MessageKind.ACT, src, dst] = activations
        by_edge[MessageKind.GRAD, src, dst] = gradients
    return {w: max(by_edge[w.kind, w.producer, consumer] for consumer in w.consumers) for w in wires}


def _spread(name: str, value: Bytes, number: int) -> tuple[float, ...]:
    given = tuple(value) if isinstance(value, Iterable) else (value,) * number
    if len(given) != number:
        raise ValueError(f"{name} has {len(given)} numbers for {number} edges: expected one number, or one per edge")
    return tuple(map(float, given))


class Transit:
    """A message route in a simulation: each of its channels carries one message at a time; `free_at`: when they are
    free; `held`: so long before the last byte leaves its sender computes on; None: it never waits [s]."""

    __slots__ = ("_channels", "_free_at", "held", "latency", "seconds")

    def __init__(
        self, seconds: float, latency: float, channels: Sequence[int], free_at: list[float], held: float | None = None
    ) -> None:
        self.seconds, self.latency, self._channels, self._free_at = seconds, latency, channels, free_at
        self.held = held

    def slower(self, times: float) -> Transit:
        held = None if self.held is None else self.held * times
        return Transit(self.seconds * times, self.latency * times, self._channels, self._free_at, held)

    def free_from(self, now: float) -> float:
        """The first time at which all channels are free, at or after `now` [s]."""
        return max([now, *(self._free_at[channel] for channel in self._channels)])

    def carry(self, now: float) -> float:
        """Occupy the channels from the first time at which all are free, at or after `now`; returns the arrival [s]."""
        for channel in self._channels:
            now = max(now, self._free_at[channel])
        now += self.seconds
        for channel in self._channels:
            self._free_at[channel] = now
        return now + self.latency


class Taken(NamedTuple):
    """A share of the processor, from `start` to `end` [s]."""

    start: float
    end: float
    share: float


def seconds_left(taken: Iterable[Taken], start: float, end: float) -> float:
    """Seconds of a whole processor that an action received in this interval [s].

    >>> seconds_left([Taken(2.0, 6.0, 0.5)], 0.0, 4.0)
    3.0
    """
    overlapping = [each for each in taken if each.start < end and each.end > start]
    if not overlapping:
        return end - start
    moments = sorted({start, end, *(at for each in overlapping for at in each[:2] if start < at < end)})
    return sum(
        (b - a) * (1 - max((each.share for each in overlapping if each.start <= a and b <= each.end), default=0.0))
        for a, b in pairwise(moments)
    )


class Processor:
    """Shares of one rank's processor that are taken."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[Taken] = []

    def take(self, taken: Taken) -> None:
        self._taken.append(taken)

    def end(self, start: float, seconds: float) -> float:
        """When an action ends that starts then and needs this many seconds of a whole processor [s].

        Valid until another share is taken before that. Actions are asked about in the order in which they run.
        """
        now, left = start, seconds
        self._taken = [each for each in self._taken if each.end > start]
        while True:
            share, until = 0.0, inf
            for each in self._taken:
                if each.start > now:
                    until = min(until, each.start)
                elif each.end > now:
                    share, until = max(share, each.share), min(until, each.end)
            end = now if left <= 0 else inf if share == 1 else now + left / (1 - share)
            if end <= until:
                return end
            left -= (until - now) * (1 - share)
            now = until

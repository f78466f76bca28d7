r"""Links: sizes of messages, the ways that they take between ranks, and sums over several ranks.

    rank 0 ----\                   /---- rank 2      A message occupies its pair's link, and the network cards at
               [card 0] --- [card 1]                 both ends, for bytes * seconds_per_byte, and arrives `latency`
    rank 1 ----/                   \---- rank 3      after that. 0 -> 2 and 1 -> 3 queue: they share both cards.

First ready, first served: a message is ready when its maker ends (of those ready at one time, the one that the lower
rank sent comes first), and waits until all that it occupies is free. Those that are ready later queue after it, also
where they could go first. A card sends and receives at the same time.

A message leaves no earlier than one latency after its receive is posted (see `receives_ahead`), unless these keep its
link busy for the latency there and back, or the link has no rate. Cards count it from when it is ready and posted.

A rank's processor while all-reduces of gradients take a share of it:

    processor   |   F3   |  B2 at half rate  |  B3   |
    sum                  |  busy share 1/2   |

While something that takes a share b of the processor is under way, an action gets on at rate 1 - b: it lasts longer by
b times the seconds beside it, whenever in it these are. Under several at once the largest share counts, since seconds
that were measured at the same time have the wait for each other in them. A processor that is shared fairly would slow
down what takes more than half of it instead, by as much: both are through at the same time.
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
    """A way from one rank to another, in one direction.

    Arguments:
        latency: of a message, after its last byte has left [s].
        seconds_per_byte: of the slowest part of the way; 0: no limit.
        sending, receiving: network cards on the way out and in, which it shares with all ways that name them.
        blocks: whether a rank computes on only when its message has left.
    """

    latency: float = 0.0
    seconds_per_byte: float = 0.0
    sending: Hashable = None
    receiving: Hashable = None
    blocks: bool = False

    def __post_init__(self) -> None:
        _check(latency=self.latency, seconds_per_byte=self.seconds_per_byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """The ways inside a group of ranks that no smaller group joins.

    Arguments:
        num_ranks: consecutive ranks of a group.
        latency, seconds_per_byte: see `Link`.
        ranks_per_card: consecutive ranks that share one network card on these ways; None: each pair has its own link.
    """

    num_ranks: int
    latency: float = 0.0
    seconds_per_byte: float = 0.0
    ranks_per_card: int | None = None

    def __post_init__(self) -> None:
        _check(latency=self.latency, seconds_per_byte=self.seconds_per_byte)
        for name, value in (("num_ranks", self.num_ranks), ("ranks_per_card", self.ranks_per_card)):
            if not ((value is None and name == "ranks_per_card") or (isinstance(value, Integral) and value >= 1)):
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")

    def way(self, src: int, dst: int) -> Link:
        """The way from rank to rank."""
        if self.ranks_per_card is None:
            return Link(latency=self.latency, seconds_per_byte=self.seconds_per_byte)
        sending, receiving = ((self.num_ranks, rank // self.ranks_per_card) for rank in (src, dst))
        return Link(latency=self.latency, seconds_per_byte=self.seconds_per_byte, sending=sending, receiving=receiving)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Gradients of a stage that several ranks add up in front of each of its updates.

    It is ready when the last rank of the stage begins it (behind its backwards of the update group, see `collectives`);
    the stage's updates wait for it. Compute goes on meanwhile, where the program lets it.

    Arguments:
        stage: whose gradients.
        seconds: that it takes once all that it occupies is free [s].
        ways: that it occupies, as (sending rank, receiving rank), with their cards; None: both sides of the cards of
            its ranks, as a ring of them does.
        gather: of bringing the weights together, of which each rank updates a part, over the same ways [s]; 0: each
            rank updates all of them.
        unshards: whether they are gathered in front of a batch's first forward, one stage ahead, since ranks keep parts
            alone between two batches; else behind each update.
    """

    stage: int
    seconds: float
    ways: tuple[tuple[int, int], ...] | None = ()
    gather: float = 0.0
    unshards: bool = False

    def __post_init__(self) -> None:
        _check(seconds=self.seconds, gather=self.gather)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceNetwork:
    """Places of a pipeline on one rank or several each; every rank has a card, on which all that it sends queues.

    Arguments:
        places: [P] ranks of each.
        routes: of messages between two places, the lower one first, whichever of their ranks share a microbatch; those
            back take the route with the higher one first where there is one. ON_CARD as `sending`: they take `cards`.
        cards: [P] by rank of each, the card of its host, which other places may share; sums over several take these.
    """

    places: tuple[tuple[int, ...], ...]
    routes: Mapping[tuple[int, int], Link]
    cards: tuple[tuple[int, ...], ...] = ()
    _place: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {rank: place for place, ranks in enumerate(self.places) for rank in ranks}
        object.__setattr__(self, "_place", places)
        if any(way.sending for way in self.routes.values()) and [*map(len, self.cards)] < [*map(len, self.places)]:
            raise ValueError(f"cards={self.cards!r:.60}: expected one for each rank of {len(self.places)} places")

    def pair(self, src: int, dst: int) -> tuple[int, int] | None:
        """The two places of these ranks as their route has them; None where there is none between them."""
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
        """Those that a sum of a place's ranks takes, whether all of these are simulated or one for all."""
        own = self.cards[self._place[ranks[0]]] if self.cards else ()
        return [*ranks, *((ON_CARD, card) for card in dict.fromkeys(own) if len({*own}) > 1)]


Network = Link | Sequence[LinkLevel] | Mapping[tuple[int, int], Link] | PlaceNetwork
Bytes = float | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Sizes of messages, and the network that carries them.

    Arguments:
        network: one way for all pairs of ranks; levels, the innermost first, each a multiple of the one before; the
            way of each pair that sends; or places of a pipeline.
        activation_bytes: of the messages over each edge of the stage graph: one number, or one per edge, in the order
            of `schedule.stage_edges` (S - 1 in a chain).
        gradient_bytes: of those back over it, likewise; None: as many as of activations.
        index_factors: by action index, how many times those bytes a message has, as slices of unequal length; they
            begin again behind the last one. None: all are alike.
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
        """The way from rank `src` to rank `dst`; ValueError where there is none."""
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
        """Names of what a message from rank to rank occupies: its pair's link, and a side of each network card."""
        way = way or self.way(src, dst)
        cards = [(side, card) for side, card in (("out", way.sending), ("in", way.receiving)) if card is not None]
        return [(src, dst), *cards]

    def channels_of_sum(self, each: AllReduce, ranks: Iterable[int]) -> list[Hashable]:
        """Names of what a sum of these ranks occupies, and the weights that are gathered after it."""
        if each.ways is None:
            own = list(dict.fromkeys(ranks))
            cards = self.network.cards_of_sum(own) if isinstance(self.network, PlaceNetwork) else own
            return [(side, card) for card in cards for side in ("out", "in")]
        return list(dict.fromkeys(name for src, dst in each.ways for name in self.channels(src, dst)))


def wire_bytes(schedule: Schedule, links: Links, wires: Iterable[Wire]) -> dict[Wire, float]:
    """Bytes of each message over each wire of a schedule, before `index_factors`.

    A message for several consumers has as much as the largest of their edges: the tensors of one are among those of
    another, as in a model that hands everything on.
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
    """A way of messages of one size. Each of the channels, by number, carries one message at a time; `free_at` says
    when it is free [s]."""

    __slots__ = ("_channels", "_free_at", "blocks", "latency", "seconds")

    def __init__(
        self, seconds: float, latency: float, channels: Sequence[int], free_at: list[float], blocks: bool = False
    ) -> None:
        self.seconds, self.latency, self._channels, self._free_at = seconds, latency, channels, free_at
        self.blocks = blocks

    def slower(self, times: float) -> Transit:
        return Transit(self.seconds * times, self.latency * times, self._channels, self._free_at, self.blocks)

    def free_from(self, now: float) -> float:
        """The time at which all channels are free, at or after `now` [s]."""
        return max([now, *(self._free_at[channel] for channel in self._channels)])

    def carry(self, now: float) -> float:
        """Occupy the channels from the time at which all are free, at or after `now`; returns the arrival [s]."""
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
    """Seconds of a whole processor that an action got which ran from one moment to the other [s].

    >>> seconds_left([Taken(2.0, 6.0, 0.5)], 0.0, 4.0)
    3.0
    """
    beside = [each for each in taken if each.start < end and each.end > start]
    if not beside:
        return end - start
    moments = sorted({start, end, *(at for each in beside for at in each[:2] if start < at < end)})
    return sum(
        (b - a) * (1 - max((each.share for each in beside if each.start <= a and b <= each.end), default=0.0))
        for a, b in pairwise(moments)
    )


class Processor:
    """Shares that are taken of one rank's processor."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[Taken] = []

    def take(self, taken: Taken) -> None:
        self._taken.append(taken)

    def end(self, start: float, seconds: float) -> float:
        """When an action ends that starts then and takes so many seconds of a whole processor [s].

        It holds as long as nothing else is taken before it. Actions are asked about in the order in which they run.
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

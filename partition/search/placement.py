"""Devices and links of a configuration's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...schedules.timing.links import ON_CARD, AllReduce, Link, Links, PlaceNetwork
from ..memory import RankPlace
from ..profile import Profile
from ..stage_cost import Figures, StageDevices, StageSeconds, StageSums
from ..topology import NO_TRANSFER, Floats, Topology, TransferTime
from .simulated import SizesError
from .space import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices and links of stages.

    Arguments:
        positions: [S] place of each stage, 0 to P - 1.
        inward, outward: [S] links to the stage before, for gradients, and to the one after, with seconds a byte of
            whole messages, of which each of min(T, T') tensor ranks sends a share; none at the ends.
        on: [S] what the stages run on.
        limits: [P] memory of its smallest device [bytes].
        hosts: [P] of the slowest link of its devices to their hosts [bytes/s]; 0: none is known.
        cards: [P] by replica, of cards that devices share; none where each has its own.
    """

    positions: tuple[int, ...]
    inward: tuple[TransferTime, ...]
    outward: tuple[TransferTime, ...]
    on: StageDevices
    limits: tuple[float, ...]
    hosts: tuple[float, ...]
    cards: tuple[tuple[int, ...], ...] = ()

    def hop_seconds(self, before: Figures, after: Figures) -> Floats:
        """[S - 1] of a message between neighbouring stages, in the faster direction; of bytes before and after each."""
        out, back = (np.array([link.latency for link in links]) for links in (self.outward, self.inward))
        out, back = out + after * np.asarray(self.on.outward), back + before * np.asarray(self.on.inward)
        return np.asarray(np.minimum(out[:-1], back[1:]))

    def network(self, sums: StageSums, seconds: StageSeconds) -> Links:
        """Links and sums of a simulation with one rank a place; routes of several stages are alike."""
        routes: dict[tuple[int, int], Link] = {}
        for (a, b), out, back in zip(pairwise(self.positions), self.outward[:-1], self.inward[1:], strict=True):
            for pair, hop in (((a, b), out), ((b, a), back)):
                link = Link(
                    latency=hop.latency,
                    seconds_per_byte=hop.seconds_a_byte,
                    sending=ON_CARD if hop.on_card else None,
                    blocks=hop.sends != "beside",
                    meets=hop.sends == "rendezvous",
                    buffer=hop.buffer if hop.sends == "rendezvous" else 0.0,
                )
                if a != b and routes.get((min(pair), max(pair))) != link:
                    routes[pair if out != back else (min(pair), max(pair))] = link
        rounds = zip(
            seconds.ring.tolist(), seconds.gather.tolist(), (seconds.early + 0 * seconds.ring).tolist(), strict=True
        )
        return Links(
            network=PlaceNetwork(places=tuple((p,) for p in range(len(self.limits))), routes=routes, cards=self.cards),
            activation_bytes=sums.after[:-1].tolist(),
            sums=tuple(
                AllReduce(stage=s, seconds=ring, gather=gather, ways=None, unshards=seconds.gathers_ahead, early=early)
                for s, (ring, gather, early) in enumerate(rounds)
                if ring > 0 or gather > 0
            ),
        )


def placement_of(c: Configuration, topology: Topology, profile: Profile) -> Placement:
    """Devices and links of its stages; SizesError for replicas over which experts do not divide."""
    positions, ranks, sizes = c.positions, c.stage_ranks, c.tensors
    owns = [*zip(ranks, sizes, strict=True)]
    groups = [size // profile.context for size in sizes]  # that hold different weights
    holders = [(own[::t], t) for own, t in zip(ranks, groups, strict=True)]
    if any(count % profile.expert for count in c.counts):
        raise SizesError(f"{c.counts} replicas: expected multiples of expert={profile.expert}")
    pairs = [*pairwise(positions)]
    out = {pair: _message_time(topology, *(owns[p] for p in pair)) for pair in {*pairs}}
    back = out
    if topology.cluster.node_links:
        back = {(a, b): _message_time(topology, owns[b], owns[a]) for a, b in {*pairs}}
    inward, outward = (NO_TRANSFER, *(back[pair] for pair in pairs)), (*(out[pair] for pair in pairs), NO_TRANSFER)
    rings, speeds = [topology.ring(own, tensor=t) for own, t in holders], [*map(topology.speed, ranks)]
    exchanges = [topology.exchange(own, tensor=t) for own, t in holders]
    experts = [
        topology.ring([own[i] for i in range(len(own)) if i // profile.context % profile.expert == 0], tensor=t)
        for own, t in holders
        if profile.expert > 1
    ]
    cards = tuple(topology.cards(own[::size]) for own, size in owns) if topology.shares_cards else ()
    slices = len(c.lengths) or 1  # which have a mean part of a message's bytes
    shared = [[link.on_card for link in inward], [link.on_card for link in outward]]
    shared = [*shared, [len({*cards[p]}) > 1 for p in positions]] if cards else []
    return Placement(
        positions=positions,
        inward=inward,
        outward=outward,
        on=StageDevices(
            speed=tuple(speeds[p] for p in positions),
            inward=tuple(link.seconds_a_byte for link in inward),
            outward=tuple(link.seconds_a_byte for link in outward),
            shared=tuple(map(tuple, np.array(shared, dtype=np.float64).tolist())),
            message_overhead=tuple(a.busy + b.busy for a, b in zip(inward, outward, strict=True)),
            message_bytes=tuple(tuple(link.busy_a_byte / slices for link in each) for each in (inward, outward)),
            rings=tuple(rings[p] for p in positions),
            exchanges=tuple(exchanges[p] for p in positions),
            expert_rings=tuple(experts[p] for p in positions if experts),
            sum_busy=tuple(rings[p].busy_share for p in positions),
        ),
        limits=tuple(map(topology.memory, ranks)),
        hosts=tuple(map(topology.to_host, ranks)),
        cards=cards,
    )


def rank_place(c: Configuration, place: Placement, p: int, *, context_bytes: float) -> RankPlace:
    """A rank of place p, of whose memory so much goes to others than tensors."""
    return RankPlace(
        stages=tuple(stage for stage, at in enumerate(c.positions) if at == p),
        replicas=c.counts[p],
        tensor=c.message_tensor(p),
        limit=place.limits[p],
        streams=c.family.rule.is_asynchronous,
        context_bytes=context_bytes,
        num_messages=c.num_messages(p),
        is_whole=not (c.lengths or (c.own.split_stages if c.own else c.family.splits_backward)),
    )


def _message_time(topology: Topology, src: tuple[Sequence[int], int], dst: tuple[Sequence[int], int]) -> TransferTime:
    """The time of messages from place to place, as (ranks, tensor size) each, of which each of the fewer tensor ranks
    sends a share."""
    if src == dst:
        return NO_TRANSFER  # a rank sends itself nothing
    fewest = min(src[1], dst[1])
    ends = (
        own if size == fewest else [r for at, r in enumerate(own) if at % size < fewest] for own, size in (src, dst)
    )
    message = topology.between(*ends, tensor=fewest)
    own = {name: getattr(message, name) / fewest for name in ("seconds_a_byte", "busy_a_byte")}
    return replace(message, buffer=message.buffer * fewest, **own)

"""Paces of the ranks and stages of a configuration with its cuts, and the least step that follows from them.

A rank has the two lanes of a stage (`stage_cost`), its work and its links, each the sum over its stages at the share of
its busiest replica. `bounds` says what is known before a configuration is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ...schedules.families.registry import family
from ...schedules.timing.costs import Ties
from ..profile import Profile
from ..stage_cost import Placement, StageSeconds, busiest_share, pace
from ..topology import NO_TRANSFER, Floats, Topology, TransferTime
from .simulated import SizesError
from .space import Configuration


def _by_rank(c: Configuration, figures: Floats) -> Floats:
    """[P] sums over the chunks."""
    return np.asarray(np.bincount(c.positions, weights=figures, minlength=c.pipeline), dtype=np.float64)


def _share(c: Configuration) -> Floats:
    """[P] of the busiest replica."""
    return busiest_share(c.num_microbatches, np.array(c.counts))


def _updates(c: Configuration) -> Floats:
    """[P] sums of gradients a microbatch: once a batch, or once each replica of every stage has had a microbatch."""
    if c.num_microbatches is None:
        return np.asarray(1 / np.array(c.counts))
    once = family(c.schedule).rule.updates_per_batch(c.batch, c.counts)
    return np.full(c.pipeline, once / c.batch)


def _work(c: Configuration, s: StageSeconds) -> Floats:
    """[P] seconds a microbatch of a rank's compute lane."""
    return _by_rank(c, s.work) * _share(c) + _held(c, s)


def _held(c: Configuration, s: StageSeconds) -> Floats:
    """[P] of those, for which it does not compute but is busy with its sums."""
    return _by_rank(c, s.held) * _updates(c)


def _links(c: Configuration, s: StageSeconds) -> Floats:
    """[P] seconds a microbatch of its links: all that its busiest replica sends, and its all-reduces of gradients."""
    return _by_rank(c, s.sending) * _share(c) + _by_rank(c, s.around) * _updates(c)


def _updates_behind(c: Configuration, s: StageSeconds, *, around: Floats) -> Floats:
    """[P] seconds from a rank's last backward to the end of its updates, at least.

    All its steps, and the sums of the one stage whose backward was last: those of others may have gone on beside it.

    Arguments:
        around: [S] what goes round for an update, or the part of it that is not counted to the rank's work.
    """
    least = np.full(c.pipeline, np.inf)
    np.minimum.at(least, list(c.positions), around + s.step)
    return np.asarray(np.maximum(_by_rank(c, s.step), least), dtype=np.float64)


def rank_paces(c: Configuration, s: StageSeconds) -> Floats:
    """[P] seconds a microbatch of the slower lane of each rank."""
    return pace(work=_work(c, s), links=_links(c, s))


def stage_paces(c: Configuration, s: StageSeconds) -> Floats:
    """[S] seconds a microbatch of the slower lane of each stage alone."""
    share, updates = (each[list(c.positions)] for each in (_share(c), _updates(c)))
    return pace(work=s.work * share + s.held * updates, links=s.sending * share + s.around * updates)


def least_step(c: Configuration, s: StageSeconds, tied: Ties, again: Floats | float = 0.0) -> float:
    """A lower bound of the step [s]; `again`: [P] further seconds of F and B a microbatch, whichever stage's they are.

    Of a flushed batch: the first microbatch must reach a rank, the rank does its work, and the last gradient must get
    back to each rank in front, which updates behind it, the first one behind sums of weights that its first stage
    shares, too. What keeps a rank busy with sums is a part of its own work, whenever it comes, and no part of that way
    back. Where the backward is split, what comes behind may be weight gradients, and the way back takes no time that is
    known.
    """
    work, held = (_work(c, s) + again * _share(c)) * c.batch, _held(c, s) * c.batch
    links = float(_links(c, s).max()) * c.batch
    if family(c.schedule).rule.is_asynchronous:
        return max(float((work + _by_rank(c, s.step) * _updates(c) * c.batch).max()), links)
    update = _updates_behind(c, s, around=s.around - s.held)
    front, around = c.pipeline - 1, s.overhead + s.message_overhead
    part = c.least_slice  # of what must be through on the way to a rank, and back
    head, tail = (
        np.concatenate([[0.0], np.cumsum(part * (own + s.message[:front]) + around[:front])])
        for own in (s.forward[:front], s.backward[:front])
    )
    if family(c.schedule).splits_backward:
        return max(float((head + work + update).max()), links)
    shared = max((seconds + float(s.step[0]) for (first, *_), seconds in tied if first == 0), default=0.0)
    behind = _updates_behind(c, s, around=s.around) - tail
    back = work - held + tail + np.maximum.accumulate([max(behind[0], shared), *behind[1:]])
    return max(float((head + np.maximum(work + update, back)).max()), links)


def place(c: Configuration, topology: Topology, profile: Profile) -> Placement:
    """Devices and links of its stages; SizesError for replicas over which experts do not divide."""
    positions, ranks, sizes = c.positions, c.stage_ranks, c.tensors
    owns = [*zip(ranks, sizes, strict=True)]
    groups = [size // profile.context for size in sizes]  # that hold different weights
    holders = [(own[::t], t) for own, t in zip(ranks, groups, strict=True)]
    if any(len(own) % profile.expert for own, _ in holders):
        raise SizesError(f"{c.counts} replicas: expected multiples of expert={profile.expert} with context")
    pairs = [*pairwise(positions)]
    out = {pair: _way(topology, *(owns[p] for p in pair)) for pair in {*pairs}}
    back = out
    if topology.cluster.ways:
        back = {(a, b): _way(topology, owns[b], owns[a]) for a, b in {*pairs}}
    return Placement(
        inward=(NO_TRANSFER, *(back[pair] for pair in pairs)),
        outward=(*(out[pair] for pair in pairs), NO_TRANSFER),
        rings=tuple(topology.ring(own, tensor=t) for own, t in holders),
        exchanges=tuple(topology.exchange(own, tensor=t) for own, t in holders),
        expert_rings=tuple(topology.ring(own[:: profile.expert], tensor=t) for own, t in holders)
        if profile.expert > 1
        else (),
        cards=tuple(topology.cards(own[::size]) for own, size in owns) if topology.shares_cards else (),
        speeds=tuple(map(topology.speed, ranks)),
        limits=tuple(map(topology.memory, ranks)),
        hosts=tuple(map(topology.to_host, ranks)),
    )


def _way(topology: Topology, src: tuple[Sequence[int], int], dst: tuple[Sequence[int], int]) -> TransferTime:
    """The time of messages from place to place, as (ranks, tensor size) each, of which each of the fewer tensor ranks
    sends a share."""
    if src == dst:
        return NO_TRANSFER  # a rank sends itself nothing
    fewest = min(src[1], dst[1])
    ends = (
        own if size == fewest else [r for at, r in enumerate(own) if at % size < fewest] for own, size in (src, dst)
    )
    way = topology.between(*ends, tensor=fewest)
    return replace(way, seconds_a_byte=way.seconds_a_byte / fewest)

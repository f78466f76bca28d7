"""Lower bounds of a step: seconds that no cuts of a configuration can save, and, once it is cut, no order of its work.

With P ranks, m microbatches of the busiest replica, work(r) the F + B of one on rank r, and W the sum of all work.

Before it is cut: a microbatch passes r stages before rank r begins, and its gradient passes them after rank r ends:

    T >= head(r) + m work(r)          head(r): least F + B of the nodes of r stages, and the runtime's seconds there

In the mean over all ranks, m work(r) is m W / P for any cuts. Updates that overlap with nothing are added to work: with
one stage per rank the optimizer's steps and the sums of gradients; with several the steps, and of the sums only the
share that keeps the rank busy, since sums of the last stages overlap with backwards of the first. Where backwards are
split, weight gradients may fill the way back, so head(r) counts F alone. Nodes are whole, so some rank has more than
the mean: of any k P + 1 nodes k + 1 are on one rank (`_most_on_a_rank`).

With whole backwards, stages of unequal work don't help either. With u(s) the F + B of stage s, for each of S stages:

    T >= u(0) + .. + u(s-1) + m (u(s) + those of its rank after s),        u(0) + .. + u(S-1) = W

since neither s nor a later stage of its rank begins before a microbatch has passed the stages before s, and its
gradient must pass them again. The least T for which some u meets all S conditions is W times `_passes`, in O(S): with
one stage per rank W / (1 - (1 - 1/m)^P), where each rank has 1 - 1/m of the work of the rank before.

Once it is cut, the pace of a rank is that of the slower of its two lanes (`stage_cost`), work and links, each the sum
over its stages at the share of the busiest replica; `least_step` is the bound that follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...schedules.families.registry import family
from ...schedules.timing.costs import Ties
from ..profile import Profile
from ..stage_cost import StageSeconds, busiest_share, runtime_seconds, update_seconds
from ..topology import Floats, Topology
from .model import Model
from .space import Configuration

_UPDATED = ("update_seconds", "parameter_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastOfNodes:
    """Least figures of a model's nodes in any cuts.

    Arguments:
        sizes: [n] nodes in each cut, ascending.
        forward, both: [n] the least F, and F + B, of any cut with as many nodes as that or more [s].
        seconds: of each node, F + B.
        update, parameters: of each node, seconds of its update, and bytes; what several share is updated once, and has
            no bytes.
    """

    sizes: Floats
    forward: Floats
    both: Floats
    seconds: Floats
    update: Floats
    parameters: Floats


class LeastSeconds:
    """Lower bounds of the seconds of a batch, by configuration, on devices that are all as fast as the fastest."""

    def __init__(self, topology: Topology, *, norm: float | None = None) -> None:
        self.topology, self.norm = topology, norm or 0.0
        self._fast = topology.with_fast_cards()
        self._least_busy = min(link.busy for link in topology.links)
        self._nodes: dict[int, tuple[Model, LeastOfNodes]] = {}
        self._rings: dict[object, tuple[float, float]] = {}  # seconds a byte
        self._known_passes: dict[object, float] = {}
        self._known_works: dict[object, float] = {}

    def of_configuration(self, c: Configuration, model: Model) -> float:
        """No cuts of this configuration, recomputed or not, take fewer seconds a batch [s]."""
        return self._of_actions(c, model) + self.outside_pipeline(c.schedule, model)

    def _of_actions(self, c: Configuration, model: Model) -> float:
        """Seconds of a batch without what the runtime takes around the step [s]."""
        m, known, around = -(-c.batch // c.data), c.family, runtime_seconds(model.profile.action_seconds)
        hops = sum(a != b for a, b in pairwise(c.positions)) if self._least_busy else 0
        messages = m * runtime_seconds(0.0, 2 * hops * self._least_busy)  # both ends of a hop
        own = m * c.num_chunks * around  # of F and B of a rank's stages
        # All of V and the schedule that counts: most numbers of chunks have the same bound.
        kind = (known.rule.is_asynchronous, known.splits_backward, c.num_chunks == 1, own, messages, c.least_slice)
        key = (id(model), c.pipeline, c.data, c.tensor, m, kind, c.by_replica, c.ranks)
        if key not in self._known_works:
            self._known_works[key] = self._of_work(c, model, own=own, messages=messages)
        least = self._known_works[key]
        if known.rule.is_asynchronous or known.splits_backward:
            return least
        part = c.least_slice  # of a microbatch goes ahead of the rest
        passes = part * self._passes(c, m / part)
        return max(least, float(passes * (model.seconds / self.topology.fastest + c.num_stages * around)))

    def _of_work(self, c: Configuration, model: Model, *, own: float, messages: float) -> float:
        """The mean over the ranks, with updates and without [s], besides seconds of the runtime and of messages."""
        nodes, m, speed = self._nodes_of(model), -(-c.batch // c.data), self.topology.fastest
        around = runtime_seconds(model.profile.action_seconds)
        total = m * model.seconds / speed + messages
        stages, of_nodes = np.arange(c.pipeline), m * nodes.seconds / speed
        if c.family.rule.is_asynchronous:
            return max(total / c.pipeline, _most_on_a_rank(of_nodes, c.pipeline)) + own
        head = np.searchsorted(nodes.sizes, stages)
        speed_ahead = speed / c.least_slice
        there = own + nodes.forward[head] / speed_ahead + stages * around / 2
        is_split = c.family.splits_backward
        both = there if is_split else own + nodes.both[head] / speed_ahead + stages * around
        least = (total + float(both.sum())) / c.pipeline
        rounds, holders = self._rounds(c, model.profile), c.data * model.profile.context
        if c.num_stages == 1:  # it has shared weights once
            whole = model.stages((0, len(model.cuts) - 1))
            return max(
                least, total + float(_least_updates(whole.update / speed, whole.weights, holders, rounds)[0] + there[0])
            )
        updates = _least_updates(nodes.update / speed, nodes.parameters, holders, rounds)
        fullest = _most_on_a_rank(of_nodes + updates[: len(of_nodes)], c.pipeline) + float(there[0])
        return max(least, fullest, (total + float(updates.sum()) + float(there.sum())) / c.pipeline)

    def of_schedule(self, schedule: str, model: Model, num_microbatches: int) -> float:
        """No number of stages or replicas, equal or not, takes fewer seconds a batch, one stage a rank [s].

        A stage of F + B u after h seconds of others has m u / (T - h) replicas or more. Where its weights leave room
        for no more than u = d, these are at least m times the integral of 1 / (T - max(0, h - d)) over all work.
        """
        devices, known, seconds = self.topology.num_devices, family(schedule), model.seconds / self.topology.fastest
        least, outside = num_microbatches * seconds / devices, self.outside_pipeline(schedule, model)
        if known.rule.is_asynchronous or known.splits_backward or seconds <= 0:
            return least + outside
        most = self._most_work(model) / self.topology.fastest
        low = max(seconds, least)  # through all stages and back
        high = 2 * (low + least)
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            needed = most / middle + math.log(middle / (middle - seconds + most))
            low, high = (middle, high) if num_microbatches * needed > devices else (low, middle)
        return low + outside

    def _most_work(self, model: Model) -> float:
        """F + B of any stage whose weights fit a device, at most [s]."""
        if self.topology.largest_memory == math.inf:
            return model.seconds
        first, last = np.nonzero(model.cuts.inside)
        copies = min(map(model.rules.least_copies, (1, math.inf)))  # of any number of replicas
        fits = model.cuts.weights(first, last) * copies <= self.topology.largest_memory
        return float((model.cuts.seconds[last] - model.cuts.seconds[first])[fits].max(initial=0.0))

    def outside_pipeline(self, schedule: str, model: Model) -> float:
        return model.profile.around_seconds + (0.0 if family(schedule).rule.is_asynchronous else self.norm)

    def weights_of_a_rank(self, c: Configuration, model: Model) -> float:
        """Bytes of parameters that the fullest rank has, at least."""
        return float(model.cuts.weights(0, len(model.cuts) - 1)) / c.pipeline

    def _passes(self, c: Configuration, m: float) -> float:
        key = (c.schedule, c.pipeline, c.num_chunks, m)
        if key not in self._known_passes:
            self._known_passes[key] = _passes(c.positions, c.pipeline, m)
        return self._known_passes[key]

    def _nodes_of(self, model: Model) -> LeastOfNodes:
        if id(model) not in self._nodes:
            self._nodes[id(model)] = model, least_of_nodes(model)
        return self._nodes[id(model)][1]

    def _rounds(self, c: Configuration, profile: Profile) -> tuple[float, float]:
        """Seconds a byte of weights of sums over D ranks, and of an exchange of gradients and one of weights after it,
        in the best of the places that the stages have; of several chunks those that keep a rank busy.
        0 for both where experts' weights are summed over fewer ranks."""
        is_one, gradients = c.num_chunks == 1, 0.0 if profile.sums_early else profile.gradient_ratio
        weights = 0.0 if profile.gathers_ahead else profile.gather_ratio
        context = profile.context  # members of a tensor group that hold the same weights
        stride, own = c.tensor // context, c.pipeline if c.by_replica else c.ranks
        key = (c.data, c.tensor, is_one, gradients, weights, context, own)
        if profile.expert > 1:
            return 0.0, 0.0
        if key not in self._rings:
            in_a_row = self._fast.groups(c.data * context, stride=stride) if own is None else ()
            groups: Sequence[Sequence[int]] = in_a_row or [ranks[::stride] for ranks in c.stage_ranks]
            whole, parts = (
                times * min(link.seconds_a_byte * (1.0 if is_one else link.busy_share) for link in map(find, groups))
                for times, find in ((gradients, self._fast.ring), (gradients + weights, self._fast.exchange))
            )
            self._rings[key] = whole, parts
        return self._rings[key]


def _least_updates(update: Floats, parameters: Floats, data: int, rounds: tuple[float, float]) -> Floats:
    """Seconds of updates and what goes round for them, whether they are divided or not, elementwise."""
    whole, parts = (parameters * each for each in rounds)
    undivided, divided = (
        sum(update_seconds(update, whole=whole, parts=parts, gather=0.0, shards=shards)) for shards in (1, data)
    )
    return np.minimum(undivided, divided)


def _most_on_a_rank(nodes: Floats, num_ranks: int) -> float:
    """The most that one of the ranks has of these nodes, at least.

    >>> float(_most_on_a_rank(np.array([2.0, 2.0, 2.0, 1.0]), 3))
    3.0
    """
    sums = np.cumsum([0.0, *-np.sort(-nodes)])
    k = np.arange((len(nodes) - 1) // num_ranks + 1)
    return float((sums[k * num_ranks + 1] - sums[k * num_ranks - k]).max())


def _passes(positions: Sequence[int], num_ranks: int, num_microbatches: float) -> float:
    """Times that F + B of a microbatch go into the least seconds of a batch, for any division into stages.

    By duality: weights y(s) >= 0 of the S conditions that add up to 1, with which each u(j) counts T / W times or more.
    From the first stage on, each gets the least weight with which its u counts as often as u(0).

    Arguments:
        positions: [S] rank of each stage.

    >>> round(_passes([0, 1], 2, 2), 9), round(_passes([0, 1, 0, 1], 2, 2), 9)  # 1 / (1 - 1/4)
    (1.333333333, 1.142857143)
    """
    if num_microbatches == 1:
        return 1.0
    total, of_rank = 0.0, [0.0] * num_ranks  # in units of y(0) (m - 1)
    for rank in positions:
        weight = max(0.0, (1 + total - num_microbatches * of_rank[rank]) / (num_microbatches - 1))
        total += weight
        of_rank[rank] += weight
    return 1 + 1 / total


def least_of_nodes(model: Model) -> LeastOfNodes:
    update, parameters = (np.array([getattr(node, figure) for node in model.profile.nodes]) for figure in _UPDATED)
    for (nodes, shared), updates in zip(model.cuts.tied, model.cuts.shared_update, strict=True):
        parameters[list(nodes)] -= shared
        update[list(nodes)] -= updates
    once = [min(updates) for updates in model.cuts.shared_update]
    sizes = model.cuts.members.sum(axis=1)
    forward, both = (np.minimum.accumulate(column[::-1])[::-1] for column in (model.cuts.forward, model.cuts.seconds))
    return LeastOfNodes(
        sizes=sizes,
        forward=forward,
        both=both,
        seconds=np.array([node.seconds for node in model.profile.nodes]),
        update=np.array([*np.maximum(update, 0.0), *once]),
        parameters=np.array([*np.maximum(parameters, 0.0), *(0.0 for _ in once)]),
    )


def _sum_by_rank(c: Configuration, figures: Floats) -> Floats:
    return np.asarray(np.bincount(c.positions, weights=figures, minlength=c.pipeline), dtype=np.float64)


def _share(c: Configuration) -> Floats:
    """[P] part of a batch that the busiest replica runs."""
    return busiest_share(c.num_microbatches, np.array(c.counts))


def _updates_per_microbatch(c: Configuration) -> Floats:
    """[P] sums of gradients a microbatch: once a batch, or once each replica of every stage has had a microbatch."""
    if c.num_microbatches is None:
        return np.asarray(1 / np.array(c.counts))
    once = c.family.rule.updates_per_batch(c.batch, c.counts)
    return np.full(c.pipeline, once / c.batch)


def _lanes(c: Configuration, s: StageSeconds) -> tuple[Floats, Floats, Floats]:
    """[S] seconds a microbatch of the stages' compute lanes, of their own links, and of cards that devices share (all
    that the busiest replica sends there, and the collectives)."""
    share, updates = (each[list(c.positions)] for each in (_share(c), _updates_per_microbatch(c)))
    rounds = s.collectives * updates
    own, shared = s.sending * share + rounds, s.sending_shared * share + rounds * s.sums_shared
    return s.work * share + rounds * s.sum_busy, own, shared


def _updates_after_backward(c: Configuration, s: StageSeconds, *, collectives: Floats) -> Floats:
    """[P] seconds from a rank's last backward to the end of its updates, at least.

    All its steps, and the sums of the one stage whose backward was last: those of others may have overlapped with it.

    Arguments:
        collectives: [S] what goes round for an update, or the part of it that is not counted to the rank's work.
    """
    least = np.full(c.pipeline, np.inf)
    np.minimum.at(least, list(c.positions), collectives + s.step)
    return np.asarray(np.maximum(_sum_by_rank(c, s.step), least), dtype=np.float64)


def rank_paces(c: Configuration, s: StageSeconds) -> Floats:
    """[P] seconds a microbatch of the slower lane of each rank."""
    return np.asarray(np.max([_sum_by_rank(c, lane) for lane in _lanes(c, s)], axis=0))


def stage_paces(c: Configuration, s: StageSeconds) -> Floats:
    """[S] seconds a microbatch of the slower lane of each stage alone."""
    return np.asarray(np.max(_lanes(c, s), axis=0))


def least_step(c: Configuration, s: StageSeconds, hops: Floats, tied: Ties, again: Floats | float = 0.0) -> float:
    """A lower bound of the step [s]; `hops`: [S - 1] seconds of a message between neighbouring stages; `again`: [P]
    further seconds of F and B a microbatch, whichever stage's they are.

    Of a flushed batch: the first microbatch must reach a rank, the rank does its work, and the last gradient must get
    back to each rank before, which updates after it, the first one after sums of weights that its first stage
    shares, too. What keeps a rank busy with sums is a part of its own work, whenever it comes, and no part of that way
    back; with weights that are gathered ahead it may be busy on the way there. Where the backward is split, what comes
    after may be weight gradients, and the way back takes no time that is known.
    """
    work, *lanes = (_sum_by_rank(c, lane) * c.batch for lane in _lanes(c, s))
    work, updates = work + again * _share(c) * c.batch, _updates_per_microbatch(c) * c.batch
    if c.family.rule.is_asynchronous:
        return float(np.max([work + _sum_by_rank(c, s.step) * updates, *lanes]))
    busy, ahead = (_sum_by_rank(c, each * s.sum_busy) * updates for each in (s.collectives, s.collectives - s.after))
    update = _updates_after_backward(c, s, collectives=s.after - s.after * s.sum_busy) - ahead
    front, around = c.pipeline - 1, s.overhead + s.message_overhead
    part = c.least_slice  # of what must be through on the way to a rank, and back
    head, tail = (
        np.concatenate([[0.0], np.cumsum(part * (own + hops[:front]) + around[:front])])
        for own in (s.forward[:front], s.backward[:front])
    )
    if c.family.splits_backward:
        return float(np.max([head + work + update, work, *lanes]))
    shared = max((seconds + float(s.step[0]) for (first, *_), seconds in tied if first == 0), default=0.0)
    behind = _updates_after_backward(c, s, collectives=s.after) - tail
    back = work - busy + tail + np.maximum.accumulate([max(behind[0], shared), *behind[1:]])
    return float(np.max([head + np.maximum(work + update, back), work, *lanes]))

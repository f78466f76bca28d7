"""Seconds that no cuts of a configuration can save: what is known of it before it is cut.

Rank r waits for the first r stages, on the way there and on the way back, and in between it has m microbatches of the
nodes that it runs (one stage or V of them):

    T >= head(r) + m work(r)          head(r): F + B of the nodes that r stages hold at least, and the runtime's own

Over all ranks that is a mean. The same with the updates behind the work, where nothing of them can run beside it: with
one stage a rank the sums of gradients as well, with several the optimizer's steps, and of sums the share for which they
keep the rank busy, since those of the last stages go beside backwards of the first. Where backwards are split, what
comes behind may be weight gradients, and the way back counts nothing. Nodes are whole, so some rank has more than the
mean: of any k P + 1 nodes k + 1 are on one (`_fullest`).

With whole backwards, no stage saves by being small what others gain by it. Of stage s and those behind it on its rank,
none begins before a microbatch has come through the stages in front, and its gradient must go back through them:

    T >= u(0) + .. + u(s-1) + m (u(s) + those of its rank behind)          u(s): F + B of stage s, W = sum of all

The least T under which all S of these hold for some u is a multiple of W, `_passes`: with one stage a rank
W / (1 - (1 - 1/m)^P), where each rank has 1 - 1/m of the work of the rank in front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...schedules.families.registry import family
from ..topology import Floats, Topology
from .model import Model
from .space import Configuration

_UPDATED = ("update_seconds", "parameter_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
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
        self._nodes: dict[int, tuple[Model, _Nodes]] = {}
        self._rings: dict[tuple[int, int, bool], tuple[float, float]] = {}  # seconds a byte
        self._known_passes: dict[object, float] = {}
        self._known_works: dict[object, float] = {}

    def of(self, c: Configuration, model: Model) -> float:
        """No cuts of this configuration, recomputed or not, take fewer seconds a batch [s]."""
        return self._of_actions(c, model) + self.beside(c.schedule, model)

    def _of_actions(self, c: Configuration, model: Model) -> float:
        """Seconds of a batch without what the runtime takes around the step [s]."""
        m, known, around = c.batch // c.data, family(c.schedule), 2 * model.profile.action_seconds
        messages = 4 * m * self._least_busy * (sum(a != b for a, b in pairwise(c.positions)) if self._least_busy else 0)
        own = m * c.num_chunks * around  # of F and B of a rank's stages
        # All of V and the schedule that counts: most numbers of chunks have the same bound.
        kind = (known.rule.is_asynchronous, known.splits_backward, c.num_chunks == 1, own, messages, c.least_slice)
        key = (id(model), c.pipeline, c.data, c.tensor, m, kind)
        if key not in self._known_works:
            self._known_works[key] = self._of_work(c, model, own=own, messages=messages)
        least = self._known_works[key]
        if known.rule.is_asynchronous or known.splits_backward:
            return least
        part = c.least_slice  # of a microbatch goes ahead of the rest
        passes = part * self._passes(c, m / part)
        return max(least, passes * (model.seconds / self.topology.fastest + c.num_stages * around))

    def _of_work(self, c: Configuration, model: Model, *, own: float, messages: float) -> float:
        """The mean over the ranks, with updates and without [s], beside seconds of the runtime and of messages."""
        nodes, m, speed = self._nodes_of(model), c.batch // c.data, self.topology.fastest
        around = 2 * model.profile.action_seconds
        total = m * model.seconds / speed + messages
        stages, of_nodes = np.arange(c.pipeline), m * nodes.seconds / speed
        if family(c.schedule).rule.is_asynchronous:
            return max(total / c.pipeline, _fullest(of_nodes, c.pipeline)) + own
        head = np.searchsorted(nodes.sizes, stages)
        speed_ahead = speed / c.least_slice
        there = own + nodes.forward[head] / speed_ahead + stages * around / 2
        is_split = family(c.schedule).splits_backward
        both = there if is_split else own + nodes.both[head] / speed_ahead + stages * around
        least = (total + float(both.sum())) / c.pipeline
        rounds = self._rounds(c)
        if c.num_stages == 1:  # it has shared weights once
            whole = model.stages((0, len(model.cuts) - 1))
            return max(
                least, total + float(_updates(whole.update / speed, whole.weights, c.data, rounds)[0] + there[0])
            )
        updates = _updates(nodes.update / speed, nodes.parameters, c.data, rounds)
        fullest = _fullest(of_nodes + updates[: len(of_nodes)], c.pipeline) + float(there[0])
        return max(least, fullest, (total + float(updates.sum()) + float(there.sum())) / c.pipeline)

    def of_any(self, schedule: str, model: Model, num_microbatches: int) -> float:
        """No number of stages or replicas, equal or not, takes fewer seconds a batch, one stage a rank [s].

        A stage of F + B u behind h seconds of others has m u / (T - h) replicas or more. Where its weights leave room
        for no more than u = d, these are at least m times the integral of 1 / (T - max(0, h - d)) over all work.
        """
        devices, known, seconds = self.topology.num_devices, family(schedule), model.seconds / self.topology.fastest
        least, beside = num_microbatches * seconds / devices, self.beside(schedule, model)
        if known.rule.is_asynchronous or known.splits_backward or seconds <= 0:
            return least + beside
        most = self._most_work(model) / self.topology.fastest
        low = max(seconds, least)  # through all stages and back
        high = 2 * (low + least)
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            needed = most / middle + math.log(middle / (middle - seconds + most))
            low, high = (middle, high) if num_microbatches * needed > devices else (low, middle)
        return low + beside

    def _most_work(self, model: Model) -> float:
        """F + B of any stage whose weights fit a device, at most [s]."""
        if self.topology.largest_memory == math.inf:
            return model.seconds
        rules, (first, last) = model.rules, np.nonzero(model.cuts.inside)
        copies = 2 + min(rules.optimizer_ratio, 1.0 if "full" in rules.sharding else math.inf)
        fits = model.cuts.weights(first, last) * copies <= self.topology.largest_memory
        return float((model.cuts.seconds[last] - model.cuts.seconds[first])[fits].max(initial=0.0))

    def beside(self, schedule: str, model: Model) -> float:
        return model.profile.around_seconds + (0.0 if family(schedule).rule.is_asynchronous else self.norm)

    def weights_of_a_rank(self, c: Configuration, model: Model) -> float:
        """Bytes of parameters that the fullest rank has, at least."""
        return float(model.cuts.weights(0, len(model.cuts) - 1)) / c.pipeline

    def _passes(self, c: Configuration, m: float) -> float:
        key = (c.schedule, c.pipeline, c.num_chunks, m)
        if key not in self._known_passes:
            self._known_passes[key] = _passes(c.positions, c.pipeline, m)
        return self._known_passes[key]

    def _nodes_of(self, model: Model) -> _Nodes:
        if id(model) not in self._nodes:
            self._nodes[id(model)] = model, _nodes(model)
        return self._nodes[id(model)][1]

    def _rounds(self, c: Configuration) -> tuple[float, float]:
        """Seconds a byte of sums over D ranks, and of an exchange of gradients and one of weights, in the best of the
        places that stages of D T ranks may have; of several chunks those that keep a rank busy."""
        is_one = c.num_chunks == 1
        key = (c.data, c.tensor, is_one)
        if key not in self._rings:
            groups = self._fast.groups(c.data, stride=c.tensor)
            found = (
                [(1, self._fast.ring(group)) for group in groups],
                [(2, self._fast.exchange(group)) for group in groups],
            )
            whole, parts = (
                min(times * way.seconds_a_byte * (1.0 if is_one else way.busy_share) for times, way in each)
                for each in found
            )
            self._rings[key] = whole, parts
        return self._rings[key]


def _updates(update: Floats, parameters: Floats, data: int, rounds: tuple[float, float]) -> Floats:
    """Seconds of updates and what goes round for them, whether they are divided or not, elementwise."""
    whole, parts = rounds
    return np.asarray(np.minimum(update + parameters * whole, update / data + parameters * parts), dtype=np.float64)


def _fullest(nodes: Floats, num_ranks: int) -> float:
    """The most that one of the ranks has of these nodes, at least.

    >>> float(_fullest(np.array([2.0, 2.0, 2.0, 1.0]), 3))
    3.0
    """
    sums = np.cumsum([0.0, *-np.sort(-nodes)])
    k = np.arange((len(nodes) - 1) // num_ranks + 1)
    return float((sums[k * num_ranks + 1] - sums[k * num_ranks - k]).max())


def _passes(positions: Sequence[int], num_ranks: int, num_microbatches: float) -> float:
    """Times that F + B of a microbatch go into the least seconds of a batch, whatever part of them each stage has.

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


def _nodes(model: Model) -> _Nodes:
    update, parameters = (np.array([getattr(node, figure) for node in model.profile.nodes]) for figure in _UPDATED)
    for (nodes, shared), updates in zip(model.cuts.tied, model.cuts.shared_update, strict=True):
        parameters[list(nodes)] -= shared
        update[list(nodes)] -= updates
    once = [min(updates) for updates in model.cuts.shared_update]
    sizes = model.cuts.members.sum(axis=1)
    forward, both = (np.minimum.accumulate(column[::-1])[::-1] for column in (model.cuts.forward, model.cuts.seconds))
    return _Nodes(
        sizes=sizes,
        forward=forward,
        both=both,
        seconds=np.array([node.seconds for node in model.profile.nodes]),
        update=np.array([*np.maximum(update, 0.0), *once]),
        parameters=np.array([*np.maximum(parameters, 0.0), *(0.0 for _ in once)]),
    )

"""Layouts of stages in a row on few devices, each stage with any number of replicas, by a lower bound of their step.

Cuts i < j, replicas r and devices e (from the stage to the end of the row) as in `solve.dynamic`, but for the whole
step of M microbatches in place of the bottleneck. With F(i), B(i) the seconds of all nodes before cut i, the step takes
at least the greatest, over all stages, of three layers:

    0   M (F + B) of the busiest replica, or M times its messages and its share of the sums
    1   F(i) + a message over each cut up to i + work + the stage's sums and update
    2   F(i) + two messages over each cut up to i + work + B(i) + the greatest u(k) of this stage and those before it
        u(k) = sums and update of stage k - B(its first cut) - a message over each cut up to there, or 0 if that is more

In layer 2 the last gradient returns to stage k, which updates then. Work is that of the busiest replica, or what is
left of it after its first gradient, which has been to the last stage and back, or as many such ways as its microbatches
in flight allow.

    rest[e, layer, i] = least over j, r of max{ stage(i, j, r, e), rest[e - r, layer, j] } + messages over cut i

Each layer is minimised alone, so that `rest` is at most what any row after a cut takes: best-first search over first
parts of rows (`UnevenLayouts.in_order_of_bound`) yields rows in the order of their bounds. O(n^2 D^2) for n cuts and D
devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import combinations, count, pairwise, product
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..memory import weight_copies
from ..solve.cut_sums import thinned
from ..solve.dynamic import DeviceRow, RangeCosts
from ..solve.orders import device_orders, level_orders, node_orders, own_ranks
from ..topology import Floats, Indices, Topology
from .cuts import range_costs
from .evaluate import Candidate, Ends
from .model import Model
from .space import Configuration

MOST_DEVICES = 32
MOST_ORDERS = 35  # of devices, up to which each is looked at
MOST_IN_LEVELS = 16  # devices, up to which those along each level are
MOST_ACTIONS = 10_000  # of a batch; in longer ones the bottleneck is nearly all
_MOST_CUTS = 32
_MAX_EXPANDED = 4_000  # first parts of rows
_SHIFTS = (-2, -1, 1, 2)

Layout = tuple[float, Configuration, Ends]  # with least seconds of its step [s]
_Row = tuple[int, ...]  # of each stage its first device, and the one after its last
_CutsAndRow = tuple[tuple[int, ...], _Row]  # with its cuts


def uneven_layouts(topology: Topology, model: Model, outside: float, **sizes: Any) -> list[UnevenLayouts]:
    """Searches for layouts whose stages differ in their numbers of devices: one for each order of the devices in a row
    (of many devices, for each order along the levels of the topology), and one for the order of nodes. Empty for more
    than `MOST_DEVICES`, or batches whose schedules have more than `MOST_ACTIONS`.

    Arguments:
        outside: time of a step that no layout hides [s].
        sizes: fields of `Configuration` that are given.
    """
    sample, most = Configuration(pipeline=1, data=1, tensor=1, num_chunks=1, **sizes), topology.num_devices
    if most > MOST_DEVICES or 2 * sample.batch * most > MOST_ACTIONS:
        return []
    cluster, limit = topology.cluster, topology.memory_limit

    def costs_of(devices: Cluster | DeviceRow) -> RangeCosts:
        return range_costs(model, devices, sample.schedule, sample.batch, limit)

    orders = all_orders = device_orders(cluster, MOST_ORDERS)
    if not orders and topology.is_uniform and most <= MOST_IN_LEVELS:
        orders = level_orders(cluster)
    every = [(costs_of(DeviceRow(topology, order)), order) for order in orders]
    for order in () if all_orders else node_orders(cluster)[0]:
        every.append((costs_of(cluster.reordered(order)), own_ranks(order, topology.level_sizes[0], range(most))))
    return [UnevenLayouts(model, costs, row, sample, outside) for costs, row in every]


class UnevenLayouts:
    """Rows of stages on the devices in one order, `row`, whose costs are given; `sample`: a configuration that is
    theirs but for its stages. Some devices may be idle: the first ones, and, where not all orders are looked at, those
    before the end of a node and after the last stage."""

    def __init__(
        self, model: Model, costs: RangeCosts, row: Sequence[int], sample: Configuration, outside: float
    ) -> None:
        self.row, self.sample, self._outside = row, sample, outside
        self._size = size = costs.topology.level_sizes[0] if costs.row is None else 1
        any_number = costs.row is None and not costs.is_uniform
        self._most_behind = costs.num_devices if any_number else size % costs.num_devices or 1
        self.ends = thinned(model.cuts, _MOST_CUTS)
        self.least_left = math.inf  # least seconds of layouts that `in_order_of_bound` stopped before [s]
        self.num_devices, self._max_replicas = costs.num_devices, min(sample.batch, costs.num_devices)
        self._fill_tables(model, costs)
        self._rest = self._least_rest()

    def _fill_tables(self, model: Model, costs: RangeCosts) -> None:
        """Sets `_seconds` [e, r - 1, layer, i, j]: a stage's part of each layer, infinite where no treatment fits the
        memory; `_update` [e, r - 1, i, j]: u of the stage, messages apart; and `_messages` [a, b, layer, i]: seconds
        over cut i between device a and device b of the stage before it."""
        ends, rules, m, fastest = np.asarray(self.ends), model.rules, self.sample.batch, costs.topology.fastest
        n, every, streams = len(ends), np.arange(self.num_devices + 1), costs.rule.is_asynchronous
        is_ahead = np.tri(n, k=-1, dtype=bool).T & model.cuts.inside[np.ix_(ends, ends)]
        first, last = np.where(is_ahead, ends[:, None], 0), np.where(is_ahead, ends, ends[-1])
        sums = model.cuts.stages(first, last)
        there, back = (each[ends][:, None] / fastest for each in (model.cuts.forward, model.cuts.backward))
        beyond = (model.seconds - model.cuts.seconds[last]) / fastest
        stash = sums.stash if rules.recompute == ("none",) and not rules.offloads else 0.0
        self._seconds: Floats = np.full((self.num_devices + 1, self._max_replicas, 3, n, n), np.inf)
        self._update: Floats = np.zeros((self.num_devices + 1, self._max_replicas, n, n))
        there_and_back = (costs.inward(every[:-1, None], every, arriving=way) for way in (True, False))
        links = np.cumsum([np.zeros((len(every) - 1, len(every))), *there_and_back], axis=0) * (not streams)
        self._messages: Floats = np.moveaxis(links, 0, 2)[..., None] * model.cuts.crossing[ends]
        for e in range(1, self.num_devices + 1):
            r = np.arange(1, min(self._max_replicas, e) + 1)[:, None, None]
            at, parts = costs.ranges(r, e), r if "full" in rules.sharding else 1
            stage = costs.stage_seconds(sums, first, last, at, shards=parts)
            work, links = (m * lane for lane in costs.lanes(sums, stage, at))
            lanes, update, forward = np.maximum(work, links), m * stage.after + stage.step, stage.forward
            own, in_flight = -(-m // r), at.in_flight
            first_back = forward + beyond + own * stage.backward + (own - in_flight) * forward
            fewest = np.where(np.arange(n) < n - 1, costs.in_flight(r, r + self._least_after(e - r)), 1)
            in_a_way = np.where(fewest == in_flight, (own - 1) % in_flight, 0)  # in flight, one more may save these
            returns = in_a_way * forward - (-own // in_flight) * (forward + beyond + stage.backward)
            work = np.maximum(work, np.maximum(first_back, returns))
            layers = [lanes] * 3 if streams else [lanes, there + work + update, there + work + back]
            # A stream always has gradients, and among unequal replicas may hold fewer microbatches and versions.
            # Under a flush a replica has none while all that it runs is in flight.
            kept = weight_copies(sum(costs.versions) - 1, rules.optimizer_ratio, parts) * sums.weights
            held = np.maximum(fewest - streams, 1) * stash
            later = np.where(streams | (own > fewest), held, held - stash) + sums.weights
            fits = is_ahead & (kept + sums.buffers + np.maximum(held, later) <= at.limit)
            self._seconds[e, : len(r)] = np.where(fits[:, None], np.stack(layers, axis=1), np.inf)
            self._update[e, : len(r)] = 0.0 if streams else update - back

    def _least_after(self, rest: Indices) -> Indices:
        """Devices that are not idle, of so many after a stage that is not the last one, at least: the rest of the node
        in which it ends, if that is not the last node, and one of each node between these two."""
        if self._size == self._most_behind == 1:
            return rest
        is_near = (rest < self._size) | (self._most_behind > self._size)  # the last stage may end anywhere after it
        others = np.where(is_near, 1, rest % self._size + rest // self._size - 1)
        return np.asarray(np.minimum(rest, np.maximum(others, 1)), dtype=np.intp)

    def _least_rest(self) -> Floats:
        """[e, layer, i] `rest` of the module's recurrence: the stages after cut i on e devices to the end, some of
        them idle after the last stage or before a node's end. Layer 1 counts layer 2 of later stages plus u, too."""
        size, most = self._size, self.num_devices
        found = np.full((most + 1, 3, len(self.ends)), np.inf)
        found[: self._most_behind, :, -1] = 0.0
        across = found.copy()
        for e in range(1, most + 1):
            behind = found[e - 1 :: -1][: self._max_replicas]
            all_of_it = np.maximum(self._seconds[e, : len(behind)], behind[:, :, None, :])
            all_of_it[:, 1] = np.maximum(all_of_it[:, 1], all_of_it[:, 2] + self._update[e, : len(behind)])
            front, least = np.arange(e - 1, e - 1 - len(behind), -1), all_of_it.min(axis=3)
            found[e] = np.minimum(found[e], (least + self._messages[front, e]).min(axis=0))
            border = min(-(-e // size) * size, most)
            across[e] = np.minimum(across[e], (least + self._messages[front, border]).min(axis=0))
            if e % size == 0:
                found[e] = np.minimum(found[e], across[e - size + 1 : e + 1].min(axis=0))
        return found

    def in_order_of_bound(self, less_than: float) -> Iterator[Layout]:
        """Layouts whose least step is `less_than` that, with it [s], the least first."""
        limit, numbers, none, self.least_left = less_than - self._outside, count(), np.zeros(3), math.inf
        starts = range(1, self.num_devices + 1)
        todo: list[Any] = [(self._rest[e, :, 0].max(), next(numbers), e, (0,), _Row(), none, none, 0.0) for e in starts]
        heapify(todo)
        for expanded in count():
            if not todo or todo[0][0] >= limit:
                break
            if expanded == _MAX_EXPANDED:
                self.least_left = float(todo[0][0]) + self._outside
                break
            least, _, begin, cuts, row, ahead, most, update = heappop(todo)
            if self.ends[cuts[-1]] == self.ends[-1]:
                yield self._layout(float(least), cuts, row)
                continue
            idle = self._size if row and begin % self._size == 0 else 1
            for e in range(begin, begin - idle, -1):
                replicas, i = min(self._max_replicas, e), cuts[-1]
                head = ahead + self._messages[np.arange(e - 1, e - 1 - replicas, -1), begin, :, i]
                updates = np.maximum(update, self._update[e, :replicas, i] - (head[:, 2] - head[:, 1])[:, None])
                heads = np.repeat(head[:, :, None], len(self.ends), axis=2)
                heads[:, 2] += updates
                own = np.maximum(most[:, None], self._seconds[e, :replicas, :, i] + heads)
                total = np.maximum(own, self._rest[e - 1 :: -1][:replicas] + heads).max(axis=1)
                for at, j in np.argwhere(total < limit).tolist():
                    rest, front = e - at - 1, self.num_devices - e
                    longer = (*cuts, j), (*row, front, front + at + 1), head[at], own[at, :, j], updates[at, j]
                    heappush(todo, (total[at, j], next(numbers), rest, *longer))

    def neighbours(self, e: Candidate) -> list[Layout]:
        """Layouts one step from `e` that may be faster, by their lower bounds [s], least first.

        A step moves some consecutive stages, or the boundaries between them, by one or two devices, and a cut with
        them; or it divides a stage in two; or it joins two. Empty for a candidate whose devices are not in this order.
        """
        start = self._cuts_and_row(e)
        if start is None:
            return []
        groups: dict[int, dict[_CutsAndRow, None]] = {}
        for cuts, row in self._moves(*start):
            sizes = [b - a for a, b in pairwise((0, *row, self.num_devices))]
            has_gaps = self._size == 1 and any(sizes[2:-1:2])
            if min(sizes) >= 0 and min(sizes[1::2]) > 0 and max(sizes[1::2]) <= self._max_replicas and not has_gaps:
                groups.setdefault(len(cuts), {})[cuts, row] = None
        found, below = [], e.simulated_seconds - self._outside
        for moves in groups.values():
            least = self._bounds(np.array([cuts for cuts, _ in moves]), np.array([row for _, row in moves]))
            found += [(float(seconds), move) for seconds, move in zip(least, moves, strict=True) if seconds < below]
        return [self._layout(least, *move) for least, move in sorted(found)]

    def _moves(self, cuts: tuple[int, ...], row: _Row) -> Iterator[_CutsAndRow]:
        near = [
            (*cuts[:s], cuts[s] + step, *cuts[s + 1 :])
            for s, step in product(range(1, len(cuts) - 1), _SHIFTS)
            if cuts[s - 1] < cuts[s] + step < cuts[s + 1]
        ]
        rows = [row]
        for a, b in combinations(range(len(row) + 1), 2):
            rows += [(*row[:a], *(at + step for at in row[a:b]), *row[b:]) for step in _SHIFTS]
        yield from product((cuts, *near), rows)
        for s, (i, j) in enumerate(pairwise(cuts)):
            begin, end = row[2 * s : 2 * s + 2]
            for at, middle in product(range(i + 1, j), range(begin + 1, end)):
                yield (*cuts[: s + 1], at, *cuts[s + 1 :]), (*row[: 2 * s + 1], middle, middle, *row[2 * s + 1 :])
            if s:
                yield (*cuts[:s], *cuts[s + 1 :]), (*row[: 2 * s - 1], *row[2 * s + 1 :])

    def _bounds(self, cuts: np.ndarray, rows: np.ndarray) -> Floats:
        """[n] bounds of layouts [s], infinite where a stage is impossible; cuts [n, S + 1], rows [n, 2 S]."""
        found, ahead, update = np.zeros((len(cuts), 3)), np.zeros((len(cuts), 3)), np.zeros(len(cuts))
        begin = self.num_devices - rows[:, 0]
        for s in range(cuts.shape[1] - 1):
            e, end = self.num_devices - rows[:, 2 * s], self.num_devices - rows[:, 2 * s + 1]
            i, j, r = cuts[:, s], cuts[:, s + 1], e - end - 1
            ahead = ahead + self._messages[end, begin, :, i]
            update, begin = np.maximum(update, self._update[e, r, i, j] - (ahead[:, 2] - ahead[:, 1])), end
            own = self._seconds[e, r, :, i, j] + ahead
            own[:, 2] += update
            found = np.maximum(found, own)
        return np.asarray(found.max(axis=1))

    def _cuts_and_row(self, e: Candidate) -> _CutsAndRow | None:
        """Positions in `ends` of a layout's cuts, and its row; None where its ranks are not in a row of this order, or
        `ends` lacks one of its cuts."""
        c = e.configuration
        if replace(c, pipeline=1, data=1, ranks=None, by_replica=False) != self.sample or not {*e.ends} <= {*self.ends}:
            return None
        stages = [sorted(map(self.row.index, ranks)) for ranks in c.stage_ranks]
        row = tuple(at for own in stages for at in (own[0], own[-1] + 1))
        if [*row] != sorted(row) or any(own[-1] - own[0] >= len(own) for own in stages):
            return None
        return tuple(self.ends.index(at) for at in e.ends), row

    def _layout(self, least: float, cuts: tuple[int, ...], row: _Row) -> Layout:
        ranks = tuple(tuple(sorted(self.row[a:b])) for a, b in zip(row[::2], row[1::2], strict=True))
        c = replace(self.sample, pipeline=len(ranks), data=len(ranks[0]), ranks=ranks)
        return least + self._outside, c, tuple(self.ends[at] for at in cuts)

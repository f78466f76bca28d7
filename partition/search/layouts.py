"""On few devices, every way to give stages replicas and places in a row, that of the least step first.

Stage by stage from the last one, as in `solve.dynamic`, but each row of replicas by itself, and of the step in place of
the bottleneck:

    least[i] = min over j of max{ step(i, j), least of the stages behind [j] }

    step(i, j) = F of all in front of i  +  F, B of the busiest replica  +  max{ its sums and its update, B in front }

A row of which no cut stays below the best step that is known is not carried on: stages in front take nothing off it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from ..memory import stage_parts
from ..solve.chunks import even_stages
from ..solve.cut_sums import thinned
from ..solve.orders import node_orders, own_ranks
from ..solve.ranges import RangeCosts
from ..topology import Floats, Topology
from .cuts import range_costs
from .evaluate import Ends
from .model import Model
from .space import Configuration

FEW_DEVICES = 8
_MOST_CUTS = 48
_MOST_TRIED = 24  # cuts of a layout, or some more
_MOST_ORDERS = 6  # of unequal nodes; of more the given one and its reverse


class _Stage(NamedTuple):
    """Devices from `begin` on, counted from the end; `used` by it and by the stages behind."""

    begin: int
    replicas: int
    used: int


class Layout(NamedTuple):
    """A configuration with the cuts that make its least step smallest, of these the evenest ones [s]."""

    least: float
    configuration: Configuration
    ends: Ends


def layouts(
    model: Model,
    topology: Topology,
    *,
    schedule: str,
    microbatch_size: int,
    num_microbatches: int,
    below: float,
    beside: float,
    straight: bool = False,
) -> list[Layout]:
    """Those whose least step is `below`, with so many seconds beside it [s]; with `straight` without replicas."""
    found, cluster = list[Layout](), topology.cluster
    if cluster.num_devices > FEW_DEVICES:
        return found
    orders = node_orders(cluster)[0]
    given, size = tuple(range(len(cluster.nodes or ()))), cluster.levels[0].size
    for order in orders if len(orders) <= _MOST_ORDERS else [given, given[::-1]]:
        memory_limit = topology.memory_limit
        costs = range_costs(model, cluster.reordered(order), schedule, num_microbatches, memory_limit=memory_limit)
        steps = _Steps(model, costs)
        for stages in _rows(steps, min(1 if straight else num_microbatches, costs.num_devices), below - beside):
            cost = [steps.of(stage) for stage in stages]
            even = even_stages(cost.__getitem__, len(stages), len(steps.ends))
            assert even is not None
            ranks = [range(costs.num_devices - s.begin - s.replicas, costs.num_devices - s.begin) for s in stages]
            configuration = Configuration(
                pipeline=len(stages),
                data=stages[0].replicas,
                tensor=1,
                schedule=schedule,
                num_chunks=1,
                microbatch_size=microbatch_size,
                num_microbatches=num_microbatches,
                ranks=tuple(own_ranks(order, size, own) for own in ranks),
            )
            known = {even[0]: beside + even[1]}
            for cuts in (tried := [even[0]]):
                found.append(Layout(known[cuts], configuration, tuple(int(steps.ends[at]) for at in cuts)))
                for other in _others(cuts, _MOST_TRIED) if len(tried) < _MOST_TRIED else ():
                    if other not in known:
                        each = (own[i, j - i - 1] for own, (i, j) in zip(cost, pairwise(other), strict=True))
                        known[other] = beside + float(max(each))
                        tried += [other] if known[other] < below else []
    return found


def _others(cuts: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut as often where these are at most `most`; else one cut moved to the two next on either side."""
    if math.comb(cuts[-1] - 1, len(cuts) - 2) <= most:
        yield from ((0, *inner, cuts[-1]) for inner in combinations(range(1, cuts[-1]), len(cuts) - 2))
        return
    for at, (before, cut, behind) in enumerate(zip(cuts, cuts[1:], cuts[2:], strict=False), 1):
        for other in range(max(before + 1, cut - 2), min(behind, cut + 3)):
            yield (*cuts[:at], other, *cuts[at + 1 :])


def _rows(steps: _Steps, most_replicas: int, below: float) -> Iterator[tuple[_Stage, ...]]:
    """Idle devices stay behind the last stage, in front of the first, and where a stage would straddle two nodes."""
    costs, n = steps.costs, len(steps.ends)
    size, most = costs.topology.level_sizes[0], costs.num_devices
    alike = (1 if size == most else size) if costs.is_uniform else most
    done = np.full(n, np.inf)
    done[-1] = 0.0
    todo: list[tuple[tuple[_Stage, ...], Floats, int]] = [((), done, idle) for idle in range(alike)]
    while todo:
        behind, least_behind, end = todo.pop()
        padded = np.concatenate([least_behind, np.full(n - 1, np.inf)])
        rest = np.lib.stride_tricks.sliding_window_view(padded[1:], n - 1)
        used, over = behind[0].used if behind else 0, -end % size
        for replicas in range(1, min(most_replicas, most - end) + 1):
            for begin in (end, end + over) if over < replicas <= min(size, most - end - over) and over else (end,):
                stage = _Stage(begin, replicas, used + replicas)
                least = np.maximum(steps.of(stage), rest).min(axis=1)
                if least[0] < below:
                    yield (stage, *behind)
                if least[1:].min(initial=np.inf) < below and len(behind) + 1 < steps.model.max_stages:
                    todo.append(((stage, *behind), least, begin + replicas))


class _Steps:
    """[n, w] seconds of a batch with a stage between each cut and those behind it, at least; infinite where it does not
    fit the memory, whatever is done about it."""

    def __init__(self, model: Model, costs: RangeCosts) -> None:
        self.model, self.costs, self._known = model, costs, dict[_Stage, Floats]()
        self.ends = np.asarray(thinned(model.cuts, _MOST_CUTS))
        rows = np.arange(len(self.ends))[:, None]
        last = rows + np.arange(1, len(self.ends))
        self._first, self._last = self.ends[rows], self.ends[np.minimum(last, len(self.ends) - 1)]
        self._inside = model.cuts.inside[self._first, self._last] & (last < len(self.ends))
        self._sums = model.cuts.stages(self._first, self._last)

    def of(self, stage: _Stage) -> Floats:
        if stage not in self._known:
            costs, sums, cuts, fastest = self.costs, self._sums, self.model.cuts, self.costs.topology.fastest
            m, replicas = costs.num_microbatches or 1, stage.replicas
            at = costs.ranges(replicas, stage.begin + replicas)
            work = m * costs.compute(sums, at) + costs.runtime(self._first, self._last) * -(-m // replicas)
            seconds = np.maximum(work, m * costs.communication(sums, at))
            if not costs.rule.is_asynchronous:
                parts = replicas if "full" in self.model.rules.sharding else 1
                behind = m * sums.summed * at.ring + sums.update / fastest / parts
                there, back = cuts.forward[self._first] / fastest, cuts.backward[self._first] / fastest
                seconds = np.maximum(seconds, there + work + np.maximum(behind, back))
            fits = self._inside & (self._bytes(replicas, int(costs.in_flight(replicas, stage.used))) <= at.limit)
            self._known[stage] = np.where(fits, seconds, np.inf)
        return self._known[stage]

    def _bytes(self, replicas: int, in_flight: int) -> Floats:
        rules, costs = self.model.rules, self.costs
        least: Floats = np.zeros(())
        if np.isfinite(costs.topology.memory_bytes).any():
            divides, least = "full" in rules.sharding, np.array(np.inf)
            for recompute in rules.recompute:
                fixed, each, behind = stage_parts(
                    self._sums,
                    copies=costs.versions + 1 + rules.optimizer_ratio / (replicas if divides else 1),
                    replicas=replicas,
                    divides=divides,
                    recompute=recompute,
                    streams=costs.rule.is_asynchronous,
                )
                each = costs.versions_in_flight * self._sums.weights + (0.0 if rules.offloads else each)
                least = np.minimum(least, np.maximum(fixed + in_flight * each, behind))
        return least

"""On few devices, every way to give stages replicas and places in a row, with cuts whose step may be the least.

As `solve.dynamic`, but of the step in place of the bottleneck, with the greatest of these over the stages from i to j:
F of all in front of i, F and B of the busiest replica, and then its sums and its update, or B of all in front. A row of
replicas that cannot stay below the best step that is known is not carried on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations, islice, pairwise, product
from typing import Any

import numpy as np

from ..solve.chunks import even_stages, neighbours
from ..solve.cut_sums import Cuts, thinned
from ..solve.orders import node_orders, own_ranks
from ..solve.ranges import RangeCosts
from ..topology import Floats, Topology
from .cuts import range_costs
from .evaluate import Ends, Evaluated
from .model import Model
from .search import Layout, PlanSearch
from .space import Configuration

MOST_DEVICES = 16
MOST_ACTIONS = 10_000  # of a batch; in longer ones the bottleneck is nearly all
_MOST_CUTS = 48
_MOST_ROWS = 5_000
_MOST_WAYS = 24  # to cut a layout, up to which each is looked at

_Stage = tuple[int, int, int]  # first device, counted from the end; replicas; devices of it and of the stages behind
_StepOf = Callable[[_Stage], Floats]


def is_small(topology: Topology, num_microbatches: int) -> bool:
    most = topology.num_devices
    return most <= MOST_DEVICES and 2 * num_microbatches * most <= MOST_ACTIONS


def layouts(search: PlanSearch, model: Model, below: float, **sizes: Any) -> Iterator[Layout]:
    """Those whose least step is `below`, with that [s]; `sizes`: what is given of a `Configuration`."""
    topology, schedule, m = search.evaluator.topology, sizes["schedule"], sizes["num_microbatches"]
    beside, most, ends = search.least.beside(schedule, model), topology.num_devices, thinned(model.cuts, _MOST_CUTS)
    if not is_small(topology, m):
        return
    for order in node_orders(topology.cluster)[0]:
        cluster = topology.cluster.reordered(order)
        costs = range_costs(model, cluster, schedule, m, memory_limit=topology.memory_limit)
        step_of = _steps(model, costs, ends)
        for stages in islice(_rows(step_of, costs, len(ends), below - beside), _MOST_ROWS):
            rows = [range(most - begin - replicas, most - begin) for begin, replicas, _ in stages]
            ranks = tuple(own_ranks(order, topology.level_sizes[0], row) for row in rows)
            c = Configuration(pipeline=len(stages), data=stages[0][1], tensor=1, num_chunks=1, ranks=ranks, **sizes)
            steps = [step_of(stage) for stage in stages]
            for cuts in _ways(steps):
                least = max(float(step[i, j - i - 1]) for step, (i, j) in zip(steps, pairwise(cuts), strict=True))
                if least < below - beside:
                    yield least + beside, c, tuple(ends[at] for at in cuts)


def moved(e: Evaluated, topology: Topology, cuts: Cuts) -> Iterator[tuple[Configuration, Ends]]:
    """One step from a layout in a row: a device more, less, or for a neighbour, with cuts moved too; two stages as one;
    all of it one device further."""
    c, ends, size = e.configuration, e.ends, topology.level_sizes[0]
    used = [rank for ranks in c.stage_ranks for rank in ranks]
    idle = [rank for rank in range(topology.num_devices) if rank not in used]
    front = [rank for rank in idle if rank // size == used[0] // size and rank < used[0]]
    line, counts, at = [*front, *used, *(rank for rank in idle if rank not in front)], [*c.counts], len(front)
    ways: list[tuple[int, list[int], Ends]] = [(at + step, counts, ends) for step in (-1, 1)]
    for s, own in enumerate(counts[1:], 1):
        for one in (counts[s - 1] + own, max(counts[s - 1], own), min(counts[s - 1], own)):
            ways.append((at, [*counts[: s - 1], one, *counts[s + 1 :]], (*ends[:s], *ends[s + 1 :])))
    near = [ends, *neighbours(cuts, ends)]
    for s, other in product(range(len(counts)), range(-1, len(counts))):
        for step in (-1, 1):
            changed = counts.copy()
            changed[s] += step
            if other >= 0:
                changed[other] -= step
            if other < s and min(changed) > 0:
                ways += [(at, changed, each) for each in near]
    for first, numbers, own_ends in ways:
        bounds = [*accumulate(numbers, initial=first)]
        if first >= 0 and bounds[-1] <= len(line) and max(numbers) <= (c.num_microbatches or 1):
            ranks = tuple(tuple(line[a:b]) for a, b in pairwise(bounds))
            yield replace(c, pipeline=len(ranks), data=numbers[0], ranks=ranks), own_ends


def _ways(steps: Sequence[Floats]) -> Iterator[tuple[int, ...]]:
    """Every way to cut where these are few; else the evenest of the least step."""
    last = len(steps[0]) - 1
    if math.comb(last - 1, len(steps) - 1) <= _MOST_WAYS:
        yield from ((0, *inner, last) for inner in combinations(range(1, last), len(steps) - 1))
    elif even := even_stages(steps.__getitem__, len(steps), last + 1):
        yield even[0]


def _rows(step_of: _StepOf, costs: RangeCosts, num_cuts: int, below: float) -> Iterator[tuple[_Stage, ...]]:
    """Idle devices stay behind the last stage, in front of the first, and where a stage would straddle two nodes."""
    size, most = costs.topology.level_sizes[0], costs.num_devices
    idle = (1 if size == most else size) if costs.is_uniform else most
    none = np.full(num_cuts - 1, np.inf)
    todo: list[tuple[tuple[_Stage, ...], Floats, int]] = [((), np.append(none, 0.0), at) for at in range(idle)]
    while todo:
        behind, least_behind, end = todo.pop()
        rest = np.lib.stride_tricks.sliding_window_view(np.append(least_behind, none)[1:], num_cuts - 1)
        used, over = behind[0][2] if behind else 0, -end % size
        for replicas in range(1, min(costs.num_microbatches or 1, most - end) + 1):
            for begin in (end, end + over) if 0 < over < replicas <= min(size, most - end - over) else (end,):
                stage = begin, replicas, used + replicas
                least = np.maximum(step_of(stage), rest).min(axis=1)
                if least[0] < below:
                    yield (stage, *behind)
                if least[1:].min() < below:
                    todo.append(((stage, *behind), least, begin + replicas))


def _steps(model: Model, costs: RangeCosts, ends: Sequence[int]) -> _StepOf:
    """[n, w] least seconds of a batch with a stage between each cut and those behind it; infinite where it does not fit
    the memory, whatever is done about it."""
    rows, m, rules = np.arange(len(ends))[:, None], costs.num_microbatches or 1, model.rules
    fastest = costs.topology.fastest
    lasts = rows + np.arange(1, len(ends))
    first, last = np.asarray(ends)[rows], np.asarray(ends)[np.minimum(lasts, len(ends) - 1)]
    inside, sums = model.cuts.inside[first, last] & (lasts < len(ends)), model.cuts.stages(first, last)
    there, back = model.cuts.forward[first] / fastest, model.cuts.backward[first] / fastest
    stash = sums.stash if rules.recompute == ("none",) and not rules.offloads else 0.0

    @cache
    def step_of(stage: _Stage) -> Floats:
        begin, replicas, used = stage
        at, parts = costs.ranges(replicas, begin + replicas), replicas if "full" in rules.sharding else 1
        work = m * costs.compute(sums, at) + costs.runtime(first, last) * -(-m // replicas)
        seconds = np.maximum(work, m * costs.communication(sums, at))
        if not costs.rule.is_asynchronous:
            behind = m * sums.summed * at.ring + sums.update / fastest / parts
            seconds = np.maximum(seconds, there + work + np.maximum(behind, back))
        held = costs.in_flight(replicas, used)
        copies = costs.versions + 1 + costs.versions_in_flight * held + rules.optimizer_ratio / parts
        fits = sums.weights * copies + held * stash <= at.limit
        return np.where(inside & fits, seconds, np.inf)

    return step_of

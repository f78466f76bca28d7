"""Cuts worth a simulation: of one configuration (`candidate_ends`), and with any numbers of replicas (`candidates`).

`even_ends` looks for the least slowest stage. With pace_s(i, j) that of stage s between the coarse cuts i and j:

    best_s[i] = min over j in i+1 .. i+w of max{ pace_s(i, j), best_s+1[j] }        O(S n w) for n cuts

pace_s is infinite where no treatment fits the stage's part of its rank's memory, and otherwise includes what runs again
under the fastest treatment that fits. The reach w is grown until any longer stage has more work than the best answer's
slowest stage, so that the answer is that of w = n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ..cluster import Cluster
from ..memory import InFlightCounts, bytes_by_in_flight, context_bytes
from ..solve.chunks import all_stages, equal_stages, even_stages
from ..solve.dynamic import DeviceRow, RangeCosts, grain_of, solve, stage_ranks
from ..solve.orders import node_orders
from ..stage_cost import COUNTED, Figures, StageDevices, stage_seconds, work_seconds
from ..topology import Floats
from .evaluate import Ends, PlanEvaluator
from .model import Model
from .placement import Placement, rank_place
from .space import Configuration

_REACH = 3  # times the mean of cuts a stage
_MARGIN = 1e-9
_STAY_WITH_OFFLOAD = 3.0  # microbatches of a stage that are there, while others wait on the host
ALL_CUTS = 64  # ways to cut up to which each is looked at


def candidate_ends(
    evaluator: PlanEvaluator, c: Configuration, *, has_limit: bool = True, in_flight: tuple[InFlightCounts, ...] = ()
) -> list[Ends]:
    """The likely best ones first, without `has_limit` as if memory had none; none where the graph has no chain of so
    many stages.

    Every way where these are at most ALL_CUTS; else the least slowest stage within the memory (with counts of what runs
    again, and without), the least slowest stage without a limit (where that finds none, or where stages share their
    rank's memory, of which one may take more than its part), and equal numbers of nodes. `in_flight`: in place of what
    the schedule says.
    """
    model = evaluator.model(c)
    found: list[Ends | None] = []
    if tries_all_cuts(model, c.num_stages):
        every = all_stages(model.cuts.inside, c.num_stages, limit=ALL_CUTS)
        if every is not None:
            return every
    place = evaluator.placement(c)
    in_flight = in_flight or evaluator.schedules.in_flight(c, exact=False, kv_share=model.profile.kv_share)
    models = {size: evaluator.model(c, size) for size in {*c.tensors}}
    counts = "none" in model.rules.recompute and bool({*COUNTED} & {*model.rules.recompute})
    is_limited, reach = has_limit and min(place.limits) < math.inf, _REACH * (-(-len(model.coarse) // c.num_stages))
    for some in (True, False) if counts and is_limited else (False,):
        found.append(even_ends(models, place, in_flight, c, reach=reach, counts=some, has_limit=has_limit))
    if is_limited and c.num_chunks > 1:
        found.append(even_ends(models, place, in_flight, c, reach=reach, has_limit=False))
    found.append(equal_stages(model.cuts, c.num_stages))
    return [ends for ends in dict.fromkeys(found) if ends is not None]


def even_ends(
    models: Mapping[int, Model],
    place: Placement,
    in_flight: tuple[InFlightCounts, ...],
    c: Configuration,
    *,
    reach: int,
    counts: bool = False,
    has_limit: bool = True,
) -> Ends | None:
    """Cuts with the least slowest stage within the memory, or, where there are none, or without `has_limit`, without a
    limit; models by tensor size, with the same cuts. With `counts` some of a stage's nodes run again where that is
    enough.

    The same for any reach, in coarse cuts: where a longer stage might be part of it, longer ones are looked at,
    too.
    """
    coarse = models[min(c.tensors)].coarse
    num_cuts = len(coarse)
    for fits in (True, False) if has_limit else (False,):
        while True:
            costs = _EvenCosts(models, place, in_flight, c, reach=min(reach, num_cuts - 1), counts=counts)
            found = even_stages(costs.within_memory if fits else costs.without_memory_limit, c.num_stages, num_cuts)
            if reach >= num_cuts - 1 or (found is not None and found[1] * (1 + _MARGIN) < costs.least_beyond):
                break
            reach *= 4
        if found is not None:
            return tuple(coarse[at] for at in found[0])
    return None


def tries_all_cuts(model: Model, num_stages: int) -> bool:
    """True where each way to cut so many stages is looked at (or quickly found to be one of too many)."""
    nodes = len(model.cuts) - 1
    return nodes <= 24 and math.comb(max(nodes - 1, 0), num_stages - 1) <= 50 * ALL_CUTS


class _EvenCosts:
    """[n, reach] pace of stage s from a coarse cut to those 1, 2, .. after it [s].

    Sums of gradients apart: they are alike for all cuts.

    Each of a rank's V stages is given a V-th of its memory, with what it holds at the rank's peak.
    """

    def __init__(
        self,
        models: Mapping[int, Model],
        place: Placement,
        in_flight: tuple[InFlightCounts, ...],
        c: Configuration,
        *,
        reach: int,
        counts: bool,
    ) -> None:
        self.counted = COUNTED if counts else ()
        model = models[min(c.tensors)]
        self.place, self.in_flight, self.rules, self.c = place, in_flight, model.rules, c
        self.positions, self.counts = c.positions, c.counts
        at, rows = np.asarray(model.coarse), np.arange(len(model.coarse))[:, None]
        last = rows + np.arange(1, reach + 1)
        first, ends = at[rows], at[np.minimum(last, len(at) - 1)]
        self.inside = model.cuts.inside[first, ends] & (last < len(at))
        self.sums = {size: each.cuts.stages(first, ends) for size, each in models.items()}
        sizes = model.cuts.members.sum(axis=1)
        self.nodes = np.maximum(sizes[ends] - sizes[first], 1)
        self._fullest: dict[int, list[float]] = {}
        self.least_beyond = min(each.least_work_beyond(reach) for each in models.values()) / max(place.on.speed)
        self.action_seconds = model.profile.action_seconds
        self.context_bytes = context_bytes(model.profile.device)
        self._plain: dict[object, Floats] = {}
        self._made: dict[object, Floats] = {}
        self._held: dict[object, Callable[[Figures], Floats]] = {}

    def without_memory_limit(self, stage: int) -> Floats:
        """Paces without a memory limit, nothing recomputed."""
        size, on = self.c.tensors[self.positions[stage]], self._on(stage)
        if (on, size) not in self._plain:
            seconds = stage_seconds(self.sums[size], on, action=self.action_seconds)
            links = np.maximum(seconds.sending, seconds.sending_shared)
            self._plain[on, size] = np.where(self.inside, np.maximum(seconds.work, links), np.inf)
        return self._plain[on, size]

    def _on(self, stage: int) -> StageDevices:
        names, on = ("speed", "inward", "outward", "message_overhead"), self.place.on
        pairs = {name: tuple(each[stage] for each in getattr(on, name)) for name in ("shared", "message_bytes")}
        return StageDevices(**{name: getattr(on, name)[stage] for name in names}, **pairs)

    def within_memory(self, stage: int) -> Floats:
        """Paces with the memory limit: recomputed where it must be, infinite where it does not fit."""
        p, chunk = self.positions[stage], stage // self.c.pipeline
        counted, on = self.in_flight[p], self._on(stage)
        limit = (self.place.limits[p] - self.context_bytes) / self.c.num_chunks
        plain = self.without_memory_limit(stage)
        if not math.isfinite(limit) and "none" in self.rules.recompute:
            return plain
        held = self._most_in_flight(p)[chunk]
        offloads = self.rules.offloads and self.place.hosts[p] > 0
        # `plain` is one for each pair of links
        key = (id(plain), held, counted.versions, limit, offloads, self.counts[p], self.c.message_tensor(p))
        if key in self._made:
            return self._made[key]
        made, sums = np.full_like(plain, np.inf), self.sums[self.c.tensors[p]]
        treatments = [(recompute, held) for recompute in self.rules.recompute]
        if offloads:
            treatments.append(("none", min(held, _STAY_WITH_OFFLOAD)))
        for recompute, held in treatments:
            row, spare = sums.under(recompute), limit - self._bytes(p, held, recompute)
            again = row.seconds
            if recompute in self.counted:  # what all of them leave free, some may keep
                part = 1 - spare / np.maximum(held * (sums.stash - row.kept), 1e-30)
                again = again * np.ceil(np.clip(part, 0, 1) * self.nodes - _MARGIN) / self.nodes
            work = work_seconds(sums, on, again=again, action=self.action_seconds)
            made = np.where(spare >= 0, np.minimum(made, np.maximum(plain, work)), made)
        self._made[key] = made
        return made

    def _most_in_flight(self, p: int) -> list[float]:
        """[V] microbatches that a rank holds where most are there."""
        if p not in self._fullest:
            held = self.in_flight[p].microbatches
            self._fullest[p] = held[int(held.sum(axis=1).argmax())].tolist()
        return self._fullest[p]

    def _bytes(self, p: int, held: float, recompute: str) -> Floats:
        versions, size = self.in_flight[p].versions, self.c.tensors[p]
        # The number of messages follows from the replicas.
        key = (self.counts[p], versions, recompute, size, self.c.message_tensor(p))
        if key not in self._held:
            self._held[key] = bytes_by_in_flight(
                self.sums[size],
                rank_place(self.c, self.place, p, context_bytes=self.context_bytes),
                versions=(versions, 0),
                optimizer_ratio=self.rules.optimizer_ratio,
                divides="full" in self.rules.sharding,
                recompute=recompute,
            )
        return self._held[key](held)


class TooLargeError(ValueError):
    """Too many cuts and devices for the dynamic program."""


def range_costs(
    model: Model, cluster: Cluster | DeviceRow, schedule: str, num_microbatches: int | None, memory_limit: float | None
) -> RangeCosts:
    return RangeCosts(
        model.cuts,
        cluster,
        schedule=schedule,
        num_microbatches=num_microbatches,
        beside=context_bytes(model.profile.device),
        optimizer_ratio=model.rules.optimizer_ratio,
        action_seconds=model.profile.action_seconds,
        memory_limit=memory_limit,
    )


def candidates(
    model: Model,
    cluster: Cluster,
    *,
    schedule: str,
    microbatch_size: int,
    num_microbatches: int | None,
    memory_limit: float | None,
    straight: bool = False,
    wanted: int,
) -> tuple[list[tuple[Configuration, Ends]], float, list[str]]:
    """Configurations with their cuts, those with the least bottleneck first, for each order of unequal nodes; a bound
    of the bottleneck of any plan [s a microbatch]; and notes.

    `wanted` at most come each way: for M microbatches, and without M, so that replicas have equal shares.

    Raises TooLargeError where unequal devices are too many; of too many equal ones some are looked at (`grain_of`).
    """
    found: dict[tuple[Configuration, Ends], None] = {}
    bounds, notes, every = [], [], (len(model.cuts), 1)
    orders, note = node_orders(cluster)
    for order in orders:
        costs = range_costs(model, cluster.reordered(order), schedule, num_microbatches, memory_limit=memory_limit)
        grain = grain_of(costs, straight=straight)
        if grain != every and not costs.is_uniform:
            raise TooLargeError(
                f"{len(costs.cuts)} cuts on {costs.num_devices} devices of several kinds: too large for unequal "
                f"devices; expected one kind, fewer devices, or a smaller max_cuts"
            )
        solutions = solve(costs, straight=straight, num_candidates=wanted)
        if num_microbatches is not None:
            solutions += solve(costs.per_replica(), straight=straight, num_candidates=wanted)
        bounds += [solution.bound for solution in solutions[:1]]
        for solution in solutions:
            if num_microbatches is not None and max(solution.replicas) > num_microbatches:
                continue  # a replica without work
            configuration = Configuration(
                pipeline=len(solution.stages),
                data=solution.replicas[0],
                tensor=1,
                schedule=schedule,
                num_chunks=1,
                microbatch_size=microbatch_size,
                num_microbatches=num_microbatches,
                ranks=stage_ranks(costs, solution, order, cluster),
            )
            found[configuration, (0, *(stage.last for stage in solution.stages))] = None
    if grain != every:
        bounds = [float(costs.work[-1]) / costs.num_devices]
        notes.append(
            f"too large for the exact dynamic program: {grain[0]} of {every[0]} cuts were looked at, and replicas "
            f"in multiples of {grain[1]}"
        )
    if note is not None:
        notes.append(note)
    return list(found), min(bounds, default=0.0), notes

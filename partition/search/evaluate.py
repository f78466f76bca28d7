"""One configuration with its cuts: what each stage costs, what each rank holds, and the least seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from ...schedules.timing.costs import Costs, Ties
from ...schedules.timing.links import Links
from ...schedules.timing.timeline import Timeline
from ...schedules.transform import with_offload
from ..memory import InFlightCounts, RankMemory, RankPlace, context_bytes, count_in_flight, count_over_time
from ..recompute import one_of_each_rank, with_offloads
from ..stage_cost import OFFLOAD, StageSeconds, StageSums, least_rounds, stage_seconds, stages_from
from ..topology import NO_TRANSFER, Floats, Topology, TransferTime
from .bounds import least_step, rank_paces
from .model import Model
from .placement import Placement, placement_of, rank_place
from .simulated import (
    BuiltSchedules,
    SizesError,
    by_place,
    long_batch,
    microbatches_of,
    num_weight_grads,
    order_for,
    short_batches,
    simulated_batch,
)
from .space import Configuration

Ends = tuple[int, ...]
MAX_OFFLOAD_ACTIONS = 20_000  # of a batch, up to which activations may leave for the host: all of it is simulated
Figure = TypeVar("Figure")


class DoesNotFitError(Exception):
    """No treatment makes it fit: on `stage_group` it takes `too_many` bytes more than there are."""

    def __init__(self, *, stage_group: int, too_many: float, limit: float) -> None:
        super().__init__(f"{too_many:,.0f} bytes too many")
        self.stage_group, self.too_many, self.limit = stage_group, too_many, limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A configuration with cuts that fits.

    Arguments:
        models: by tensor size of its stages.
        tied: (stages, seconds) of all-reduces of gradients of weights that stages on different ranks share.
        norm: of the global norm, for which all ranks wait [s]; None: there is none.
        bottleneck: pace of the slowest rank [s a microbatch].
        bound: no order of this work is faster [s]; 0 where the number of microbatches is open.
        simulated_seconds: from batch to batch [s]; infinite where it was not simulated.
        bubble: of that simulation.
    """

    configuration: Configuration
    ends: Ends
    models: Mapping[int, Model]
    placement: Placement
    sums: StageSums
    seconds: StageSeconds
    tied: Ties
    norm: float | None
    memories: tuple[RankMemory, ...]
    bottleneck: float
    bound: float
    simulated_seconds: float = math.inf
    bubble: float = 0.0

    @property
    def model(self) -> Model:
        """Model of the smallest tensor size among its stages."""
        return self.models[min(self.models)]

    @property
    def memory_bytes(self) -> float:
        return max(memory.total for memory in self.memories)

    @property
    def num_shards(self) -> int:
        """Parts into which the optimizer's states are divided, of all stages."""
        return sum(sum(memory.shards) for memory in self.memories)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Stages whose activations wait on the host."""
        c = self.configuration
        treated = enumerate(self.memories[p].recompute[v] for p, v in zip(c.positions, c.chunks, strict=True))
        return tuple(s for s, name in treated if name == OFFLOAD)

    @property
    def costs(self) -> Costs:
        c = self.configuration
        costs = self.seconds.costs(around=self.model.profile.around_seconds, norm=self.norm, tied=self.tied)
        costs = replace(costs, index_factors=c.shares * (c.num_microbatches or 1) or None)
        return _with_offloads(costs, self.sums, self.placement, self.leaving)

    @property
    def links(self) -> Links:
        return replace(self.placement.network(self.sums, self.seconds), index_factors=self.configuration.parts or None)


def _with_offloads(costs: Costs, sums: StageSums, place: Placement, leaving: Sequence[int]) -> Costs:
    """With the seconds of these stages' transfers to the host and back."""
    if not leaving:
        return costs
    stashes = enumerate(zip(sums.stash.tolist(), place.positions, strict=True))
    seconds = [stash / place.hosts[p] if s in leaving else 0.0 for s, (stash, p) in stashes]
    return replace(costs, offload=seconds, reload=seconds)


class PlanEvaluator:
    """Costs, memory and simulation of configurations.

    Arguments:
        model_of: of a microbatch and a tensor size.
        norm: of the global norm under a flush, see `Costs` [s]; None: there is none.
    """

    def __init__(self, topology: Topology, model_of: Callable[[int, int], Model], *, norm: float | None = None) -> None:
        self.topology, self.model_of, self.norm = topology, model_of, norm
        self.schedules = BuiltSchedules()
        self._placements: dict[object, Placement] = {}
        self._tied_sums: dict[object, TransferTime] = {}
        self._split_shares: dict[object, Floats] = {}
        self._least_models: dict[object, Model] = {}
        # Of the configuration at hand: cuts move, and most ranks keep theirs.
        self._memories_of: Configuration | None = None
        self._fronts: dict[object, tuple[RankMemory, ...]] = {}
        self._again: dict[object, float] = {}  # seconds that run again, at least

    def model(self, c: Configuration, tensor: int | None = None) -> Model:
        """Model of a tensor size, or of the smallest among its stages."""
        return self.model_of(c.microbatch_size, tensor or min(c.tensors)).in_slices(len(c.lengths))

    def least_model(self, c: Configuration) -> Model:
        """No more of anything than any of its stages has, for bounds of any cuts."""
        if c.sizes is None:
            return self.model(c)
        key = (c.microbatch_size, *sorted({*c.sizes}))
        if key not in self._least_models:
            first, *others = [self.model_of(c.microbatch_size, size) for size in key[1:]]
            self._least_models[key] = first.at_least(others)
        return self._least_models[key]

    def work_of_all(self, c: Configuration) -> float:
        """Seconds of a microbatch, of all members of its tensor groups together; where these differ, at least [s]."""
        if c.sizes is None:
            return self.model_of(c.microbatch_size, c.tensor).seconds * c.tensor
        nodes = [(size, self.model_of(c.microbatch_size, size).profile.nodes) for size in sorted({*c.sizes})]
        every = [[size * node.seconds for node in own] for size, own in nodes]
        return float(sum(map(min, zip(*every, strict=True))))

    def sums(self, c: Configuration, ends: Ends) -> StageSums:
        """Sums of each stage with the tensor size of its place."""
        sizes = [c.tensors[p] for p in c.positions]
        found = {size: self.model(c, size).stages(ends, c.positions) for size in {*sizes}}
        sums = found[sizes[0]] if len(found) == 1 else stages_from([found[size] for size in sizes])
        rounds = sums.rounds._replace(sums_by_chunk=sums.rounds.sums_by_chunk and c.num_chunks > 1)
        if c.family.rule.is_asynchronous:
            rounds = rounds._replace(gathers_ahead=False, sums_early=False)
        return sums if rounds == sums.rounds else replace(sums, rounds=rounds)

    def _norm_seconds(self, c: Configuration) -> float | None:
        """Seconds of the global norm, for which ranks wait under a flush alone [s]."""
        return None if c.family.rule.is_asynchronous else self.norm

    def _outside_pipeline(self, c: Configuration, model: Model) -> float:
        """Seconds of a step that no schedule hides [s]."""
        return model.profile.around_seconds + (self._norm_seconds(c) or 0.0)

    def choices(
        self, c: Configuration, ends: Ends, *, exact: bool = False, in_flight: Sequence[InFlightCounts] | None = None
    ) -> list[Candidate]:
        """Costs and memory, one treatment of each rank from its front, the one with the least bound first.

        Of more than MOST_TREATMENTS the least seconds of each rank under each limit of the seconds of an update: among
        them is the least (M - 1) slowest + sum of all + slowest update, which no schedule with whole backwards exceeds.

        DoesNotFitError where it does not fit, for the rank that has most too much, and SizesError.

        Arguments:
            exact: count what is in flight in the whole schedule, or one that holds exactly as much.
            in_flight: by stage of the first chunk, in place of what the schedule says.
        """
        model, place, sums = self.model(c), self.placement(c), self.sums(c, ends)
        if in_flight is None:
            in_flight = self.schedules.in_flight(c, exact=exact, kv_share=model.profile.kv_share)
        fronts = self._of_each_rank(
            c, ends, in_flight, self._fronts, lambda p, rank: model.rules.front(sums, in_flight[p], rank)
        )
        offloaded = self._offloaded(c, ends, fronts)
        worst = max(range(c.pipeline), key=lambda p: fronts[p][0].too_many * (not offloaded[p]))
        if fronts[worst][0].too_many and not offloaded[worst]:
            raise DoesNotFitError(stage_group=worst, too_many=fronts[worst][0].too_many, limit=place.limits[worst])

        tied, seconds_of = self._ties(c, ends), partial(self._seconds, c, sums)
        found = [
            self._candidate(c, ends, sums, tied, memories)
            for treatments in with_offloads(fronts, offloaded)
            for memories in one_of_each_rank(c.positions, treatments, seconds_of)
        ]
        return sorted(found, key=lambda each: (float(f"{each.bound:.8e}"), each.num_shards, each.memory_bytes))

    def _seconds(
        self, c: Configuration, sums: StageSums, memories: Sequence[RankMemory], split_share: Floats | None = None
    ) -> StageSeconds:
        """[S] seconds of the stages under these treatments of their ranks, [P]; the share of its schedule, unless
        given."""
        treatments = [(memories[p], v) for p, v in zip(c.positions, c.chunks, strict=True)]
        return stage_seconds(
            sums,
            self.placement(c).on,
            again=sums.seconds_again([each.recompute[v] for each, v in treatments]),
            shards=[each.shards[v] for each, v in treatments],
            action=self.model(c).profile.action_seconds,
            split_share=self._split_share(c) if split_share is None else split_share,
        )

    def _candidate(
        self, c: Configuration, ends: Ends, sums: StageSums, tied: Ties, memories: Sequence[RankMemory]
    ) -> Candidate:
        seconds, place = self._seconds(c, sums, memories), self.placement(c)
        outside, hops = self._outside_pipeline(c, self.model(c)), place.hop_seconds(sums.before, sums.after)
        return Candidate(
            configuration=c,
            ends=ends,
            models={size: self.model(c, size) for size in {*c.tensors}},
            placement=place,
            sums=sums,
            seconds=seconds,
            tied=tied,
            norm=self._norm_seconds(c),
            memories=tuple(memories),
            bottleneck=float(rank_paces(c, seconds).max()),
            bound=0.0 if c.num_microbatches is None else least_step(c, seconds, hops, tied) + outside,
        )

    def given(self, c: Configuration, ends: Ends, *, recompute: Sequence[str], shards: Sequence[int]) -> Candidate:
        """Its stages treated like that, [S] each, whether that fits or not."""
        sums = self.sums(c, ends)
        in_flight = self.schedules.in_flight(c, exact=True, kv_share=self.model(c).profile.kv_share)
        memories = []
        for p, counted in enumerate(in_flight):
            place = self._rank_place(c, p)
            names, parts = [recompute[s] for s in place.stages], [shards[s] for s in place.stages]
            memories.append(self.model(c).rules.given(sums, counted, place, names, parts))
        return self._candidate(c, ends, sums, self._ties(c, ends), memories)

    def ordered(self, e: Candidate, limit: float, too_many: Sequence[float]) -> Configuration | None:
        """Its configuration with the order of actions that is best for its costs; None if none takes less than the
        limit [s], queueing apart. `too_many`: [P] bytes that each rank has to save; below 0, that are left."""
        c = e.configuration
        named = self.schedules.schedule(replace(c, own=None), microbatches_of(c))
        rows = zip(c.positions, c.chunks, (*c.positions[1:], c.positions[-1]), strict=True)
        sent = e.sums.after / c.tensor * any(too_many)  # a message for each microbatch in flight
        kept = ((e.sums.under(e.memories[p].recompute[v]).kept[s], q != p) for s, (p, v, q) in enumerate(rows))
        held = [float(each + goes * sent[s]) for s, (each, goes) in enumerate(kept)]
        apart = replace(e, seconds=self._seconds(c, e.sums, e.memories, np.ones(c.num_stages)))
        starts = [named, *([] if c.own is None else [c.own])]
        found = None if e.leaving else order_for(starts, apart.costs, e.links, held, too_many)
        if found is None or found[0] + e.model.profile.around_seconds >= limit:
            return None
        return replace(c, own=None if found[1] is named else found[1])

    def _split_share(self, c: Configuration) -> Floats | None:
        """[S] part of the microbatches whose I and W run apart, in the batch that is simulated for the whole."""
        if not c.family.splits_backward:
            return None
        m = microbatches_of(c)
        m = min(short_batches(c, m) if c.is_equal else (), default=m)
        key = c.own or (c.schedule, c.num_chunks, c.counts, m)
        if key not in self._split_shares:
            self._split_shares[key] = num_weight_grads(self.schedules.schedule(c, m))
        return self._split_shares[key]

    def _may_offload(self, c: Configuration, p: int) -> bool:
        rule, actions = c.family.rule, 2 * c.num_stages * (c.num_microbatches or MAX_OFFLOAD_ACTIONS)
        is_known = self.model(c).rules.offloads and self.placement(c).hosts[p] > 0
        return is_known and not rule.is_asynchronous and actions <= MAX_OFFLOAD_ACTIONS

    def _offloaded(
        self, c: Configuration, ends: Ends, fronts: Sequence[Sequence[RankMemory]]
    ) -> list[list[RankMemory]]:
        """[P] treatments of the ranks that cannot keep all, under which activations of the stages of their first, or
        first two, .. chunks wait on the host; as if the link took no time."""
        kept = [{name for each in own for name in each.recompute} == {"none"} and not own[0].too_many for own in fronts]
        ranks = [p for p in range(c.pipeline) if not kept[p] and self._may_offload(c, p)]
        found: list[list[RankMemory]] = [[] for _ in fronts]
        if not ranks:
            return found
        model, place, sums = self.model(c), self.placement(c), self.sums(c, ends)
        action, split_share = model.profile.action_seconds, self._split_share(c)
        seconds = stage_seconds(sums, place.on, action=action, split_share=split_share)
        plain, costs = self.schedules.schedule(c, microbatches_of(c)), seconds.costs(around=0.0, norm=None, tied=())
        for number in range(1, c.num_chunks + 1):
            leaving = [s for s, p in enumerate(c.positions) if p in ranks and s < number * c.pipeline]
            moved = with_offload(plain, stages=leaving, costs=_with_offloads(costs, sums, place, leaving))
            in_flight = by_place(c, count_in_flight(moved))
            for p in ranks:
                treatments = model.rules.offloaded(sums, in_flight[p], self._rank_place(c, p), number)
                found[p] += [each for each in treatments if not each.too_many]
        return found

    def _with_simulated_peaks(self, e: Candidate, timeline: Timeline) -> tuple[RankMemory, ...]:
        """[P] its treatments, with what waits on the host there until its way out is through.

        DoesNotFitError where that is too much.
        """
        c, found = e.configuration, list(e.memories)
        in_flight = by_place(c, count_over_time(timeline))
        for p, memory in enumerate(e.memories):
            if OFFLOAD in memory.recompute:
                place = self._rank_place(c, p)
                found[p] = e.model.rules.given(e.sums, in_flight[p], place, memory.recompute, memory.shards)
            if too_many := found[p].too_many:
                raise DoesNotFitError(stage_group=p, too_many=too_many, limit=memory.limit)
        return tuple(found)

    def least_seconds(
        self, c: Configuration, ends: Ends, *, in_flight: Sequence[InFlightCounts] | None = None
    ) -> float:
        """No order of this work is faster, with any treatment of memory [s]; 0 where M is open.

        Arguments:
            in_flight: where given, what each rank must run again for its memory counts, too (and for much more time).
        """
        if c.num_microbatches is None:
            return 0.0
        model, place, sums = self.model(c), self.placement(c), self.sums(c, ends)
        seconds = stage_seconds(sums, place.on, action=model.profile.action_seconds)
        if "full" in model.rules.sharding:  # each part of an update as if the state were divided or not, the faster one
            divided = stage_seconds(sums, place.on, shards=[c.counts[p] for p in c.positions])
            ahead = sums.rounds.gathers_ahead
            ring, gather = least_rounds(seconds.ring, divided.ring, divided.gather, gathers_ahead=ahead)
            seconds = replace(seconds, ring=ring, step=divided.step, gather=gather)
        again = np.zeros(c.pipeline)
        if in_flight is not None:

            def least_again(p: int, rank: RankPlace) -> float:
                least = 0.0 if self._may_offload(c, p) else model.rules.least_seconds_again(sums, in_flight[p], rank)
                return float(least / place.on.speed[rank.stages[0]])

            again = np.array(self._of_each_rank(c, ends, in_flight, self._again, least_again))
        step = least_step(c, seconds, place.hop_seconds(sums.before, sums.after), self._ties(c, ends), again)
        return step + self._outside_pipeline(c, model)

    def _of_each_rank(
        self,
        c: Configuration,
        ends: Ends,
        in_flight: Sequence[InFlightCounts],
        known: dict[object, Figure],
        find: Callable[[int, RankPlace], Figure],
    ) -> list[Figure]:
        """[P] what is found of each rank with its stages; for the configuration at hand it is kept in `known`."""
        if self._memories_of != c:
            self._memories_of = c
            self._fronts.clear()
            self._again.clear()
        found = []
        for p in range(c.pipeline):
            place = self._rank_place(c, p)
            own = (p, in_flight[p], *((ends[s], ends[s + 1]) for s in place.stages))
            if own not in known:
                known[own] = find(p, place)
            found.append(known[own])
        return found

    def _rank_place(self, c: Configuration, p: int) -> RankPlace:
        return rank_place(c, self.placement(c), p, context_bytes=context_bytes(self.model(c).profile.device))

    def simulate(self, evaluated: Candidate) -> Candidate:
        """The same with seconds and bubble of its step; SizesError where the schedule does not take its sizes,
        DoesNotFitError where the link to the host is too slow for what waits there.

        One batch, warm-up and drain included, or one of the steady state; of equal replicas one is simulated for all. A
        long batch is simulated by a short one, where that gives the same (`long_batch`).
        """
        c, m = evaluated.configuration, microbatches_of(evaluated.configuration)
        is_one = c.is_equal and not evaluated.placement.cards  # replica that is simulated, with the most microbatches
        mean = c.batch / c.counts[0] if is_one else m

        def batch(num_microbatches: int) -> Timeline:
            return simulated_batch(c, costs, evaluated.links, self.schedules, num_microbatches, leaving=leaving)

        costs, leaving = evaluated.costs, evaluated.leaving
        long = long_batch(batch, c, m) if is_one and not leaving else None
        if long is None:
            whole = batch(m)
            memories = self._with_simulated_peaks(evaluated, whole) if leaving else evaluated.memories
            bubble = max(0.0, whole.bubble)  # rounding may take it below
            bubble += (m - mean) * float(evaluated.seconds.work.sum()) / (c.pipeline * whole.makespan or 1.0)
            return replace(evaluated, memories=memories, simulated_seconds=whole.batch_seconds, bubble=bubble)
        (long_seconds, short), s = long, evaluated.seconds
        each = float((s.work + num_weight_grads(short.schedule) * s.overhead).sum())
        busy = mean / c.pipeline * each
        if s.busy_in_collectives.any():  # actions during sums are longer, in its drain alone
            worked = sum(trace.busy for trace in short.ranks)
            busy += (worked - short.schedule.num_microbatches * each) / c.pipeline
        return replace(
            evaluated,
            simulated_seconds=long_seconds + evaluated.model.profile.around_seconds,
            bubble=max(0.0, 1 - busy / long_seconds) if long_seconds > 0 else 0.0,
        )

    def placement(self, c: Configuration) -> Placement:
        """Devices and links of its stages; equal ones are found once. O(devices) the first time."""
        profile = self.model(c).profile
        sizes = (c.pipeline, c.data, c.tensors, len(c.lengths), profile.context, profile.expert)
        key = (sizes, c.positions, c.ranks, c.by_replica)
        if key not in self._placements:
            self._placements[key] = placement_of(c, self.topology, profile)
        return self._placements[key]

    def likeness(self, c: Configuration, ends: Ends) -> object:
        """Alike for configurations with cuts whose steps are: on ranks that lie alike."""
        lies: object = c.ranks
        with suppress(SizesError):  # which a look at it reports
            lies = self.placement(c), self._ties(c, ends)
        return replace(c, ranks=None, by_replica=False), c.counts, ends, lies

    def _ties(self, c: Configuration, ends: Ends) -> Ties:
        """(stages, seconds) of sums over all ranks of stages on several places that hold the same weights."""
        model, together = self.model(c), dict[tuple[int, ...], float]()
        for stages, shared in model.tied_stages(ends):
            together[stages] = together.get(stages, 0.0) + shared * model.profile.gradient_ratio
        held = ((stages, shared) for stages, shared in together.items() if shared > 0)
        seconds = ((stages, self._tied_sum(c, stages).seconds(shared)) for stages, shared in held)
        return tuple(each for each in seconds if each[1] > 0)

    def _tied_sum(self, c: Configuration, stages: Iterable[int]) -> TransferTime:
        places = tuple(sorted({c.positions[stage] for stage in stages}))
        if len(places) == 1:
            return NO_TRANSFER
        context = self.model(c).profile.context  # members of a group that hold the same weights
        key = (c.pipeline, c.data, c.tensors, places, c.ranks, c.by_replica, context)
        if key not in self._tied_sums:
            ranks = [rank for place in places for rank in c.stage_ranks[place][:: c.tensors[place] // context]]
            self._tied_sums[key] = self.topology.ring(ranks, tensor=min(c.tensors) // context)
        return self._tied_sums[key]

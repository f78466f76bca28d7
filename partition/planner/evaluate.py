"""One configuration with its cuts: what each stage costs, what each rank holds, and the simulated step.

Every rank has one network card, on which its messages and its sums of gradients queue; all messages between two stages
take the slowest way between ranks of theirs that share a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from ...schedules.as_one import run_as_one
from ...schedules.builders.late_updates import defer_updates
from ...schedules.ir import Schedule
from ...schedules.registry import build, family
from ...schedules.timing.costs import Costs, Ties
from ...schedules.timing.links import Links
from ...schedules.timing.simulate import simulate
from ...schedules.timing.timeline import Timeline
from ..allocator import certain
from ..in_flight import InFlight, count_in_flight, in_flight_of_turns, merged, steady_in_flight
from ..plans.traffic import StageTraffic, links_of
from ..stage_cost import StageSeconds, StageSums, busiest_share, pace, stage_seconds
from ..stage_memory import MemoryRules, RankMemory, RankPlace
from ..topology import Floats, Topology
from .model import Model
from .placement import Placement, Placements
from .space import Configuration
from .steady import long_batch, short_batches

Ends = tuple[int, ...]
Figure = TypeVar("Figure")
MAX_ACTIONS = 1_000_000  # of one simulation
_KEPT_SCHEDULES = 8


class MisfitError(Exception):
    """No treatment makes it fit: on `stage_group` it takes `too_many` bytes more than there are."""

    def __init__(self, *, stage_group: int, too_many: float, limit: float) -> None:
        super().__init__(f"{too_many:,.0f} bytes too many")
        self.stage_group, self.too_many, self.limit = stage_group, too_many, limit


class RefusedError(ValueError):
    """The schedule does not take these sizes."""


class TooLongError(RefusedError):
    """More actions than are simulated or counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluated:
    """A configuration with cuts that fits.

    Arguments:
        tied: ((stage, stage), seconds) of sums of gradients of weights that two stages on different ranks share.
        bottleneck: pace of the slowest rank [s a microbatch].
        bound: no order of this work is faster [s]; 0 where the number of microbatches is open.
    """

    configuration: Configuration
    ends: Ends
    model: Model
    placement: Placement
    sums: StageSums
    seconds: StageSeconds
    tied: Ties
    memories: tuple[RankMemory, ...]
    bottleneck: float
    bound: float

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return max(memory.total for memory in self.memories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Seconds from batch to batch, and the bubble."""

    seconds: float
    bubble: float


class Evaluator:
    """Costs, memory and simulation of configurations.

    Arguments:
        model_of: of a microbatch and a tensor size.
        norm: of the global norm under a flush, see `Costs` [s]; None: there is none.
    """

    def __init__(
        self,
        topology: Topology,
        rules_of: Callable[[Model], MemoryRules],
        model_of: Callable[[int, int], Model],
        *,
        norm: float | None = None,
    ) -> None:
        self.norm = norm
        self.topology, self.model_of, self._rules_of = topology, model_of, rules_of
        self.placements = Placements(topology)
        self._flights: dict[object, tuple[InFlight, ...]] = {}
        self._schedules: dict[object, Schedule] = {}
        # Of the configuration at hand: cuts move, and most ranks keep theirs.
        self._memories_of: tuple[Configuration, Sequence[InFlight]] | None = None
        self._memories: dict[object, RankMemory] = {}
        self._again: dict[object, float] = {}  # seconds that run again, at least

    def model(self, c: Configuration) -> Model:
        """The model at its microbatch and tensor size."""
        return self.model_of(c.microbatch_size, c.tensor)

    def norm_seconds(self, schedule: str | None) -> float | None:
        """Seconds of the global norm, for which ranks wait under a flush alone [s]."""
        return None if schedule is None or family(schedule).rule.is_asynchronous else self.norm

    def _beside(self, c: Configuration, model: Model) -> float:
        """Seconds of a step that no schedule hides [s]."""
        return model.profile.around_seconds + (self.norm_seconds(c.schedule) or 0.0)

    def evaluate(
        self, c: Configuration, ends: Ends, *, exact: bool = False, flights: Sequence[InFlight] | None = None
    ) -> Evaluated:
        """Costs and memory; MisfitError where it does not fit, for the rank that has most too much, and RefusedError.

        Arguments:
            exact: count what is in flight in the whole schedule, or one that holds exactly as much.
            flights: by stage of the first chunk, in place of what the schedule says.
        """
        model, place, positions = self.model(c), self.placements.of(c), c.positions
        sums, rules = model.stages(ends), self._rules_of(model)
        if flights is None:
            flights = self.in_flight(c, exact=exact)
        memories = self._by_rank(c, ends, flights, self._memories, lambda p, rank: rules.fit(sums, flights[p], rank))
        worst = max(range(c.pipeline), key=lambda p: memories[p].too_many)
        if memories[worst].too_many:
            raise MisfitError(stage_group=worst, too_many=memories[worst].too_many, limit=place.limits[worst])
        treatments = [(memories[p].treatment, s // c.pipeline) for s, p in enumerate(positions)]
        seconds = _seconds(
            c,
            sums,
            place,
            recompute=[each.recompute[v] for each, v in treatments],
            shards=[each.shards[v] for each, v in treatments],
            action=model.profile.action_seconds,
        )
        tied = self.placements.ties(c, model.tied_stages(ends))
        return Evaluated(
            configuration=c,
            ends=ends,
            model=model,
            placement=place,
            sums=sums,
            seconds=seconds,
            tied=tied,
            memories=tuple(memories),
            bottleneck=float(pace(work=_work(c, seconds), links=_links(c, seconds)).max()),
            bound=0.0 if c.num_microbatches is None else _bound(c, seconds, tied) + self._beside(c, model),
        )

    def least_seconds(self, c: Configuration, ends: Ends, *, flights: Sequence[InFlight] | None = None) -> float:
        """No order of this work is faster, whatever is done about memory [s]; 0 where M is open.

        Arguments:
            flights: where given, what each rank must run again for its memory counts, too (and for much more time).
        """
        if c.num_microbatches is None:
            return 0.0
        model, counts, place, rules = self.model(c), c.counts, self.placements.of(c), self._rules_of(self.model(c))
        sums, may_shard = model.stages(ends), "full" in rules.sharding
        seconds = _seconds(
            c,
            sums,
            place,
            recompute=["none"] * c.num_stages,
            shards=[counts[p] if may_shard else 1 for p in c.positions],
            action=model.profile.action_seconds,
        )
        again = np.zeros(c.pipeline)
        if flights is not None:
            least = self._by_rank(
                c, ends, flights, self._again, lambda p, rank: rules.least_seconds_again(sums, flights[p], rank)
            )
            again = np.array(least) / np.array(place.speeds)
        tied = self.placements.ties(c, model.tied_stages(ends))
        return _bound(c, seconds, tied, again) + self._beside(c, model)

    def _by_rank(
        self,
        c: Configuration,
        ends: Ends,
        flights: Sequence[InFlight],
        known: dict[object, Figure],
        find: Callable[[int, RankPlace], Figure],
    ) -> list[Figure]:
        """[P] what is found of each rank with its stages; for the configuration at hand it is kept in `known`."""
        if self._memories_of != (c, flights):
            self._memories_of = c, flights
            self._memories.clear()
            self._again.clear()
        place, counts, found = self.placements.of(c), c.counts, []
        for p, stages in enumerate(_stages_of(c.positions, c.pipeline)):
            own = (p, *((ends[s], ends[s + 1]) for s in stages))
            if own not in known:
                rank = RankPlace(
                    stages=stages,
                    replicas=counts[p],
                    tensor=c.tensor,
                    limit=place.limits[p],
                    ring=place.rings[p],
                    streams=family(c.schedule).rule.is_asynchronous,
                    beside=certain(self.model(c).profile.device),
                )
                known[own] = find(p, rank)
            found.append(known[own])
        return found

    def simulate(self, evaluated: Evaluated) -> Simulated:
        """One batch, warm-up and drain included, or one of the steady state; of equal replicas one stands for all.

        A long batch is simulated by a short one, where that tells the same (`steady`).
        """
        c, m = evaluated.configuration, _per_replica(evaluated.configuration)
        long = long_batch(partial(self._simulate, evaluated), c, m) if c.is_equal else None
        if long is not None:
            s = evaluated.seconds
            each = float((s.work + _weight_grads(long.short.schedule) * s.overhead).sum())
            busy = m / c.pipeline * each
            if s.held.any():  # actions beside sums are longer, in its drain alone
                worked = sum(trace.busy for trace in long.short.ranks)
                busy += (worked - long.short.schedule.num_microbatches * each) / c.pipeline
            return Simulated(
                seconds=long.seconds + evaluated.model.profile.around_seconds,
                bubble=max(0.0, 1 - busy / long.seconds) if long.seconds > 0 else 0.0,
            )
        whole = self._simulate(evaluated, m)
        return Simulated(seconds=whole.batch_seconds, bubble=max(0.0, whole.bubble))  # rounding may take it below

    def _simulate(self, evaluated: Evaluated, num_microbatches: int) -> Timeline:
        c, s = evaluated.configuration, evaluated.seconds
        if 2 * c.num_stages * num_microbatches > MAX_ACTIONS:
            raise too_long(c, num_microbatches)
        schedule = self._schedule(c, num_microbatches)
        if schedule.rule.updates_may_wait and s.ring.any():
            schedule = defer_updates(schedule)  # as the runtime does, so that sums overlap with compute
        costs = Costs(
            forward=s.forward.tolist(),
            backward=s.backward.tolist(),
            update=s.step.tolist(),
            overhead=s.overhead.tolist(),
            message_overhead=s.message_overhead.tolist(),
            around=evaluated.model.profile.around_seconds,
            norm=self.norm_seconds(c.schedule),
            sum_busy=s.sum_busy.tolist(),
            tied=evaluated.tied,
        )
        return simulate(schedule, costs, _network(evaluated))

    def num_actions(self, c: Configuration) -> int:
        """Actions in the simulation of a batch, or of the shortest that may stand for it."""
        m = _per_replica(c)
        return 2 * c.num_stages * min(short_batches(c, m) if c.is_equal else (), default=m)

    def in_flight(self, c: Configuration, *, exact: bool) -> tuple[InFlight, ...]:
        """[P] counts of the first chunk's stages; where not `exact`, the steady state's or those of a shorter batch.

        Neither holds less.

        RefusedError where the schedule does not take these sizes.
        """
        if not (exact or c.is_equal):
            return steady_in_flight(c.schedule, c.counts, c.num_microbatches)
        m = _per_replica(c)
        known, rest = family(c.schedule), m % c.pipeline
        full, is_alike = known.full_after, not (known.takes_chunks and rest)  # a shorter batch holds exactly as much
        if c.is_equal and full is not None and (is_alike or not exact) and m > (full + 2) * c.pipeline:
            m = (full + 1) * c.pipeline + rest
        if 2 * c.num_stages * m > MAX_ACTIONS:
            raise too_long(c, m)
        key = (c.schedule, c.num_chunks, c.pipeline if c.is_equal else c.counts, m)
        if key not in self._flights:
            if c.is_equal and known.turns is not None:
                ranks = in_flight_of_turns(known.turns(c.pipeline, m, c.num_chunks), num_chunks=c.num_chunks)
            else:
                ranks = count_in_flight(self._schedule(c, m))
            if not c.is_equal:
                starts = np.cumsum([0, *c.counts])
                ranks = tuple(merged(ranks[a:b]) for a, b in pairwise(starts))
            self._flights[key] = ranks
        return self._flights[key]

    def _schedule(self, c: Configuration, num_microbatches: int) -> Schedule:
        """Schedule of one replica, where all are equal; else of all. Tensor ranks count as one."""
        chunks = c.num_chunks if c.num_chunks > 1 else None
        counts = None if c.is_equal else c.counts
        key = (c.schedule, c.pipeline, chunks, counts, num_microbatches)
        if key not in self._schedules:
            if len(self._schedules) >= _KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            options: dict[str, object] = {} if counts is None else {"replicas": counts}
            try:
                self._schedules[key] = build(
                    c.schedule,
                    num_ranks=c.pipeline if counts is None else sum(counts),
                    num_microbatches=num_microbatches,
                    num_chunks=chunks,
                    **options,
                )
            except ValueError as error:
                raise RefusedError(str(error)) from None
        return self._schedules[key]


def _weight_grads(schedule: Schedule) -> Floats:
    """[S] part of the microbatches whose W stands by itself."""
    if not schedule.split_stages:
        return np.zeros(schedule.num_stages)
    joined, m = run_as_one(schedule), schedule.num_microbatches
    return np.array([(s in schedule.split_stages) - len(joined.get(s, ())) / m for s in range(schedule.num_stages)])


def too_long(c: Configuration, num_microbatches: int) -> TooLongError:
    """Error for more actions than are simulated or counted."""
    return TooLongError(
        f"{num_microbatches:,} microbatches of {c.num_stages} stages: more than {MAX_ACTIONS:,} actions"
    )


def _per_replica(c: Configuration) -> int:
    return c.batch // c.counts[0] if c.is_equal else c.batch


def _seconds(
    c: Configuration,
    sums: StageSums,
    place: Placement,
    *,
    recompute: Sequence[str],
    shards: Sequence[int],
    action: float,
) -> StageSeconds:
    group = np.array(c.positions)
    return stage_seconds(
        sums,
        speeds=np.asarray(place.speeds)[group],
        inward=place.inward,
        outward=place.outward,
        rings=[place.rings[p] for p in group],
        tensor=c.tensor,
        recompute=recompute,
        shards=np.array(shards, dtype=np.float64),
        action=action,
    )


def _stages_of(positions: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """[P] stages of each rank."""
    stages: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, at in enumerate(positions):
        stages[at].append(stage)
    return [tuple(each) for each in stages]


def traffic_of(evaluated: Evaluated) -> tuple[StageTraffic, ...]:
    """[S] messages of the stages, and the parts of their updates."""
    c, seconds = evaluated.configuration, evaluated.seconds
    return tuple(
        StageTraffic(
            message_bytes=float(evaluated.sums.behind[s]),
            latency=link.latency,
            seconds_per_byte=link.seconds_a_byte / c.tensor,
            sum_seconds=float(seconds.ring[s]),
            optimizer_seconds=float(seconds.step[s]),
            gather_seconds=float(seconds.gather[s]),
            message_seconds=link.busy,
            sum_busy=float(seconds.sum_busy[s]),
        )
        for s, link in enumerate(evaluated.placement.outward)
    )


def _network(evaluated: Evaluated) -> Links:
    """Links between the ranks of the simulated schedule.

    Where one replica stands for all, rank P + p is what rank p sums its gradients with.
    """
    c = evaluated.configuration
    starts = range(c.pipeline + 1) if c.is_equal else [0, *accumulate(c.counts)]
    ranks = [range(a, b) for a, b in pairwise(starts)]
    rings = [(p, p + c.pipeline) for p in range(c.pipeline)] if c.is_equal else ranks
    m = _per_replica(c)
    return links_of(traffic_of(evaluated), ranks, positions=c.positions, rings=rings, num_microbatches=m)


def by_rank(c: Configuration, figures: Floats) -> Floats:
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
    return by_rank(c, s.work) * _share(c) + _held(c, s)


def _held(c: Configuration, s: StageSeconds) -> Floats:
    """[P] of those, for which it does not compute but is busy with its sums."""
    return by_rank(c, s.held) * _updates(c)


def _links(c: Configuration, s: StageSeconds) -> Floats:
    """[P] seconds a microbatch of its links: all that its busiest replica sends, and its sums of gradients."""
    return by_rank(c, s.sending) * _share(c) + by_rank(c, s.around) * _updates(c)


def _updates_behind(c: Configuration, s: StageSeconds, *, around: Floats) -> Floats:
    """[P] seconds from a rank's last backward to the end of its updates, at least.

    All its steps, and the sums of the one stage whose backward was last: those of others may have gone on beside it.

    Arguments:
        around: [S] what goes round for an update, or the part of it that is not counted to the rank's work.
    """
    least = np.full(c.pipeline, np.inf)
    np.minimum.at(least, list(c.positions), around + s.step)
    return np.asarray(np.maximum(by_rank(c, s.step), least), dtype=np.float64)


def stage_paces(c: Configuration, s: StageSeconds) -> Floats:
    """[S] seconds a microbatch of the slower lane of each stage alone."""
    share, updates = (each[list(c.positions)] for each in (_share(c), _updates(c)))
    return pace(work=s.work * share + s.held * updates, links=s.sending * share + s.around * updates)


def _bound(c: Configuration, s: StageSeconds, tied: Ties, again: Floats | float = 0.0) -> float:
    """A lower bound of the step [s]; `again`: [P] further seconds of F and B a microbatch, whichever stage's they are.

    Of a flushed batch: the first microbatch must reach a rank, the rank does its work, and the last gradient must get
    back to the first rank, which updates behind it, and behind sums of weights that its first stage shares. What keeps
    a rank busy with sums is a part of its own work, whenever it comes, and no part of that way back. Where the backward
    is split, what comes behind may be weight gradients, and the way back takes no time that is known.
    """
    work, held = (_work(c, s) + again * _share(c)) * c.batch, _held(c, s) * c.batch
    links = float(_links(c, s).max()) * c.batch
    if family(c.schedule).rule.is_asynchronous:
        return max(float((work + by_rank(c, s.step) * _updates(c) * c.batch).max()), links)
    update = _updates_behind(c, s, around=s.around - s.held)
    front, around = c.pipeline - 1, s.overhead + s.message_overhead
    head, tail = (
        np.concatenate([[0.0], np.cumsum(own + around[:front] + s.message[:front])])
        for own in (s.forward[:front], s.backward[:front])
    )
    if family(c.schedule).splits_backward:
        return max(float((head + work + update).max()), links)
    shared = max((seconds + float(s.step[0]) for (first, *_), seconds in tied if first == 0), default=0.0)
    back = work - held + tail + max(_updates_behind(c, s, around=s.around)[0], shared)
    return max(float((head + np.maximum(work + update, back)).max()), links)

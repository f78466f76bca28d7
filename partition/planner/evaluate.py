"""One configuration with its cuts: what each stage costs, what each rank holds, and the simulated step.

Seconds of a stage on its ranks, of one microbatch:

    F, B      of its nodes, over the speed of its slowest device; recomputed stages run F once more in B
    message   latency + crossing bytes / T / bandwidth of the slowest link between the two stages' ranks
    update    sum of gradients in a ring over D replicas, then the optimizer's step (a share of it where it is divided)

Without a flush the sum overlaps with compute, so that only the step stands in the program. No step is faster than what
a rank has to send in it, which the simulator (whose messages do not queue) would not see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...schedules.ir import Schedule
from ...schedules.registry import build, family
from ...schedules.timing.costs import Costs
from ...schedules.timing.simulate import simulate
from ..solver.antichains import Floats
from .in_flight import InFlight, count_in_flight, merged
from .links import Machine, ring_seconds
from .memory import MemoryRules, RankMemory, RankPlace
from .model import Model, StageSums
from .place import Place, Places
from .space import Configuration

Ends = tuple[int, ...]
_KEPT_SCHEDULES = 8


class MisfitError(Exception):
    """No treatment makes it fit: on `stage_group` it takes `too_many` bytes more than there are."""

    def __init__(self, *, stage_group: int, too_many: float, limit: float) -> None:
        super().__init__(f"{too_many:,.0f} bytes too many")
        self.stage_group, self.too_many, self.limit = stage_group, too_many, limit


class RefusedError(ValueError):
    """The schedule does not take these sizes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSeconds:
    """[S] seconds of each stage: of a microbatch (F, B, the longer message, all that it sends) and of a batch."""

    forward: Floats
    backward: Floats
    message: Floats
    sending: Floats
    ring: Floats
    step: Floats

    @property
    def work(self) -> Floats:
        """[S] F + B."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluated:
    """A configuration with cuts that fits. `bound`: no order of this work is faster [s]."""

    configuration: Configuration
    ends: Ends
    model: Model
    sums: StageSums
    seconds: StageSeconds
    memories: tuple[RankMemory, ...]
    bottleneck: float
    bound: float

    @property
    def memory_bytes(self) -> float:
        """Of the fullest rank [bytes]."""
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
    """

    def __init__(
        self, machine: Machine, rules_of: Callable[[Model], MemoryRules], model_of: Callable[[int, int], Model]
    ) -> None:
        self.machine, self.model_of, self._rules_of = machine, model_of, rules_of
        self.places = Places(machine)
        self._flights: dict[object, tuple[InFlight, ...]] = {}
        self._schedules: dict[object, Schedule] = {}

    def model(self, c: Configuration) -> Model:
        """Of its microbatch and tensor size."""
        return self.model_of(c.microbatch_size, c.tensor)

    def evaluate(self, c: Configuration, ends: Ends, *, exact: bool = False) -> Evaluated:
        """Costs and memory; MisfitError where it does not fit, for the rank that has most too much, and RefusedError.

        Arguments:
            exact: count what is in flight in the whole schedule, however long.
        """
        model, place = self.model(c), self.places.of(c)
        sums = model.stages(ends)
        rules, counts, flights = self._rules_of(model), c.counts, self.in_flight(c, exact=exact)
        memories = []
        for p in range(c.pipeline):
            rank = RankPlace(
                position=p, pipeline=c.pipeline, replicas=counts[p], tensor=c.tensor, limit=place.limits[p]
            )
            memory = rules.fit(sums, flights[p], rank)
            memories.append(memory)
        worst = max(range(c.pipeline), key=lambda p: memories[p].too_many)
        if memories[worst].too_many:
            raise MisfitError(stage_group=worst, too_many=memories[worst].too_many, limit=place.limits[worst])
        seconds = _seconds(c, sums, place, memories)
        bottleneck, bound = _bounds(c, seconds)
        return Evaluated(
            configuration=c,
            ends=ends,
            model=model,
            sums=sums,
            seconds=seconds,
            memories=tuple(memories),
            bottleneck=bottleneck,
            bound=bound,
        )

    def simulate(self, evaluated: Evaluated) -> Simulated:
        """One batch, warm-up and drain included, or one of the steady state; of equal replicas one stands for all."""
        c, s = evaluated.configuration, evaluated.seconds
        schedule = self._schedule(c, _per_replica(c))
        update = s.step if schedule.is_asynchronous else s.ring + s.step
        costs = Costs(
            forward=s.forward.tolist(),
            backward=s.backward.tolist(),
            latency=s.message.tolist(),
            update=update.tolist(),
        )
        timeline = simulate(schedule, costs)
        seconds, sending = timeline.batch_seconds, _sending(c, s)
        busy = (1 - timeline.bubble) * seconds
        seconds = max(seconds, sending)
        return Simulated(seconds=seconds, bubble=1 - busy / seconds if seconds > 0 else 0.0)

    def num_actions(self, c: Configuration) -> int:
        """That a simulation of a batch takes."""
        return 2 * c.num_stages * (_per_replica(c) if c.is_equal else c.num_microbatches)

    def in_flight(self, c: Configuration, *, exact: bool) -> tuple[InFlight, ...]:
        """By stage of the first chunk. Where not `exact`, of a shorter batch where that holds at least as much.

        RefusedError where the schedule does not take these sizes.
        """
        m = _per_replica(c)
        full = family(c.schedule).full_after
        if not exact and c.is_equal and full is not None and m > (full + 2) * c.pipeline:
            m = (full + 1) * c.pipeline + m % c.pipeline
        key = (c.schedule, c.num_chunks, c.pipeline if c.is_equal else c.counts, m)
        if key not in self._flights:
            ranks = count_in_flight(self._schedule(c, m))
            if not c.is_equal:
                starts = np.cumsum([0, *c.counts])
                ranks = tuple(merged(ranks[a:b]) for a, b in pairwise(starts))
            self._flights[key] = ranks
        return self._flights[key]

    def _schedule(self, c: Configuration, num_microbatches: int) -> Schedule:
        """Of one replica, where all are equal; else of all. Tensor ranks count as one."""
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


def _per_replica(c: Configuration) -> int:
    return c.num_microbatches // c.counts[0] if c.is_equal else c.num_microbatches


def _seconds(c: Configuration, sums: StageSums, place: Place, memories: list[RankMemory]) -> StageSeconds:
    group = np.arange(c.num_stages) % c.pipeline
    chunk = np.arange(c.num_stages) // c.pipeline
    speeds = np.asarray(place.speeds)[group]
    treatments = [memories[p].treatment for p in group]
    again = np.array([each.recompute[v] for each, v in zip(treatments, chunk, strict=True)])
    shards = np.array([each.shards[v] for each, v in zip(treatments, chunk, strict=True)])
    per_byte = [np.array([link.seconds_a_byte for link in links]) / c.tensor for links in (place.inward, place.outward)]
    latency = [np.array([link.latency for link in links]) for links in (place.inward, place.outward)]
    inward, outward = sums.before * per_byte[0], sums.behind * per_byte[1]
    return StageSeconds(
        forward=sums.forward / speeds,
        backward=(sums.backward + again * sums.forward) / speeds,
        message=np.maximum(latency[0] + inward, latency[1] + outward),
        sending=inward + outward,
        ring=np.array(
            [
                ring_seconds(float(sums.weights[s]), c.counts[p], place.rings[p]) if sums.weights[s] > 0 else 0.0
                for s, p in enumerate(group)
            ]
        ),
        step=sums.update / speeds / shards,
    )


def _shares(c: Configuration) -> Floats:
    """[P] microbatches of the busiest replica."""
    return -(-c.num_microbatches // np.array(c.counts))


def _by_rank(c: Configuration, figures: Floats) -> Floats:
    """[P] sums over the chunks."""
    return np.asarray(figures.reshape(c.num_chunks, c.pipeline).sum(axis=0), dtype=np.float64)


def _sending(c: Configuration, s: StageSeconds) -> float:
    """What the busiest rank has to send in a batch [s]; of a stream its rings as well, once an update."""
    total = _by_rank(c, s.sending) * _shares(c)
    rule = family(c.schedule).rule
    if rule.is_asynchronous:
        total = total + _by_rank(c, s.ring) * rule.updates_per_batch(c.num_microbatches, c.counts)
    return float(total.max())


def _bounds(c: Configuration, s: StageSeconds) -> tuple[float, float]:
    """The bottleneck a microbatch, and a lower bound of the step [s].

    Of a flushed batch: the first microbatch must reach a rank, the rank does its work, and the last gradient must get
    back to the first rank, which updates behind it.
    """
    work, update = _by_rank(c, s.work) * _shares(c), _by_rank(c, s.ring + s.step)
    sending = _sending(c, s)
    bottleneck = max(float(work.max()), sending) / c.num_microbatches
    rule = family(c.schedule).rule
    if rule.is_asynchronous:
        updates = rule.updates_per_batch(c.num_microbatches, c.counts)
        return bottleneck, max(float((work + _by_rank(c, s.step) * updates).max()), sending)
    front = c.pipeline - 1
    head, tail = (
        np.concatenate([[0.0], np.cumsum(ways)])
        for ways in (s.forward[:front] + s.message[:front], s.backward[:front] + s.message[1 : front + 1])
    )
    return bottleneck, max(float((head + work + np.maximum(update, tail + update[0])).max()), sending)

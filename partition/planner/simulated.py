"""The simulated step of a configuration with its cuts.

Every rank has one network card, on which its messages and its sums of gradients queue; all messages between two stages
take the slowest way between ranks of theirs that share a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from ...schedules.ir import Schedule
from ...schedules.program import run_as_one
from ...schedules.timing.costs import Costs
from ...schedules.timing.links import Links
from ...schedules.timing.simulate import simulate
from ...schedules.timing.timeline import Timeline
from ...schedules.transform import defer_updates
from ..plans.traffic import StageTraffic, links_of
from ..topology import Floats
from .built import BuiltSchedules, microbatches_of
from .evaluated import Evaluated
from .space import Configuration
from .steady import long_batch, short_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Seconds from batch to batch, and the bubble."""

    seconds: float
    bubble: float


def simulated(evaluated: Evaluated, schedules: BuiltSchedules, *, norm: float | None = None) -> Simulated:
    """One batch, warm-up and drain included, or one of the steady state; of equal replicas one stands for all.

    A long batch is simulated by a short one, where that tells the same (`steady`).

    Arguments:
        norm: of the global norm, for which all ranks wait [s]; None: there is none.
    """
    c, m = evaluated.configuration, microbatches_of(evaluated.configuration)
    long = long_batch(partial(simulated_batch, evaluated, schedules, norm=norm), c, m) if c.is_equal else None
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
    whole = simulated_batch(evaluated, schedules, m, norm=norm)
    return Simulated(seconds=whole.batch_seconds, bubble=max(0.0, whole.bubble))  # rounding may take it below


def simulated_batch(
    evaluated: Evaluated, schedules: BuiltSchedules, num_microbatches: int, *, norm: float | None = None
) -> Timeline:
    """Every action of a batch of so many microbatches; RefusedError where its schedule can't be built."""
    c, s = evaluated.configuration, evaluated.seconds
    schedule = schedules.schedule(c, num_microbatches)
    if schedule.rule.updates_may_wait and s.ring.any():
        schedule = defer_updates(schedule)  # as the runtime does, so that sums overlap with compute
    costs = Costs(
        forward=s.forward.tolist(),
        backward=s.backward.tolist(),
        update=s.step.tolist(),
        overhead=s.overhead.tolist(),
        message_overhead=s.message_overhead.tolist(),
        around=evaluated.model.profile.around_seconds,
        norm=norm,
        sum_busy=s.sum_busy.tolist(),
        tied=evaluated.tied,
    )
    return simulate(schedule, costs, _network(evaluated))


def num_actions(c: Configuration) -> int:
    """Actions in the simulation of a batch, or of the shortest that may stand for it."""
    m = microbatches_of(c)
    return 2 * c.num_stages * min(short_batches(c, m) if c.is_equal else (), default=m)


def _weight_grads(schedule: Schedule) -> Floats:
    """[S] part of the microbatches whose W stands by itself."""
    if not schedule.split_stages:
        return np.zeros(schedule.num_stages)
    joined, m = run_as_one(schedule), schedule.num_microbatches
    return np.array([(s in schedule.split_stages) - len(joined.get(s, ())) / m for s in range(schedule.num_stages)])


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
    m = microbatches_of(c)
    return links_of(traffic_of(evaluated), ranks, positions=c.positions, rings=rings, num_microbatches=m)

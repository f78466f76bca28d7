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
from ...schedules.timing.simulate import simulate
from ...schedules.timing.timeline import Timeline
from ...schedules.transform import with_late_updates
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
    c, links = evaluated.configuration, evaluated.links
    if not c.is_equal:
        starts = (0, *accumulate(c.counts))
        links = links.on([range(a, b) for a, b in pairwise(starts)])
    schedule = with_late_updates(schedules.schedule(c, num_microbatches), links)
    return simulate(schedule, evaluated.costs(norm=norm), links)


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

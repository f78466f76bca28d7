"""Schedules of configurations, built once each, and what is in flight in them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ...schedules.ir import Schedule
from ...schedules.registry import build, family
from ..memory import Moments, count_in_flight, in_flight_of_turns, merged, steady_in_flight
from .space import Configuration

MAX_ACTIONS = 1_000_000  # of one simulation
_KEPT_SCHEDULES = 8


class RefusedError(ValueError):
    """The schedule does not take these sizes."""


class TooLongError(RefusedError):
    """More actions than are simulated or counted."""


class BuiltSchedules:
    """The last few schedules, and all counts of what is in flight."""

    def __init__(self) -> None:
        self._flights: dict[object, tuple[Moments, ...]] = {}
        self._schedules: dict[object, Schedule] = {}

    def in_flight(self, c: Configuration, *, exact: bool) -> tuple[Moments, ...]:
        """[P] counts of the first chunk's stages; where not `exact`, the steady state's or those of a shorter batch.

        Neither holds less.

        RefusedError where the schedule does not take these sizes.
        """
        if not (exact or c.is_equal):
            return steady_in_flight(c.schedule, c.counts, c.num_microbatches)
        m = microbatches_of(c)
        known, rest = family(c.schedule), m % c.pipeline
        full, is_alike = known.full_after, not (known.takes_chunks and rest)  # a shorter batch holds exactly as much
        if c.is_equal and full is not None and (is_alike or not exact) and m > (full + 2) * c.pipeline:
            m = (full + 1) * c.pipeline + rest
        _check_length(c, m)
        key = (c.schedule, c.num_chunks, c.pipeline if c.is_equal else c.counts, m)
        if key not in self._flights:
            if c.is_equal and known.turns is not None:
                ranks = in_flight_of_turns(known.turns(c.pipeline, m, c.num_chunks), num_chunks=c.num_chunks)
            else:
                ranks = count_in_flight(self.schedule(c, m))
            if not c.is_equal:
                starts = np.cumsum([0, *c.counts])
                ranks = tuple(merged(ranks[a:b]) for a, b in pairwise(starts))
            self._flights[key] = ranks
        return self._flights[key]

    def schedule(self, c: Configuration, num_microbatches: int) -> Schedule:
        """Schedule of one replica, where all are equal; else of all. Tensor ranks count as one.

        RefusedError where it does not take these sizes.
        """
        _check_length(c, num_microbatches)
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


def _check_length(c: Configuration, num_microbatches: int) -> None:
    if 2 * c.num_stages * num_microbatches > MAX_ACTIONS:
        raise TooLongError(
            f"{num_microbatches:,} microbatches of {c.num_stages} stages: more than {MAX_ACTIONS:,} actions"
        )


def microbatches_of(c: Configuration) -> int:
    """Microbatches of the schedule that is built: of one replica where all are equal, else of all."""
    return c.batch // c.counts[0] if c.is_equal else c.batch

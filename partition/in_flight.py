"""Microbatches that each stage of a rank holds at once, counted in the schedule's own programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..schedules.alive import activations
from ..schedules.ir import BACKWARD_OPS, LAST_USES, MOVE_OPS, Action, Op, Schedule
from ..schedules.registry import family
from ..schedules.versions import derive_versions
from .topology import Floats

RUNNING_ON = 1 << 20  # microbatches beyond those in flight, where nobody says how many a batch has


class Peak(NamedTuple):
    """[V] microbatches held, [V] those that are made again, [V] 1 where there are gradients."""

    held: Floats
    anew: Floats
    graded: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlight:
    """One rank, with V stages.

    Arguments:
        held: [moments, V] microbatches between F and the end of B (or W), at every moment at which they may be most.
        graded: [moments, V] 1 where a backward has left gradients by then, else 0.
        in_backward, graded_backward: [moments, V] the same while a backward runs, and
        running: [moments] whose backward that is, as a chunk.
        versions: of the weights.
        num_microbatches: that the rank runs at all, per stage.
    """

    held: Floats
    graded: Floats
    in_backward: Floats
    graded_backward: Floats
    running: np.ndarray
    versions: int
    num_microbatches: int

    def peak(self, kept: Floats, again: Floats, gradients: Floats) -> Peak:
        """When most is there.

        Arguments:
            kept: [V] bytes from F to B of each microbatch.
            again: [V] bytes that the running backward makes anew (recompute), else 0.
            gradients: [V] bytes of a set of them.
        """
        forward = self.held @ kept + self.graded @ gradients
        backward = self.in_backward @ kept + again[self.running] + self.graded_backward @ gradients
        anew = np.zeros(len(kept))
        at = int(backward.argmax())
        if backward[at] > forward.max():
            anew[self.running[at]] = 1.0
            return Peak(held=self.in_backward[at], anew=anew, graded=self.graded_backward[at])
        at = int(forward.argmax())
        return Peak(held=self.held[at], anew=anew, graded=self.graded[at])


def count_in_flight(schedule: Schedule) -> tuple[InFlight, ...]:
    """Microbatches in flight on each rank. O(actions)."""
    versions = derive_versions(schedule).peak_live if schedule.is_asynchronous else (1,) * schedule.num_ranks
    return tuple(
        _of_program(program, stages, version, streams=schedule.is_asynchronous)
        for program, stages, version in zip(schedule.programs, schedule.placement, versions, strict=True)
    )


def steady_in_flight(schedule: str, counts: Sequence[int], num_microbatches: int | None) -> tuple[InFlight, ...]:
    """The closed form by stage, for stages of so many replicas, in the steady state: never less than what is counted.

    Stage s holds ceil(D_s + .. + D_P-1 / D_s) microbatches, and under a flush no more than its share of the batch.
    """
    found, rule = [], family(schedule).rule
    for at, count in enumerate(counts):
        depth = -(-sum(counts[at:]) // count)
        own = depth + RUNNING_ON if num_microbatches is None else -(-num_microbatches // count)
        if not rule.is_asynchronous:
            depth = min(depth, own)
        held = np.array([[float(depth)]])
        found.append(
            InFlight(
                held=held,
                graded=np.ones((1, 1)),
                in_backward=held,
                graded_backward=np.ones((1, 1)),
                running=np.zeros(1, dtype=int),
                versions=rule.versions_kept(depth),
                num_microbatches=own,
            )
        )
    return tuple(found)


def merged(ranks: Sequence[InFlight]) -> InFlight:
    """The most that any of these ranks holds: replicas of one stage."""
    if len(ranks) == 1:
        return ranks[0]
    return InFlight(
        held=np.concatenate([rank.held for rank in ranks]),
        graded=np.concatenate([rank.graded for rank in ranks]),
        in_backward=np.concatenate([rank.in_backward for rank in ranks]),
        graded_backward=np.concatenate([rank.graded_backward for rank in ranks]),
        running=np.concatenate([rank.running for rank in ranks]),
        versions=max(rank.versions for rank in ranks),
        num_microbatches=max(rank.num_microbatches for rank in ranks),
    )


def _of_program(program: Sequence[Action], stages: Sequence[int], versions: int, *, streams: bool) -> InFlight:
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    none = (0,) * len(stages)
    # An update drops the gradients; without a flush those of the next batch are there already.
    graded = [int(streams)] * len(stages)
    held, in_backward = {(none, tuple(graded))}, {(none, tuple(graded), 0)}
    num_microbatches = 0
    for (stage, op, _), alive in activations(program):
        if op in MOVE_OPS:
            continue
        chunk = chunk_of[stage]
        counts = tuple(alive.get(s, 0) for s in stages)
        if op is Op.F:
            held.add((counts, tuple(graded)))
            num_microbatches += chunk == 0
        elif op in BACKWARD_OPS:
            in_backward.add((counts, tuple(graded), chunk))
        if op in LAST_USES:
            graded[chunk] = 1
    rows, moments = _largest(in_backward), _largest(held)
    return InFlight(
        held=np.array([row for row, _ in moments], dtype=np.float64),
        graded=np.array([row for _, row in moments], dtype=np.float64),
        in_backward=np.array([row for row, _, _ in rows], dtype=np.float64),
        graded_backward=np.array([row for _, row, _ in rows], dtype=np.float64),
        running=np.array([chunk for _, _, chunk in rows]),
        versions=max(1, versions),
        num_microbatches=num_microbatches,
    )


def _largest(moments: set[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Moments (held, graded, and whose backward runs, if one does), in order, without those at which less is there."""
    rows = sorted(moments)
    counts = np.array([(*held, *graded) for held, graded, *_ in rows], dtype=np.int64)
    running = np.array([chunk for _, _, *chunk in rows], dtype=np.int64).reshape(len(rows), -1)
    left, found = np.arange(len(rows)), []
    while len(left):
        top = left[counts[left].sum(axis=1).argmax()]
        found.append(int(top))
        less = (counts[left] <= counts[top]).all(axis=1) & (running[left] == running[top]).all(axis=1)
        left = left[~less]
    return [rows[at] for at in sorted(found)]

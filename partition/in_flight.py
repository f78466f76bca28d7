"""Microbatches that each stage of a rank holds at once, counted in the schedule's own programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schedules.alive import activation_counts, activations
from ..schedules.ir import BACKWARD_OPS, LAST_USES, MOVE_OPS, Action, Op, Schedule
from ..schedules.registry import family
from ..schedules.versions import derive_versions
from .topology import Floats, Indices

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
    computes = [action for action in program if action.op not in MOVE_OPS]
    if streams or len(computes) < len(program):
        counts = [[alive.get(s, 0) for s in stages] for a, alive in activations(program) if a.op not in MOVE_OPS]
        alive = np.array(counts, dtype=np.int64).reshape(-1, len(stages))
    else:
        alive = activation_counts(program, stages)
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    chunks = np.array([chunk_of[stage] for stage, _, _ in computes], dtype=np.intp)
    forward = np.array([op is Op.F for _, op, _ in computes], dtype=bool)
    # An update drops the gradients; without a flush those of the next batch are there already.
    graded = np.full_like(alive, int(streams))
    ends = np.array([op in LAST_USES for _, op, _ in computes], dtype=bool)
    for chunk in range(len(stages)):
        first = np.flatnonzero(ends & (chunks == chunk))[:1]
        graded[int(first[0]) + 1 if len(first) else len(computes) :, chunk] = 1
    backward = np.array([op in BACKWARD_OPS for _, op, _ in computes], dtype=bool)
    none, moments = np.zeros((1, len(stages)), dtype=np.int64), np.concatenate([alive, graded], axis=1)
    nothing = np.concatenate([none, np.full_like(none, int(streams))], axis=1)
    held = _largest(np.concatenate([nothing, moments[forward]]))
    running = np.concatenate([[0], chunks[backward]])
    rows = np.concatenate([nothing, moments[backward]])
    in_backward = [(row, chunk) for chunk in range(len(stages)) for row in _largest(rows[running == chunk])]
    V = len(stages)
    return InFlight(
        held=held[:, :V].astype(np.float64),
        graded=held[:, V:].astype(np.float64),
        in_backward=np.array([row[:V] for row, _ in in_backward], dtype=np.float64),
        graded_backward=np.array([row[V:] for row, _ in in_backward], dtype=np.float64),
        running=np.array([chunk for _, chunk in in_backward]),
        versions=max(1, versions),
        num_microbatches=int((forward & (chunks == 0)).sum()),
    )


def _largest(moments: Indices) -> Indices:
    """[largest, figures] of these moments, less those at which nothing is more than at another."""
    found, left = [], moments
    while len(left):
        top = left[left.sum(axis=1).argmax()]
        found.append(top)
        left = left[(left > top).any(axis=1)]
    return np.array(sorted(map(tuple, found)), dtype=np.int64).reshape(len(found), moments.shape[1])

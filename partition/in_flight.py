"""Microbatches that each stage of a rank holds at once, counted in the schedule's own programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schedules.alive import activation_counts, activations
from ..schedules.builders.warmup import Turns
from ..schedules.ir import BACKWARD_OPS, LAST_USES, MOVE_OPS, Action, Op, Schedule
from ..schedules.registry import family
from ..schedules.versions import derive_versions
from .topology import Floats, Indices

RUNNING_ON = 1 << 20  # microbatches beyond those in flight, where nobody says how many a batch has
_FEW = 256  # moments that are compared all with all


class Peak(NamedTuple):
    """[V] microbatches held, [V] those that are made again, [V] 1 where there are gradients, [V] 1 where they are
    being summed over replicas."""

    held: Floats
    anew: Floats
    graded: Floats
    summed: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlight:
    """One rank, with V stages.

    Arguments:
        held: [moments, V] microbatches between F and the end of B (or W), at every moment at which they may be most.
        graded: [moments, V] 1 where a backward has left gradients by then, else 0.
        summed: [moments, V] 1 where they may be on their way to other replicas by then: behind its last backward.
        in_backward, graded_backward, summed_backward: [moments, V] the same while a backward runs, and
        running: [moments] whose backward that is, as a chunk.
        versions: of the weights.
        num_microbatches: that the rank runs at all, per stage.
    """

    held: Floats
    graded: Floats
    summed: Floats
    in_backward: Floats
    graded_backward: Floats
    summed_backward: Floats
    running: np.ndarray
    versions: int
    num_microbatches: int

    def peak(self, kept: Floats, again: Floats, gradients: Floats, summing: Floats) -> Peak:
        """When most is there.

        Arguments:
            kept: [V] bytes from F to B of each microbatch.
            again: [V] bytes that the running backward makes anew (recompute), else 0.
            gradients: [V] bytes of a set of them.
            summing: [V] bytes beside them while they are summed.
        """
        forward = self.held @ kept + self.graded @ gradients + self.summed @ summing
        backward = self.in_backward @ kept + again[self.running]
        backward += self.graded_backward @ gradients + self.summed_backward @ summing
        anew = np.zeros(len(kept))
        at = int(backward.argmax())
        if backward[at] > forward.max():
            anew[self.running[at]] = 1.0
            graded, summed = self.graded_backward[at], self.summed_backward[at]
            return Peak(held=self.in_backward[at], anew=anew, graded=graded, summed=summed)
        at = int(forward.argmax())
        return Peak(held=self.held[at], anew=anew, graded=self.graded[at], summed=self.summed[at])


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
        held, summed = np.array([[float(depth)]]), np.full((1, 1), float(rule.is_asynchronous))
        found.append(
            InFlight(
                held=held,
                graded=np.ones((1, 1)),
                summed=summed,
                in_backward=held,
                graded_backward=np.ones((1, 1)),
                summed_backward=summed,
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
        summed=np.concatenate([rank.summed for rank in ranks]),
        in_backward=np.concatenate([rank.in_backward for rank in ranks]),
        graded_backward=np.concatenate([rank.graded_backward for rank in ranks]),
        summed_backward=np.concatenate([rank.summed_backward for rank in ranks]),
        running=np.concatenate([rank.running for rank in ranks]),
        versions=max(rank.versions for rank in ranks),
        num_microbatches=max(rank.num_microbatches for rank in ranks),
    )


def in_flight_of_turns(turns: Turns, *, num_chunks: int) -> tuple[InFlight, ...]:
    """The same of an order in figures, without its programs.

    In front of a rank's forward k are k - warm-up backwards, in front of its backward j are warm-up + j + 1 forwards.
    """
    forwards, backwards = (
        np.array([chunk for chunk, _ in each], dtype=np.intp) for each in (turns.forwards, turns.backwards)
    )
    begun, done = (_counts(chunks, num_chunks) for chunks in (forwards, backwards))
    states = np.concatenate([done > 0, done == done[-1]], axis=1).astype(done.dtype)  # graded, summed
    at = np.arange(len(forwards))
    num_microbatches, found = int(begun[-1, 0]), []
    for warmup in turns.warmups:
        behind, ahead = np.maximum(at - warmup, 0), np.minimum(at + warmup + 1, len(at))
        found.append(
            _in_flight(
                np.concatenate([begun[1:] - done[behind], states[behind]], axis=1),
                np.concatenate([begun[ahead] - done[:-1], states[:-1]], axis=1),
                backwards,
                streams=False,
                versions=1,
                num_microbatches=num_microbatches,
            )
        )
    return tuple(found)


def _counts(chunks: Indices, num_chunks: int) -> Indices:
    """[n + 1, V] of the first 0, 1, .. n of these, how many are of each chunk."""
    each = np.zeros((len(chunks) + 1, num_chunks), dtype=np.intp)
    each[np.arange(1, len(each)), chunks] = 1
    return np.asarray(np.cumsum(each, axis=0))


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
    graded, summed = np.full_like(alive, int(streams)), np.full_like(alive, int(streams))
    ends = np.array([op in LAST_USES for _, op, _ in computes], dtype=bool)
    for chunk in range(len(stages)):
        own = np.flatnonzero(ends & (chunks == chunk))
        if len(own):
            graded[int(own[0]) + 1 :, chunk] = 1
            summed[int(own[-1]) + 1 :, chunk] = 1
    backward = np.array([op in BACKWARD_OPS for _, op, _ in computes], dtype=bool)
    moments = np.concatenate([alive, graded, summed], axis=1)
    return _in_flight(
        moments[forward],
        moments[backward],
        chunks[backward],
        streams=streams,
        versions=max(1, versions),
        num_microbatches=int((forward & (chunks == 0)).sum()),
    )


def _in_flight(
    forward: Indices,
    backward: Indices,
    chunks: Indices,
    *,
    streams: bool,
    versions: int,
    num_microbatches: int,
) -> InFlight:
    """Moments in turn at which a forward or a backward runs: microbatches held, gradients and their sums.

    Arguments:
        forward, backward: [moments, 3 V] of each.
        chunks: [moments] of the backwards.
    """
    V = forward.shape[1] // 3
    nothing = np.concatenate([np.zeros((1, V), dtype=np.intp), np.full((1, 2 * V), int(streams))], axis=1)
    held = _largest(np.concatenate([nothing, _corners(forward)]))
    # The chunk stands in front, by number backwards: no two of different ones are one above the other.
    last = max(V, 1) - 1  # a rank may have no stage
    of_chunk = np.eye(last + 1, dtype=np.intp)[::-1][np.concatenate([[0], chunks])]
    in_backward = _largest(_corners(np.concatenate([of_chunk, np.concatenate([nothing, backward])], axis=1)))
    rows = in_backward[:, last + 1 :].astype(np.float64)
    return InFlight(
        held=held[:, :V].astype(np.float64),
        graded=held[:, V : 2 * V].astype(np.float64),
        summed=held[:, 2 * V :].astype(np.float64),
        in_backward=rows[:, :V],
        graded_backward=rows[:, V : 2 * V],
        summed_backward=rows[:, 2 * V :],
        running=last - in_backward[:, : last + 1].argmax(axis=1),
        versions=versions,
        num_microbatches=num_microbatches,
    )


def _corners(moments: Indices) -> Indices:
    """Moments less those half way between the one before and the next: whatever a microbatch takes, one of these two
    takes as much or more."""
    if len(moments) < 3:
        return moments
    bends = (moments[2:] - 2 * moments[1:-1] + moments[:-2]).any(axis=1)
    return np.asarray(moments[np.concatenate([[True], bends, [True]])])


def _largest(moments: Indices) -> Indices:
    """[largest, figures] of these moments in order, less those at which nothing is more than at another."""
    left = np.array(sorted(set(map(tuple, moments.tolist()))), dtype=np.intp)
    if len(left) <= _FEW:
        return np.asarray(left[(left[:, None] <= left).all(axis=2).sum(axis=1) == 1])
    found = []
    while len(left):
        top = left[left.sum(axis=1).argmax()]
        found.append(tuple(top.tolist()))
        left = left[(left > top).any(axis=1)]
    return np.array(sorted(found), dtype=np.intp)

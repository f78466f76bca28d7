"""What a rank holds over time, by data structure: the one place that says so, for `partition()` and `plan()` alike.

    parameters     W versions
    gradients      W, once a backward has left some, or (behind the batch) where that is more than all that ran
    optimizer      W ratio, or a share of it where it is divided over the replicas
    buffers        of the nodes
    activations    of every microbatch in flight what is kept from F to B; of one what is made again (`stage_cost`)
    workspace      of the node that needs most, and the gradients of the stage's output and input
    communication  receives posted ahead, sends not yet known to be received, between ranks; behind a stage's last
                   backward of the batch a bucket of small gradients being summed, and where the optimizer is divided,
                   the parts of other ranks, of gradients and then of weights; in a stream always the gradients that
                   replicas send each other

`Moments` are counted in the schedule's own programs: how much of which is there, whenever that may be most. `RankBytes`
weighs them, whatever is done about the memory; `recompute` chooses that. `stage_bytes` gives the same figures of one
stage each, of which `memory_curves` makes memory over time. `stage_parts` is the closed form for stages between any two
cuts, elementwise, never less: with it the dynamic programs know what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..schedules.alive import activation_counts, activations
from ..schedules.builders.warmup import Turns
from ..schedules.ir import BACKWARD_OPS, LAST_USES, MOVE_OPS, Action, Op, Schedule
from ..schedules.messages import BUCKET_BYTES, RECEIVES_AHEAD
from ..schedules.registry import family
from ..schedules.timing.memory import StageBytes
from ..schedules.versions import derive_versions
from .stage_cost import StageSums
from .strict import number
from .topology import Floats, Indices, TransferTime

GRADIENTS_SENT = 2  # that are not yet known to be received, at most
RUNNING_ON = 1 << 20  # microbatches beyond those in flight, where nobody says how many a batch has
_FEW = 256  # moments that are compared all with all
Figures = Any  # a number or an array of them; they broadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one device at the peak of the schedule.

    Arguments:
        parameters: all weight versions.
        gradients: one set.
        optimizer: state, such as Adam's two averages.
        buffers: of the model, such as BatchNorm's statistics.
        activations: kept from F to B, of all microbatches in flight.
        workspace: that F or B needs for itself while it runs.
        communication: messages that were received ahead of their use, or are not yet sent.

    Raises ValueError for what is no finite number of at least 0.

    >>> (MemoryUse(parameters=4, gradients=4) + MemoryUse(activations=2)).total
    10.0
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, number(f"memory: {field.name}", getattr(self, field.name)))

    @property
    def total(self) -> float:
        """All of it [bytes]."""
        return float(sum(astuple(self)))

    def __add__(self, other: MemoryUse) -> MemoryUse:
        """Both on one device; they do not need their workspace at once."""
        added = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return MemoryUse(**{**added, "workspace": max(self.workspace, other.workspace)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """What one rank with V stages holds at every moment at which it may hold most.

    Arguments:
        counts: [moments, 4 V], of each stage: microbatches between F and the end of B (or W); 1 where a backward has
            left gradients by then; 1 where these may be on their way to other replicas, behind its last backward; 1
            while its own backward runs, which makes anew what is recomputed. Those without a backward come first.
        num_forwards: how many these are.
        versions: of the weights.
        num_microbatches: that the rank runs at all, per stage.
    """

    counts: Floats
    num_forwards: int
    versions: int
    num_microbatches: int

    @property
    def held(self) -> Floats:
        """[forwards, V] microbatches between F and the end of B, while no backward runs."""
        return self.counts[: self.num_forwards, : self.counts.shape[1] // 4]


def count_in_flight(schedule: Schedule) -> tuple[Moments, ...]:
    """What each rank holds. O(actions)."""
    versions = derive_versions(schedule).peak_live if schedule.is_asynchronous else (1,) * schedule.num_ranks
    return tuple(
        _of_program(program, stages, version, streams=schedule.is_asynchronous)
        for program, stages, version in zip(schedule.programs, schedule.placement, versions, strict=True)
    )


def steady_in_flight(schedule: str, counts: Sequence[int], num_microbatches: int | None) -> tuple[Moments, ...]:
    """The closed form by stage, for stages of so many replicas, in the steady state: never less than what is counted.

    Stage s holds ceil(D_s + .. + D_P-1 / D_s) microbatches, and under a flush no more than its share of the batch.
    """
    found, rule = [], family(schedule).rule
    for at, count in enumerate(counts):
        depth = -(-sum(counts[at:]) // count)
        own = depth + RUNNING_ON if num_microbatches is None else -(-num_microbatches // count)
        if not rule.is_asynchronous:
            depth = min(depth, own)
        rows = [[depth, 1, rule.is_asynchronous, in_backward] for in_backward in (0, 1)]
        found.append(
            Moments(
                counts=np.array(rows, dtype=np.float64),
                num_forwards=1,
                versions=rule.versions_kept(depth),
                num_microbatches=own,
            )
        )
    return tuple(found)


def merged(ranks: Sequence[Moments]) -> Moments:
    """The most that any of these ranks holds: replicas of one stage."""
    forwards = [rank.counts[: rank.num_forwards] for rank in ranks]
    backwards = [rank.counts[rank.num_forwards :] for rank in ranks]
    return Moments(
        counts=np.concatenate([*forwards, *backwards]),
        num_forwards=sum(map(len, forwards)),
        versions=max(rank.versions for rank in ranks),
        num_microbatches=max(rank.num_microbatches for rank in ranks),
    )


def in_flight_of_turns(turns: Turns, *, num_chunks: int) -> tuple[Moments, ...]:
    """The same of an order in figures, without its programs.

    In front of a rank's forward k are k - warm-up backwards, in front of its backward j are warm-up + j + 1 forwards.
    """
    forwards, backwards = (
        np.array([chunk for chunk, _ in pairs], dtype=np.intp) for pairs in (turns.forwards, turns.backwards)
    )
    begun, done = (_of_first(chunks, num_chunks) for chunks in (forwards, backwards))
    states = np.concatenate([done > 0, done == done[-1]], axis=1).astype(done.dtype)  # gradients, their sums
    at = np.arange(len(forwards))
    num_microbatches, found = int(begun[-1, 0]), []
    for warmup in turns.warmups:
        behind, ahead = np.maximum(at - warmup, 0), np.minimum(at + warmup + 1, len(at))
        in_forwards = np.concatenate([begun[1:] - done[behind], states[behind]], axis=1)
        in_backwards = np.concatenate([begun[ahead] - done[:-1], states[:-1]], axis=1)
        counts, num_forwards = _moments(in_forwards, in_backwards, backwards, streams=False)
        found.append(
            Moments(counts=counts, num_forwards=num_forwards, versions=1, num_microbatches=num_microbatches),
        )
    return tuple(found)


def _of_first(chunks: Indices, num_chunks: int) -> Indices:
    """[n + 1, V] of the first 0, 1, .. n of these, how many are of each chunk."""
    one_hot = np.zeros((len(chunks) + 1, num_chunks), dtype=np.intp)
    one_hot[np.arange(1, len(one_hot)), chunks] = 1
    return np.asarray(np.cumsum(one_hot, axis=0))


def _of_program(program: Sequence[Action], stages: Sequence[int], versions: int, *, streams: bool) -> Moments:
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
    every = np.concatenate([alive, graded, summed], axis=1)
    found, num_forwards = _moments(every[forward], every[backward], chunks[backward], streams=streams)
    return Moments(
        counts=found,
        num_forwards=num_forwards,
        versions=max(1, versions),
        num_microbatches=int((forward & (chunks == 0)).sum()),
    )


def _moments(forward: Indices, backward: Indices, chunks: Indices, *, streams: bool) -> tuple[Floats, int]:
    """`Moments.counts` and the number of forwards, of moments in turn at which a forward or a backward runs.

    Arguments:
        forward, backward: [moments, 3 V] microbatches held, gradients and their sums.
        chunks: [moments] of the backwards.
    """
    V = forward.shape[1] // 3
    nothing = np.concatenate([np.zeros((1, V), dtype=np.intp), np.full((1, 2 * V), int(streams))], axis=1)
    held = _largest(np.concatenate([nothing, _corners(forward)]))
    # The chunk stands in front, by number backwards: no two of different ones are one above the other.
    width = max(V, 1)  # a rank may have no stage
    of_chunk = np.eye(width, dtype=np.intp)[::-1][np.concatenate([[0], chunks])]
    in_backward = _largest(_corners(np.concatenate([of_chunk, np.concatenate([nothing, backward])], axis=1)))
    counts = np.concatenate(
        [
            np.concatenate([held, np.zeros((len(held), V), dtype=np.intp)], axis=1),
            np.concatenate([in_backward[:, width:], in_backward[:, :width][:, ::-1][:, :V]], axis=1),
        ]
    )
    return counts.astype(np.float64), len(held)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Choices for the memory of a rank's V stages: what is recomputed, ranks that share the optimizer's state."""

    recompute: tuple[str, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemory:
    """One rank at its peak.

    Arguments:
        treatment: of its stages.
        held: [6, V] bytes of its stages, in the order of `MemoryUse`, messages apart.
        messages: bytes of messages, of all stages together.
        in_flight: [V] the most microbatches of each stage that are there at once.
        limit: of its device [bytes].
        too_many: bytes beyond that; 0 where it fits.
    """

    treatment: Treatment
    held: Floats
    messages: float
    in_flight: tuple[int, ...]
    limit: float = math.inf
    too_many: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the rank, all together; its stages do not need their workspace at once."""
        return _total(self.held) + self.messages

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """[V] by stage and data structure; messages stand with the first one."""
        names = [field.name for field in fields(MemoryUse)]
        rows = [[*row, 0.0 if v else self.messages] for v, row in enumerate(self.held.T.tolist())]
        return tuple(MemoryUse(**dict(zip(names, row, strict=True))) for row in rows)


def _total(held: Floats) -> float:
    *kept, workspace = held
    return float(sum(kept[1:], start=kept[0]).sum() + workspace.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank as its memory sees it: its V stages, replicas D, tensor ranks T, memory of its device [bytes].

    Arguments:
        exchange: of updated weights over the replicas; None: it takes no time.
        streams: whether batches follow each other without a flush.
        beside: of its memory, what is certain to go to others than tensors (`allocator.certain`) [bytes].
    """

    stages: tuple[int, ...]
    replicas: int
    tensor: int
    limit: float
    exchange: TransferTime | None = None
    streams: bool = False
    beside: float = 0.0


def stage_parts(
    sums: StageSums,
    *,
    copies: Figures,
    replicas: Figures = 1,
    divides: bool = False,
    recompute: str = "none",
    tensor: int = 1,
    num_chunks: int = 1,
    streams: bool = False,
) -> tuple[Floats, Floats, Floats]:
    """Bytes on a device of each stage, elementwise: held in any case, and for each microbatch in flight; and the bytes
    behind the batch, which may be more than these together.

    What the V stages of a rank share counts with a V-th.

    Arguments:
        copies: how many times the weights are there: versions, gradients, the optimizer's state.
        replicas: over which gradients are summed.
        divides: whether the optimizer's state may be divided over them.
        streams: whether batches follow each other without a flush.
    """
    share = tensor * num_chunks
    sent = sums.before * (RECEIVES_AHEAD + GRADIENTS_SENT) + sums.behind * RECEIVES_AHEAD
    workspace = sums.workspace / num_chunks + sums.before + sums.behind
    under = sums.under(recompute)
    passing, one = workspace + sent / share + under.again, sums.behind / share + under.kept
    shards = np.where(divides, replicas, 1)
    bucket = _summing(sums, replicas=replicas, shards=shards, streams=streams, share=num_chunks)
    kept = sums.weights * copies + sums.buffers
    # With one stage a rank and a flush nothing else is under way while gradients are summed.
    return kept + passing + (0.0 if num_chunks == 1 and not streams else bucket), one, np.asarray(kept + bucket)


def _summing(sums: StageSums, *, replicas: Figures, shards: Figures, streams: bool, share: int = 1) -> Floats:
    """Bytes of each stage beside its gradients while its replicas add them up, elementwise; 0 without replicas.

    Under a flush small gradients travel in buckets, as copies, of which one counts; a large one is summed where it is,
    or, where the optimizer is divided, leaves part by part: a copy of the largest, and the parts of the others. A
    stream sends copies of what others need, and gets as much (of a divided optimizer the weights that it has updated
    leave, too); of whole gradients those of one other replica count, since a dynamic program does not know how many
    there are.

    Arguments:
        shards: over which the optimizer's state is divided; 1: each holds all of it.
        share: V; what the stages of a rank have in common counts with a V-th.
    """
    if streams:
        found = _streaming(sums.weights, shards)
    else:
        small = np.minimum(sums.small, BUCKET_BYTES / share)
        divided = np.maximum(sums.largest / share, small) + sums.weights * (1 - 1 / np.asarray(shards))
        found = np.where(np.asarray(shards) > 1, divided, small)
    return np.asarray(np.where(np.asarray(replicas) > 1, found, 0.0))


def _streaming(weights: Floats, shards: Figures) -> Floats:
    shards = np.asarray(shards)
    return np.asarray(weights * np.where(shards > 1, 3 * (1 - 1 / shards), 2.0))


def stage_bytes(
    sums: StageSums,
    memories: Sequence[RankMemory],
    *,
    positions: Sequence[int],
    replicas: Sequence[int],
    tensor: int,
    streams: bool = False,
) -> tuple[StageBytes, ...]:
    """[S] bytes of each stage on one of its devices, as its rank treats it.

    Arguments:
        positions: [S] rank of each stage.
        memories, replicas: [P] by stage of the first chunk.
        tensor: T; each of T ranks sends its share of a message.
        streams: whether batches follow each other without a flush.
    """
    found, pipeline = [], len(memories)
    for stage, weights in enumerate(sums.weights.tolist()):
        chunk, memory = stage // pipeline, memories[positions[stage]]
        treatment, use = memory.treatment, memory.uses[chunk]
        row, shards = sums.under(treatment.recompute[chunk]), treatment.shards[chunk]
        summing = _summing(sums, replicas=replicas[positions[stage]], shards=shards, streams=streams)
        found.append(
            StageBytes(
                weights=weights,
                gradients=weights,
                optimizer=use.optimizer,
                buffers=use.buffers,
                activations=float(row.kept[stage]),
                again=float(row.again[stage]),
                workspace=float(sums.workspace[stage] + sums.before[stage] + sums.behind[stage]),
                output=float(sums.behind[stage]) / tensor,
                summing=float(summing[stage]),
            )
        )
    return tuple(found)


class StateDivision(NamedTuple):
    """Bytes under one division of the optimizer's state, before it is known what is recomputed.

    optimizer, summing: [V] its state; bytes beside the gradients while they are summed. moments: gradients and sums at
    each moment. fixed: there whatever runs, gradients apart. behind: gradients and their sums behind the batch.
    """

    optimizer: Floats
    summing: Floats
    moments: Floats
    fixed: float
    behind: float


class RankBytes:
    """Bytes that one rank holds, by what is recomputed and how the optimizer's state is divided.

    Arguments:
        optimizer_ratio: bytes of the optimizer's state a byte of parameters.
    """

    def __init__(self, sums: StageSums, moments: Moments, place: RankPlace, *, optimizer_ratio: float) -> None:
        self.sums, self.moments, self.place, self.optimizer_ratio = sums, moments, place, optimizer_ratio
        self.own = list(place.stages)
        self.before, self.behind, self.weights = sums.before[self.own], sums.behind[self.own], sums.weights[self.own]
        self.buffers, self.workspace = sums.buffers[self.own], sums.workspace[self.own] + self.before + self.behind
        self.num_chunks = V = len(self.weights)
        self.held, self.states, self.anew = np.split(moments.counts, [V, 3 * V], axis=1)
        self.most = moments.held.max(axis=0)
        self._rows: dict[str, tuple[Floats, Floats]] = {}
        self._divisions: dict[tuple[int, ...], StateDivision] = {}

    def row(self, name: str) -> tuple[Floats, Floats]:
        """[V] bytes kept of a microbatch, [V] made again."""
        if name not in self._rows:
            row = self.sums.under(name)
            self._rows[name] = row.kept[self.own], row.again[self.own]
        return self._rows[name]

    def division(self, shards: tuple[int, ...]) -> StateDivision:
        """Bytes under one division of the optimizer's state."""
        if shards not in self._divisions:
            optimizer, summing = self.weights * self.optimizer_ratio / np.array(shards), self._summing(shards)
            kept = self.weights * self.moments.versions + optimizer + self.buffers
            self._divisions[shards] = StateDivision(
                optimizer=optimizer,
                summing=summing,
                moments=self.states @ np.concatenate([self.weights, summing]),
                fixed=float(kept.sum()),
                behind=float(self.weights.sum()) + float(summing.sum()),
            )
        return self._divisions[shards]

    def at_moments(self, treatment: Treatment) -> tuple[Floats, Floats, Floats]:
        """[moments] bytes of activations, gradients and sums; [V] bytes kept of a microbatch, and made again."""
        rows = [self.row(name) for name in treatment.recompute]
        kept, again = (np.array([row[what][v] for v, row in enumerate(rows)]) for what in (0, 1))
        return self.held @ kept + self.anew @ again + self.division(treatment.shards).moments, kept, again

    def too_many(self, treatment: Treatment) -> float:
        """`memory(treatment).too_many`, quickly."""
        division, (moments, _, _) = self.division(treatment.shards), self.at_moments(treatment)
        passing = float(moments.max()) + self.messages + self.largest_workspace
        return self.excess(division.fixed + max(passing, division.behind))

    def memory(self, treatment: Treatment) -> RankMemory:
        """The rank at its peak under this treatment."""
        division, (moments, kept, again) = self.division(treatment.shards), self.at_moments(treatment)
        microbatches, graded, summed, anew = self.moments.counts[int(moments.argmax())].reshape(4, self.num_chunks)
        gradients, activations = graded * self.weights, microbatches * kept + anew * again
        workspace, sent = self.workspace, self.messages + float((summed * division.summing).sum())
        all_behind = float((self.weights + division.summing).sum())
        if float((gradients + activations).sum() + workspace.max()) + sent <= all_behind:
            # Behind the batch all gradients are there, with their sums, and nothing else that comes and goes.
            gradients, activations, workspace = self.weights, np.zeros_like(kept), np.zeros_like(kept)
            sent = float(division.summing.sum())
        versions = self.weights * self.moments.versions
        held = np.array([versions, gradients, division.optimizer, self.buffers, activations, workspace])
        return RankMemory(
            treatment=treatment,
            held=held,
            messages=sent,
            in_flight=tuple(self.most.astype(int).tolist()),
            limit=self.place.limit,
            too_many=self.excess(_total(held) + sent),
        )

    def excess(self, total: float) -> float:
        """Bytes beyond the device's; rounding is none."""
        excess = total + self.place.beside - self.place.limit
        return 0.0 if excess <= self.place.limit * 1e-12 else excess

    @cached_property
    def messages(self) -> float:
        """Bytes received ahead and sent; stages on the same rank send each other nothing."""
        num_messages = self.moments.num_microbatches * self.num_chunks
        received, returned = min(RECEIVES_AHEAD, num_messages), min(GRADIENTS_SENT, num_messages)
        comes, goes = ([stage + step not in self.own for stage in self.own] for step in (-1, 1))
        before, behind = np.where(comes, self.before, 0.0), np.where(goes, self.behind, 0.0)
        sent = float(behind.max()) * received + float((behind * self.most).sum())
        return (float(before.max()) * (received + returned) + sent) / self.place.tensor

    @cached_property
    def largest_workspace(self) -> float:
        """Bytes of the workspace that is largest; the stages do not need theirs at once."""
        return float(self.workspace.max())

    def _summing(self, shards: Sequence[int]) -> Floats:
        """[V] bytes beside the gradients while they are summed: parts of other ranks, and one bucket in all."""
        if self.place.replicas == 1:
            return np.zeros_like(self.weights)
        if self.place.streams:
            return _streaming(self.weights, shards)
        divided = np.array(shards, dtype=np.float64)
        largest = float(np.where(divided > 1, self.sums.largest[self.own], 0.0).max())
        bucket = max(largest, min(float(self.sums.small[self.own].sum()), BUCKET_BYTES))
        return np.asarray(self.weights * (1 - 1 / divided + bucket / (float(self.weights.sum()) or 1.0)))

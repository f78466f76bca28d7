"""Memory of a rank, by data structure: the one place that says so, for `partition()` and `plan()` alike.

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

`stage_bytes` gives the same figures of one stage each, of which `memory_curves` makes memory over time.
`RankBytes` counts one rank exactly, from what is in flight in its own program, whatever is done about it;
`memory_rules` chooses that. `stage_parts` is the closed form for stages between any two cuts, elementwise, never less:
with it the dynamic programs know what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from ..schedules.messages import BUCKET_BYTES, RECEIVES_AHEAD
from ..schedules.timing.memory import StageBytes
from .in_flight import InFlight
from .memory_use import MemoryUse
from .stage_cost import StageSums
from .topology import Floats, TransferTime

GRADIENTS_SENT = 2  # that are not yet known to be received, at most
Figures = Any  # a number or an array of them; they broadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Choices for the memory of a rank's V stages: what is recomputed, ranks that share the optimizer's state."""

    recompute: tuple[str, ...]
    shards: tuple[int, ...]


class Held(NamedTuple):
    """[V] bytes of each stage of a rank, messages apart."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    buffers: Floats
    activations: Floats
    workspace: Floats

    @property
    def total(self) -> float:
        """Bytes of all stages; they do not need their workspace at once."""
        kept = self.parameters + self.gradients + self.optimizer + self.buffers + self.activations
        return float(kept.sum() + self.workspace.max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemory:
    """One rank at its peak.

    Arguments:
        treatment: of its stages.
        held: by its stages.
        messages: bytes of messages, of all stages together.
        in_flight: [V] the most microbatches of each stage that are there at once.
        limit: of its device [bytes].
        too_many: bytes beyond that; 0 where it fits.
    """

    treatment: Treatment
    held: Held
    messages: float
    in_flight: tuple[int, ...]
    limit: float = math.inf
    too_many: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the rank, all together."""
        return self.held.total + self.messages

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """[V] by stage and data structure; messages stand with the first one."""
        rows = zip(*(column.tolist() for column in self.held), strict=True)
        return tuple(
            MemoryUse(**dict(zip(self.held._fields, row, strict=True)), communication=0.0 if v else self.messages)
            for v, row in enumerate(rows)
        )


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
    versions: Figures,
    optimizer: float,
    replicas: Figures = 1,
    divides: bool = False,
    recompute: str = "none",
    tensor: int = 1,
    num_chunks: int = 1,
    sums_behind: bool = False,
    streams: bool = False,
) -> tuple[Floats, Floats, Floats]:
    """Bytes on a device of each stage, elementwise: held in any case, and for each microbatch in flight; and the bytes
    behind the batch, which may be more than these together.

    What the V stages of a rank share counts with a V-th.

    Arguments:
        versions: of the weights.
        optimizer: bytes of its state a byte of parameters, on one rank.
        replicas: over which gradients are summed.
        divides: whether the optimizer's state may be divided over them.
        sums_behind: whether nothing else is under way then, as with one stage a rank and a flush.
        streams: whether batches follow each other without a flush.
    """
    share = tensor * num_chunks
    sent = sums.before * (RECEIVES_AHEAD + GRADIENTS_SENT) + sums.behind * RECEIVES_AHEAD
    workspace = sums.workspace / num_chunks + sums.before + sums.behind
    shards = np.where(divides, replicas, 1)
    under = sums.under(recompute)
    passing, each = workspace + sent / share + under.again, sums.behind / share + under.kept
    bucket = _summing(sums, replicas=replicas, shards=shards, streams=streams, share=num_chunks)
    kept = sums.weights * (versions + 1 + optimizer) + sums.buffers
    return kept + passing + (0.0 if sums_behind else bucket), each, np.asarray(kept + bucket)


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
        found = sums.weights * np.where(np.asarray(shards) > 1, 3 * (1 - 1 / np.asarray(shards)), 2.0)
    else:
        small = np.minimum(sums.small, BUCKET_BYTES / share)
        divided = np.maximum(sums.largest / share, small) + sums.weights * (1 - 1 / np.asarray(shards))
        found = np.where(np.asarray(shards) > 1, divided, small)
    return np.asarray(np.where(np.asarray(replicas) > 1, found, 0.0))


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
        treatment, held = memory.treatment, memory.held
        row, shards = sums.under(treatment.recompute[chunk]), treatment.shards[chunk]
        summing = _summing(sums, replicas=replicas[positions[stage]], shards=shards, streams=streams)
        found.append(
            StageBytes(
                weights=weights,
                gradients=weights,
                optimizer=float(held.optimizer[chunk]),
                buffers=float(held.buffers[chunk]),
                activations=float(row.kept[stage]),
                again=float(row.again[stage]),
                workspace=float(sums.workspace[stage] + sums.before[stage] + sums.behind[stage]),
                output=float(sums.behind[stage]) / tensor,
                summing=float(summing[stage]),
            )
        )
    return tuple(found)


class Way(NamedTuple):
    """Bytes under one division of the optimizer's state.

    fixed: there whatever runs, gradients apart. behind: gradients and their sums behind the batch. forward, backward:
    at each moment [V] microbatches held, and bytes of gradients and sums; while a backward runs, with its chunk.
    """

    fixed: float
    behind: float
    forward: list[tuple[list[float], float]]
    backward: list[tuple[list[float], float, int]]

    def peak(self, kept: Sequence[float], again: Sequence[float]) -> float:
        """Bytes of activations, gradients and sums when they are most."""
        most: float = max(sum(map(mul, held, kept)) + gradients for held, gradients in self.forward)
        for held, gradients, at in self.backward:
            most = max(most, sum(map(mul, held, kept)) + gradients + again[at])
        return most


class RankBytes:
    """Bytes that one rank holds, by what is recomputed and how the optimizer's state is divided.

    Arguments:
        optimizer_ratio: bytes of the optimizer's state a byte of parameters.
    """

    def __init__(self, sums: StageSums, in_flight: InFlight, place: RankPlace, *, optimizer_ratio: float) -> None:
        self.sums, self.in_flight, self.place, self.optimizer_ratio = sums, in_flight, place, optimizer_ratio
        self.own = list(place.stages)
        self.before, self.behind, self.weights = sums.before[self.own], sums.behind[self.own], sums.weights[self.own]
        self.workspace = sums.workspace[self.own] + self.before + self.behind
        self.num_chunks = len(self.weights)
        self.most = in_flight.held.max(axis=0)
        self._rows: dict[str, tuple[list[float], list[float]]] = {}

    def memory(self, treatment: Treatment) -> RankMemory:
        """The rank at its peak under this treatment."""
        held, messages = self._held(treatment)
        return RankMemory(
            treatment=treatment,
            held=held,
            messages=messages,
            in_flight=tuple(self.most.astype(int).tolist()),
            limit=self.place.limit,
            too_many=self.excess(held.total + messages),
        )

    def row(self, name: str) -> tuple[list[float], list[float]]:
        """[V] bytes kept of a microbatch, [V] made again."""
        if name not in self._rows:
            row = self.sums.under(name)
            self._rows[name] = row.kept[self.own].tolist(), row.again[self.own].tolist()
        return self._rows[name]

    def way(self, shards: Sequence[int]) -> Way:
        """Bytes under one division of the optimizer's state, before it is known what is recomputed."""
        flight = self.in_flight
        optimizer = self.weights * self.optimizer_ratio / np.array(shards)
        kept = self.weights * flight.versions + optimizer + self.sums.buffers[self.own]
        summing = self._summing(shards)
        forward = flight.graded @ self.weights + flight.summed @ summing
        backward = flight.graded_backward @ self.weights + flight.summed_backward @ summing
        running = flight.running.tolist()
        return Way(
            fixed=float(kept.sum()),
            behind=self._all_weights + float(summing.sum()),
            forward=list(zip(flight.held.tolist(), forward.tolist(), strict=True)),
            backward=list(zip(flight.in_backward.tolist(), backward.tolist(), running, strict=True)),
        )

    def excess(self, total: float) -> float:
        """Bytes beyond the device's; rounding is none."""
        excess = total + self.place.beside - self.place.limit
        return 0.0 if excess <= self.place.limit * 1e-12 else excess

    @cached_property
    def messages(self) -> float:
        """Bytes received ahead and sent; stages on the same rank send each other nothing."""
        num_messages = self.in_flight.num_microbatches * self.num_chunks
        received, returned = min(RECEIVES_AHEAD, num_messages), min(GRADIENTS_SENT, num_messages)
        comes, goes = ([stage + step not in self.own for stage in self.own] for step in (-1, 1))
        before, behind = np.where(comes, self.before, 0.0), np.where(goes, self.behind, 0.0)
        sent = float(behind.max()) * received + float((behind * self.most).sum())
        return (float(before.max()) * (received + returned) + sent) / self.place.tensor

    def _summing(self, shards: Sequence[int]) -> Floats:
        """[V] bytes beside the gradients while they are summed: parts of other ranks, and one bucket in all."""
        replicas, divided = self.place.replicas, np.array(shards, dtype=np.float64)
        if replicas == 1:
            return np.zeros_like(self.weights)
        if self.place.streams:
            return np.asarray(self.weights * np.where(divided > 1, 3 * (1 - 1 / divided), 2.0))
        largest = float(np.where(divided > 1, self.sums.largest[self.own], 0.0).max())
        bucket = max(largest, min(float(self.sums.small[self.own].sum()), BUCKET_BYTES)) / (self._all_weights or 1.0)
        return np.asarray(self.weights * (1 - 1 / divided + bucket))

    @cached_property
    def largest_workspace(self) -> float:
        """Bytes of the workspace that is largest; the stages do not need theirs at once."""
        return float(self.workspace.max())

    @cached_property
    def _all_weights(self) -> float:
        return float(self.weights.sum())

    def _held(self, treatment: Treatment) -> tuple[Held, float]:
        """Bytes at the rank's peak; and of messages and of what is being summed then."""
        rows = [self.row(name) for name in treatment.recompute]
        kept = np.array([row[v] for v, (row, _) in enumerate(rows)])
        again = np.array([row[v] for v, (_, row) in enumerate(rows)])
        summing = self._summing(treatment.shards)
        peak = self.in_flight.peak(kept, again, self.weights, summing)
        gradients, activations = peak.graded * self.weights, peak.held * kept + peak.anew * again
        workspace, sent = self.workspace, self.messages + float((peak.summed * summing).sum())
        if float((gradients + activations).sum() + workspace.max()) + sent <= float((self.weights + summing).sum()):
            # Behind the batch all gradients are there, with their sums, and nothing else that comes and goes.
            gradients, activations, workspace = self.weights, np.zeros_like(kept), np.zeros_like(kept)
            sent = float(summing.sum())
        held = Held(
            parameters=self.weights * self.in_flight.versions,
            gradients=gradients,
            optimizer=self.weights * self.optimizer_ratio / np.array(treatment.shards),
            buffers=self.sums.buffers[self.own],
            activations=activations,
            workspace=workspace,
        )
        return held, sent

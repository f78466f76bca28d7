"""Memory of a rank, by data structure: the one place that says so, for `partition()` and `plan()` alike.

    parameters     W versions
    gradients      W, once a backward has left some, or (behind the batch) where that is more than all that ran
    optimizer      W ratio, or a share of it where it is divided over the replicas
    buffers        of the nodes
    activations    of every microbatch in flight what is kept from F to B; of one what is made again (`stage_cost`)
    workspace      of the node that needs most, and the gradients of the stage's output and input
    communication  receives posted ahead, sends not yet known to be received; behind a stage's last backward of the
                   batch (in a stream always) the largest bucket of gradients being summed, and where the
                   optimizer is divided, the parts of other ranks, of gradients and then of weights

`stage_bytes` gives the same figures of one stage each, of which `memory_curves` makes memory over time.
`MemoryRules.fit` counts one rank exactly, from what is in flight in its own program. `stage_parts` is the closed form
for stages between any two cuts, elementwise, never less: with it the dynamic programs know what does not fit.
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
from .recompute_choice import Choice, Option, cheaper, in_turn
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
        ring: over the replicas; None: what they send each other takes no time.
        streams: whether batches follow each other without a flush.
        beside: of its memory, what is certain to go to others than tensors (`allocator.certain`) [bytes].
    """

    stages: tuple[int, ...]
    replicas: int
    tensor: int
    limit: float
    ring: TransferTime | None = None
    streams: bool = False
    beside: float = 0.0


def stage_parts(
    sums: StageSums,
    *,
    versions: Figures,
    optimizer: float,
    has_replicas: Figures = False,
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
        has_replicas: whether gradients are summed over replicas.
        divides: whether the optimizer's state may be divided over them.
        sums_behind: whether nothing else is under way then, as with one stage a rank and a flush.
        streams: whether batches follow each other without a flush.
    """
    share = tensor * num_chunks
    sent = sums.before * (RECEIVES_AHEAD + GRADIENTS_SENT) + sums.behind * RECEIVES_AHEAD
    workspace = sums.workspace / num_chunks + sums.before + sums.behind
    summed = _bucket(sums, streams=streams, share=num_chunks) + (sums.weights if divides else 0.0)
    under = sums.under(recompute)
    passing, each = workspace + sent / share + under.again, sums.behind / share + under.kept
    bucket = np.where(has_replicas, summed, 0.0)
    kept = sums.weights * (versions + 1 + optimizer) + sums.buffers
    return kept + passing + (0.0 if sums_behind else bucket), each, np.asarray(kept + bucket)


def _bucket(sums: StageSums, *, streams: bool, share: int = 1) -> Floats:
    """Bytes of the largest bucket of gradients of each stage, elementwise, a `share`-th of what stages have in common:
    the small ones together, or a large one, which is its own. In a stream all gradients travel as copies."""
    if streams:
        return np.asarray(np.minimum(sums.weights, BUCKET_BYTES / share))
    return np.asarray(np.maximum(sums.largest / share, np.minimum(sums.small, BUCKET_BYTES / share)))


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
    bucket = _bucket(sums, streams=streams).tolist()
    for stage, weights in enumerate(sums.weights.tolist()):
        chunk, memory = stage // pipeline, memories[positions[stage]]
        treatment, held = memory.treatment, memory.held
        row, shards = sums.under(treatment.recompute[chunk]), treatment.shards[chunk]
        has_replicas = replicas[positions[stage]] > 1
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
                summing=bucket[stage] + weights * (1 - 1 / shards) if has_replicas else 0.0,
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """Choices that are allowed, and the optimizer.

    Arguments:
        optimizer_ratio: bytes of state a byte of parameters.
        recompute: what is allowed, some of RECOMPUTE.
        sharding: what is allowed, some of "none" and "full".
    """

    optimizer_ratio: float
    recompute: tuple[str, ...] = ("none",)
    sharding: tuple[str, ...] = ("none",)

    def fit(self, sums: StageSums, in_flight: InFlight, place: RankPlace) -> RankMemory:
        """The treatment with the least seconds that fits the device (`recompute_choice`), or with the least excess."""
        rank = _Rank(sums, in_flight, place, self)
        if "none" in self.recompute:  # most ranks need no more
            plain = ("none",) * rank.num_chunks
            if len(self.recompute) == 1 or rank.least_excess(plain) == 0:
                return rank.treated(plain)
        options = rank.options(self.recompute)
        best, least = tuple(each[0] for each in options), math.inf
        for choice in in_turn(options):
            excess = rank.least_excess([option.name for option in choice])
            if excess < least:
                best, least = choice, excess
            if excess == 0:
                best = rank.relaxed(choice, options)
                break
        return rank.treated([option.name for option in best])

    def least_seconds_again(self, sums: StageSums, in_flight: InFlight, place: RankPlace) -> float:
        """Seconds a microbatch that whatever fits must run again, at least [s]; 0 where all may be kept."""
        rank = _Rank(sums, in_flight, place, self)
        if set(self.recompute) == {"none"} or rank.least_excess(("none",) * rank.num_chunks) == 0:
            return 0.0
        return rank.least_seconds_again(self.recompute)


class _Way(NamedTuple):
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


class _Rank:
    """Bytes that one rank holds, whatever is done about it."""

    def __init__(self, sums: StageSums, in_flight: InFlight, place: RankPlace, rules: MemoryRules) -> None:
        self.sums, self.in_flight, self.place, self.rules = sums, in_flight, place, rules
        self.own = list(place.stages)
        self.before, self.behind, self.weights = sums.before[self.own], sums.behind[self.own], sums.weights[self.own]
        self.workspace = sums.workspace[self.own] + self.before + self.behind
        self.num_chunks = len(self.weights)
        self.most = in_flight.held.max(axis=0)
        self.shards = self._shards(sums.update[self.own])
        self._rows: dict[str, tuple[list[float], list[float]]] = {}

    @cached_property
    def _messages(self) -> float:
        """Bytes received ahead and sent."""
        num_messages = self.in_flight.num_microbatches * self.num_chunks
        received, returned = min(RECEIVES_AHEAD, num_messages), min(GRADIENTS_SENT, num_messages)
        behind = float(self.behind.max()) * received + float((self.behind * self.most).sum())
        return (float(self.before.max()) * (received + returned) + behind) / self.place.tensor

    def _summing(self, shards: Sequence[int]) -> Floats:
        """[V] bytes beside the gradients while they are summed: parts of other ranks, and one bucket in all."""
        if self.place.replicas == 1:
            return np.zeros_like(self.weights)
        small = self._all_weights if self.place.streams else float(self.sums.small[self.own].sum())
        largest = 0.0 if self.place.streams else float(self.sums.largest[self.own].max())
        bucket = max(largest, min(small, BUCKET_BYTES)) / (self._all_weights or 1.0)
        return np.asarray(self.weights * (1 - 1 / np.array(shards, dtype=np.float64) + bucket))

    def _shards(self, update: Floats) -> tuple[tuple[int, ...], ...]:
        """Ways to divide the optimizer's state, to try in turn.

        It is divided where that saves time (a share of the step remains, and the updated weights go round behind it,
        where sums of gradients go beside compute), else only where memory is short.
        """
        replicas, sharding = self.place.replicas, self.rules.sharding
        may_shard = "full" in sharding and replicas > 1
        must = "none" not in sharding and replicas > 1
        rounds = [self._gather_seconds(weights) for weights in self.weights.tolist()]
        saved = [seconds * (1 - 1 / replicas) for seconds in update.tolist()]
        pairs = zip(saved, rounds, strict=True)
        wanted = tuple(replicas if must or (may_shard and saves > costs) else 1 for saves, costs in pairs)
        sharded = (replicas if may_shard else 1,) * len(wanted)
        return (wanted,) if wanted == sharded else (wanted, sharded)

    def _gather_seconds(self, weights: float) -> float:
        """Seconds of gathering a stage's updated weights: half of what sums of its gradients take."""
        return 0.0 if self.place.ring is None or not weights else self.place.ring.seconds(weights) / 2

    def options(self, names: Sequence[str]) -> list[list[Option]]:
        """[V] options of each stage."""
        columns = [
            ((self.most * kept).tolist(), again, self.sums.under(name).seconds[self.own].tolist())
            for name, (kept, again) in zip(names, map(self._row, names), strict=True)
        ]
        return [
            [
                Option(name=name, seconds=seconds[v], kept=kept[v], again=again[v])
                for name, (kept, again, seconds) in zip(names, columns, strict=True)
            ]
            for v in range(self.num_chunks)
        ]

    def treated(self, recompute: Sequence[str]) -> RankMemory:
        """The rank's memory, with the first division of the optimizer's state that fits, or the smallest."""
        best: RankMemory | None = None
        for shards in self.shards:
            held, messages = self._held(recompute, shards)
            too_many = self._excess(held.total + messages)
            if best is None or too_many < best.too_many:
                best = RankMemory(
                    treatment=Treatment(recompute=tuple(recompute), shards=shards),
                    held=held,
                    messages=messages,
                    in_flight=tuple(self.most.astype(int).tolist()),
                    limit=self.place.limit,
                    too_many=too_many,
                )
            if best.too_many == 0:
                break
        assert best is not None
        return best

    def _excess(self, total: float) -> float:
        """Bytes beyond the device's; rounding is none."""
        excess = total + self.place.beside - self.place.limit
        return 0.0 if excess <= self.place.limit * 1e-12 else excess

    def least_excess(self, recompute: Sequence[str]) -> float:
        """`treated(recompute).too_many`, quickly: nothing else of it depends on what is recomputed."""
        rows = list(enumerate(map(self._row, recompute)))
        kept, again = [kept[v] for v, (kept, _) in rows], [again[v] for v, (_, again) in rows]
        passing = self._messages + self._largest_workspace
        return self._excess(min(way.fixed + max(way.peak(kept, again) + passing, way.behind) for way in self._ways))

    def least_seconds_again(self, names: Sequence[str]) -> float:
        """Seconds that free enough bytes at the moment that would hold most, if stages could be treated in parts.

        What a backward makes again is left out, thus never more than a treatment takes that fits.
        """
        return min(self._least_again(way, names) for way in self._ways)

    def _least_again(self, way: _Way, names: Sequence[str]) -> float:
        stash, _ = self._row("none")
        moments = [*way.forward, *((held, others) for held, others, _ in way.backward)]
        most, held = max((sum(map(mul, held, stash)) + others, held) for held, others in moments)
        excess = self._excess(way.fixed + most + self._messages + self._largest_workspace)
        steps: list[tuple[float, float]] = []  # seconds a byte and bytes, by stage each cheaper than the next
        for v, number in enumerate(held):
            rows = [(self._row(name)[0][v], float(self.sums.under(name).seconds[self.own[v]])) for name in names]
            steps += _descents([(number * (stash[v] - kept), seconds) for kept, seconds in rows])
        seconds = 0.0
        for rate, freed in sorted(steps):
            seconds += rate * min(freed, excess)
            excess -= min(freed, excess)
        return seconds

    def _row(self, name: str) -> tuple[list[float], list[float]]:
        """[V] bytes kept of a microbatch, [V] made again."""
        if name not in self._rows:
            row = self.sums.under(name)
            self._rows[name] = row.kept[self.own].tolist(), row.again[self.own].tolist()
        return self._rows[name]

    @cached_property
    def _ways(self) -> list[_Way]:
        """By division of the optimizer's state."""
        found, flight = [], self.in_flight
        for shards in self.shards:
            optimizer = self.weights * self.rules.optimizer_ratio / np.array(shards)
            kept = self.weights * flight.versions + optimizer + self.sums.buffers[self.own]
            summing = self._summing(shards)
            forward = flight.graded @ self.weights + flight.summed @ summing
            backward = flight.graded_backward @ self.weights + flight.summed_backward @ summing
            running = flight.running.tolist()
            found.append(
                _Way(
                    fixed=float(kept.sum()),
                    behind=self._all_weights + float(summing.sum()),
                    forward=list(zip(flight.held.tolist(), forward.tolist(), strict=True)),
                    backward=list(zip(flight.in_backward.tolist(), backward.tolist(), running, strict=True)),
                )
            )
        return found

    @cached_property
    def _all_weights(self) -> float:
        return float(self.weights.sum())

    @cached_property
    def _largest_workspace(self) -> float:
        return float(self.workspace.max())

    def relaxed(self, choice: Choice, options: Sequence[Sequence[Option]]) -> Choice:
        """The same with fewer seconds in single stages, where that still fits."""
        chosen, done = list(choice), set[int]()
        for stage, option in cheaper(options, choice):
            if stage in done:
                continue
            before, chosen[stage] = chosen[stage], option
            if self.least_excess([each.name for each in chosen]) == 0:
                done.add(stage)
            else:
                chosen[stage] = before
        return tuple(chosen)

    def _held(self, recompute: Sequence[str], shards: Sequence[int]) -> tuple[Held, float]:
        """Bytes at the rank's peak; and of messages and of what is being summed then."""
        rows = [self._row(name) for name in recompute]
        kept = np.array([row[v] for v, (row, _) in enumerate(rows)])
        again = np.array([row[v] for v, (_, row) in enumerate(rows)])
        summing = self._summing(shards)
        peak = self.in_flight.peak(kept, again, self.weights, summing)
        gradients, activations = peak.graded * self.weights, peak.held * kept + peak.anew * again
        workspace, sent = self.workspace, self._messages + float((peak.summed * summing).sum())
        if float((gradients + activations).sum() + workspace.max()) + sent <= float((self.weights + summing).sum()):
            # Behind the batch all gradients are there, with their sums, and nothing else that comes and goes.
            gradients, activations, workspace = self.weights, np.zeros_like(kept), np.zeros_like(kept)
            sent = float(summing.sum())
        held = Held(
            parameters=self.weights * self.in_flight.versions,
            gradients=gradients,
            optimizer=self.weights * self.rules.optimizer_ratio / np.array(shards),
            buffers=self.sums.buffers[self.own],
            activations=activations,
            workspace=workspace,
        )
        return held, sent


def _descents(options: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Rates [s/byte] and bytes of the steps from nothing freed to most, on the lower hull of (bytes freed, seconds).

    >>> _descents([(4.0, 1.0), (6.0, 3.0), (5.0, 3.0)])
    [(0.25, 4.0), (1.0, 2.0)]
    """
    steps: list[tuple[float, float]] = []
    at, spent = 0.0, 0.0
    while True:
        left = [((seconds - spent) / (freed - at), freed, seconds) for freed, seconds in options if freed > at]
        if not left:
            return steps
        rate, freed, seconds = min(left, key=lambda each: (each[0], -each[1]))
        steps.append((max(rate, 0.0), freed - at))
        at, spent = freed, seconds

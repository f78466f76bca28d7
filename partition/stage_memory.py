"""Memory of a rank, by data structure: the one place that says so, for `partition()` and `plan()` alike.

    parameters     W versions
    gradients      W, once a backward has left some, or (behind the batch) where that is more than all that ran
    optimizer      W ratio, or a share of it where it is divided over the replicas
    buffers        of the nodes
    activations    of every microbatch in flight what is kept from F to B; of one what is made again (`stage_cost`)
    workspace      of the node that needs most, and the gradients of the stage's output and input
    communication  receives posted ahead, sends not yet known to be received, and a bucket of gradients being summed;
                   where the optimizer is divided, the parts of other ranks, of gradients and then of weights

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
    """

    stages: tuple[int, ...]
    replicas: int
    tensor: int
    limit: float
    ring: TransferTime | None = None


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
) -> tuple[Floats, Floats]:
    """Bytes on a device of each stage, elementwise: held in any case, and for each microbatch in flight.

    What the V stages of a rank share counts with a V-th.

    Arguments:
        versions: of the weights.
        optimizer: bytes of its state a byte of parameters, on one rank.
        has_replicas: whether gradients are summed over replicas.
        divides: whether the optimizer's state may be divided over them.
    """
    share = tensor * num_chunks
    sent = sums.before * (RECEIVES_AHEAD + GRADIENTS_SENT) + sums.behind * RECEIVES_AHEAD
    workspace = sums.workspace / num_chunks + sums.before + sums.behind
    summed = np.minimum(sums.weights, BUCKET_BYTES / num_chunks) + (sums.weights if divides else 0.0)
    bucket = np.where(has_replicas, summed, 0.0)
    fixed = sums.weights * (versions + 1 + optimizer) + sums.buffers + workspace + sent / share + bucket
    under = sums.under(recompute)
    return fixed + under.again, sums.behind / share + under.kept


def stage_bytes(
    sums: StageSums, memories: Sequence[RankMemory], *, positions: Sequence[int], replicas: Sequence[int], tensor: int
) -> tuple[StageBytes, ...]:
    """[S] bytes of each stage on one of its devices, as its rank treats it.

    Arguments:
        positions: [S] rank of each stage.
        memories, replicas: [P] by stage of the first chunk.
        tensor: T; each of T ranks sends its share of a message.
    """
    found, pipeline = [], len(memories)
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
                summing=min(weights, BUCKET_BYTES) + weights * (1 - 1 / shards) if has_replicas else 0.0,
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

    def _messages(self, shards: Sequence[int]) -> float:
        """Bytes received ahead and sent, and of gradients that are being summed, or weights gathered."""
        num_messages = self.in_flight.num_microbatches * self.num_chunks
        received, returned = min(RECEIVES_AHEAD, num_messages), min(GRADIENTS_SENT, num_messages)
        behind = float(self.behind.max()) * received + float((self.behind * self.most).sum())
        messages = (float(self.before.max()) * (received + returned) + behind) / self.place.tensor
        if self.place.replicas == 1:
            return messages
        others = float((self.weights * (1 - 1 / np.array(shards, dtype=np.float64))).sum())
        return messages + others + min(float(self.weights.sum()), BUCKET_BYTES)

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
            held = self._held(recompute, shards)
            messages = self._messages(shards)
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
        excess = total - self.place.limit
        return 0.0 if excess <= self.place.limit * 1e-12 else excess

    def least_excess(self, recompute: Sequence[str]) -> float:
        """`treated(recompute).too_many`, quickly: nothing else of it depends on what is recomputed."""
        rows = list(enumerate(map(self._row, recompute)))
        peak = self._peak([kept[v] for v, (kept, _) in rows], [again[v] for v, (_, again) in rows])
        return self._excess(self._fixed + max(peak + self._largest_workspace, self._all_weights))

    def _row(self, name: str) -> tuple[list[float], list[float]]:
        """[V] bytes kept of a microbatch, [V] made again."""
        if name not in self._rows:
            row = self.sums.under(name)
            self._rows[name] = row.kept[self.own].tolist(), row.again[self.own].tolist()
        return self._rows[name]

    @cached_property
    def _fixed(self) -> float:
        """Bytes that are there whatever runs, gradients apart, under the division of the optimizer that takes least."""
        every = []
        for shards in self.shards:
            optimizer = self.weights * self.rules.optimizer_ratio / np.array(shards)
            kept = self.weights * self.in_flight.versions + optimizer + self.sums.buffers[self.own]
            every.append(float(kept.sum()) + self._messages(shards))
        return min(every)

    @cached_property
    def _all_weights(self) -> float:
        return float(self.weights.sum())

    @cached_property
    def _largest_workspace(self) -> float:
        return float(self.workspace.max())

    @cached_property
    def _moments(self) -> tuple[list[tuple[list[float], float]], list[tuple[list[float], float, int]]]:
        """Microbatches held and bytes of gradients, while a forward runs; and while a backward does, with its chunk."""
        flight = self.in_flight
        graded, in_backward = flight.graded @ self.weights, flight.graded_backward @ self.weights
        return (
            list(zip(flight.held.tolist(), graded.tolist(), strict=True)),
            list(zip(flight.in_backward.tolist(), in_backward.tolist(), flight.running.tolist(), strict=True)),
        )

    def _peak(self, kept: Sequence[float], again: Sequence[float]) -> float:
        """Bytes of activations and gradients when they are most."""
        forward, backward = self._moments
        most: float = max(sum(map(mul, held, kept)) + gradients for held, gradients in forward)
        for held, gradients, at in backward:
            most = max(most, sum(map(mul, held, kept)) + gradients + again[at])
        return most

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

    def _held(self, recompute: Sequence[str], shards: Sequence[int]) -> Held:
        """Bytes at the rank's peak, messages apart."""
        rows = [self._row(name) for name in recompute]
        kept = np.array([row[v] for v, (row, _) in enumerate(rows)])
        again = np.array([row[v] for v, (_, row) in enumerate(rows)])
        peak = self.in_flight.peak(kept, again, self.weights)
        gradients, activations = peak.graded * self.weights, peak.held * kept + peak.anew * again
        workspace = self.workspace
        if float((gradients + activations).sum() + workspace.max()) < float(self.weights.sum()):
            # Behind the batch all gradients are there, and nothing else that comes and goes.
            gradients, activations, workspace = self.weights, np.zeros_like(kept), np.zeros_like(kept)
        return Held(
            parameters=self.weights * self.in_flight.versions,
            gradients=gradients,
            optimizer=self.weights * self.rules.optimizer_ratio / np.array(shards),
            buffers=self.sums.buffers[self.own],
            activations=activations,
            workspace=workspace,
        )

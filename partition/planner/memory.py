"""What lies on the ranks of a configuration at the peak, and the least recomputation with which it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...schedules.messages import RECEIVES_AHEAD
from ..memory_use import MemoryUse
from ..solver.antichains import Floats
from .in_flight import InFlight
from .model import StageSums

BUCKET_BYTES = 1 << 24  # of gradients that the runtime sums over replicas at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Of the V stages of a rank: what is recomputed, over how many ranks the optimizer's state is divided."""

    recompute: tuple[bool, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemory:
    """One rank, figures by stage [V].

    Arguments:
        treatment: of its stages.
        weights: of one version [bytes].
        versions: of them.
        gradients: there at the peak [bytes]: none of a stage whose first backward is still to come.
        optimizer, buffers, activations, workspace: at the rank's peak [bytes].
        communication: of the rank [bytes].
        in_flight: the most microbatches of each stage that are there at once.
        too_many: bytes beyond the device's memory; 0 where it fits.
    """

    treatment: Treatment
    weights: Floats
    versions: int
    gradients: Floats
    optimizer: Floats
    buffers: Floats
    activations: Floats
    workspace: Floats
    communication: float
    in_flight: tuple[int, ...]
    too_many: float = 0.0

    @property
    def total(self) -> float:
        """Of the rank [bytes]."""
        held = self.weights * self.versions + self.gradients + self.optimizer + self.buffers + self.activations
        return float(held.sum() + self.workspace.max()) + self.communication

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """By stage; together the rank's (of the workspace the largest counts). Messages stand with the first one."""
        return tuple(
            MemoryUse(
                parameters=float(self.weights[v]) * self.versions,
                gradients=float(self.gradients[v]),
                optimizer=float(self.optimizer[v]),
                buffers=float(self.buffers[v]),
                activations=float(self.activations[v]),
                workspace=float(self.workspace[v]),
                communication=self.communication if v == 0 else 0.0,
            )
            for v in range(len(self.weights))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank as its memory sees it: position p of P, replicas D, tensor ranks T, memory of its device [bytes]."""

    position: int
    pipeline: int
    replicas: int
    tensor: int
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """What the planner may do about memory.

    Arguments:
        optimizer_ratio: bytes of state a byte of parameters.
        recompute, sharding: what is allowed, some of "none" and "full".
    """

    optimizer_ratio: float
    recompute: tuple[str, ...]
    sharding: tuple[str, ...]

    def fit(self, sums: StageSums, in_flight: InFlight, place: RankPlace) -> RankMemory:
        """The first treatment with which the rank's stages fit its device, or the one with the least excess."""
        own = slice(place.position, None, place.pipeline)
        stash, before, behind = sums.stash[own], sums.before[own], sums.behind[own]
        weights, buffers = sums.weights[own], sums.buffers[own]
        # Beside what the nodes need: the gradients of the stage's output and input while a backward runs.
        workspace = sums.workspace[own] + before + behind
        most = in_flight.held.max(axis=0)
        ahead = min(RECEIVES_AHEAD, in_flight.num_microbatches * len(weights))
        received = float(before.max() + behind.max()) * ahead / place.tensor
        gain = most * (stash - before) / np.maximum(sums.forward[own], 1e-12)
        if place.replicas > 1:
            received += min(float(weights.sum()), BUCKET_BYTES)
        nearest: RankMemory | None = None
        for treatment in self._treatments(sums.update[own], gain, place.replicas):
            recompute = np.array(treatment.recompute)
            again = np.where(recompute, stash, 0.0)
            kept = np.where(recompute, before, stash)
            peak = in_flight.peak(kept, again, weights)
            memory = RankMemory(
                treatment=treatment,
                weights=weights,
                versions=in_flight.versions,
                gradients=peak.graded * weights,
                optimizer=weights * self.optimizer_ratio / np.array(treatment.shards),
                buffers=buffers,
                activations=peak.held * kept + peak.anew * again,
                workspace=workspace,
                communication=received,
                in_flight=tuple(most.astype(int).tolist()),
            )
            running = float((memory.gradients + memory.activations).sum() + workspace.max())
            if running < float(weights.sum()):  # behind the batch, when all gradients and no activations are there
                none = np.zeros_like(stash)
                memory = replace(memory, gradients=weights, activations=none, workspace=none)
            excess = memory.total - place.limit
            if excess <= place.limit * 1e-12:
                return memory
            if nearest is None or excess < nearest.too_many:
                nearest = replace(memory, too_many=excess)
        assert nearest is not None
        return nearest

    def _treatments(self, update: Floats, gain: Floats, replicas: int) -> Iterator[Treatment]:
        """What to try in turn; each next one costs at least as much time.

        The optimizer's state is divided where the step takes time (a share of it remains), else only where memory is
        short. Stages are recomputed one after the other, those first that free the most bytes for a second of theirs.
        """
        may_shard = "full" in self.sharding and replicas > 1
        must = "none" not in self.sharding and replicas > 1
        wanted = tuple(replicas if must or (may_shard and seconds > 0) else 1 for seconds in update.tolist())
        sharded = (replicas if may_shard else 1,) * len(wanted)
        again = ["none" not in self.recompute] * len(wanted)
        chunks = [v for v in np.argsort(-gain, kind="stable").tolist() if gain[v] > 0 and len(self.recompute) == 2]
        for chunk in (None, *chunks):
            if chunk is not None:
                again[chunk] = True
            yield Treatment(recompute=tuple(again), shards=wanted)
            if sharded != wanted:
                yield Treatment(recompute=tuple(again), shards=sharded)

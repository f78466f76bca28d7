"""Memory of a rank, by data structure: the one place that says so, for `partition()` and `plan()` alike.

    parameters     W versions
    gradients      W, once a backward has left some, or (behind the batch) where that is more than all that ran
    optimizer      W ratio, or a share of it where it is divided over the replicas
    buffers        of the nodes
    activations    stash of every microbatch in flight; a recomputed stage keeps its input instead, and the stash of one
    workspace      of the node that needs most, and the gradients of the stage's output and input
    communication  receives posted ahead, sends not yet known to be received, and a bucket of gradients being summed

`MemoryRules.fit` counts one rank exactly, from what is in flight in its own program. `stage_parts` is the closed form
for stages between any two cuts, elementwise, never less: with it the dynamic programs know what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..schedules.messages import BUCKET_BYTES, RECEIVES_AHEAD
from .in_flight import InFlight
from .memory_use import MemoryUse
from .stage_cost import StageSums
from .topology import Floats

GRADIENTS_SENT = 2  # that are not yet known to be received, at most
Figures = Any  # a number or an array of them; they broadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Choices for the memory of a rank's V stages: recomputed or not, ranks that share the optimizer's state."""

    recompute: tuple[bool, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank at its peak.

    Arguments:
        treatment: of its stages.
        uses: [V] by stage; messages stand with the first one.
        in_flight: [V] the most microbatches of each stage that are there at once.
        too_many: bytes beyond the device's memory; 0 where it fits.
    """

    treatment: Treatment
    uses: tuple[MemoryUse, ...]
    in_flight: tuple[int, ...]
    too_many: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the rank, all together."""
        whole = self.uses[0]
        for use in self.uses[1:]:
            whole += use
        return whole.total


class _Held(NamedTuple):
    """[V] bytes of each stage of a rank."""

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

    def uses(self, messages: float) -> tuple[MemoryUse, ...]:
        """[V] the same as records, messages with the first one."""
        rows = zip(*(column.tolist() for column in self), strict=True)
        return tuple(
            MemoryUse(**dict(zip(self._fields, row, strict=True)), communication=0.0 if v else messages)
            for v, row in enumerate(rows)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank as its memory sees it: position p of P, replicas D, tensor ranks T, memory of its device [bytes]."""

    position: int
    pipeline: int
    replicas: int
    tensor: int
    limit: float


def stage_parts(
    sums: StageSums,
    *,
    versions: Figures,
    optimizer: float,
    has_replicas: Figures = False,
    recompute: bool = False,
    tensor: int = 1,
    num_chunks: int = 1,
) -> tuple[Floats, Floats]:
    """Bytes on a device of each stage, elementwise: held in any case, and for each microbatch in flight.

    What the V stages of a rank share counts with a V-th.

    Arguments:
        versions: of the weights.
        optimizer: bytes of its state a byte of parameters, on one rank.
        has_replicas: whether gradients are summed over replicas.
    """
    share = tensor * num_chunks
    sent = sums.before * (RECEIVES_AHEAD + GRADIENTS_SENT) + sums.behind * RECEIVES_AHEAD
    workspace = sums.workspace / num_chunks + sums.before + sums.behind
    bucket = np.where(has_replicas, np.minimum(sums.weights, BUCKET_BYTES / num_chunks), 0.0)
    fixed = sums.weights * (versions + 1 + optimizer) + sums.buffers + workspace + sent / share + bucket
    if recompute:
        return fixed + sums.stash, sums.behind / share + sums.before
    return fixed, sums.behind / share + sums.stash


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """Choices that are allowed, and the optimizer.

    Arguments:
        optimizer_ratio: bytes of state a byte of parameters.
        recompute, sharding: what is allowed, some of "none" and "full".
    """

    optimizer_ratio: float
    recompute: tuple[str, ...] = ("none",)
    sharding: tuple[str, ...] = ("none",)

    def fit(self, sums: StageSums, in_flight: InFlight, place: RankPlace) -> RankMemory:
        """The first treatment with which the rank's stages fit its device, or the one with the least excess."""
        own = slice(place.position, None, place.pipeline)
        stash, before, weights = sums.stash[own], sums.before[own], sums.weights[own]
        most = in_flight.held.max(axis=0)
        num_messages = in_flight.num_microbatches * len(weights)
        received, returned = min(RECEIVES_AHEAD, num_messages), min(GRADIENTS_SENT, num_messages)
        behind = float(sums.behind[own].max()) * received + float((sums.behind[own] * most).sum())
        messages = (float(before.max()) * (received + returned) + behind) / place.tensor
        if place.replicas > 1:
            messages += min(float(weights.sum()), BUCKET_BYTES)
        gain = most * (stash - before) / np.maximum(sums.forward[own], 1e-12)
        best: tuple[float, Treatment, _Held] | None = None
        for treatment in self._treatments(sums.update[own], gain, place.replicas):
            held = self._held(treatment, sums, own, in_flight)
            excess = held.total + messages - place.limit
            if best is None or excess < best[0]:
                best = excess, treatment, held
            if excess <= place.limit * 1e-12:
                best = 0.0, treatment, held
                break
        assert best is not None
        too_many, treatment, held = best
        return RankMemory(
            treatment=treatment,
            uses=held.uses(messages),
            in_flight=tuple(most.astype(int).tolist()),
            too_many=too_many,
        )

    def _held(self, treatment: Treatment, sums: StageSums, own: slice, in_flight: InFlight) -> _Held:
        """What stands at the rank's peak, messages apart."""
        stash, before, weights = sums.stash[own], sums.before[own], sums.weights[own]
        recompute = np.array(treatment.recompute)
        again, kept = np.where(recompute, stash, 0.0), np.where(recompute, before, stash)
        peak = in_flight.peak(kept, again, weights)
        gradients, activations = peak.graded * weights, peak.held * kept + peak.anew * again
        workspace = sums.workspace[own] + before + sums.behind[own]
        if float((gradients + activations).sum() + workspace.max()) < float(weights.sum()):
            # Behind the batch all gradients are there, and nothing else that comes and goes.
            gradients, activations, workspace = weights, np.zeros_like(stash), np.zeros_like(stash)
        return _Held(
            parameters=weights * in_flight.versions,
            gradients=gradients,
            optimizer=weights * self.optimizer_ratio / np.array(treatment.shards),
            buffers=sums.buffers[own],
            activations=activations,
            workspace=workspace,
        )

    def _treatments(self, update: Floats, gain: Floats, replicas: int) -> Iterator[Treatment]:
        """Treatments to try in turn; each next one costs at least as much time.

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

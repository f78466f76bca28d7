"""Costs of a stage: the one place that says so, for `partition()` and `plan()` alike.

Seconds of a stage on its ranks, of one microbatch:

    F, B      its nodes' over the speed of its slowest device; a recomputed stage runs F once more in B
    message   latency + bytes across the cut / T / bandwidth of the slowest link between ranks that share a microbatch
    sending   the bytes of the messages over both cuts, without latency, which delays a link and does not slow it down

and of one update:

    ring      gradients summed over the D replicas (`Topology.ring`)
    step      the optimizer's step, a share of it where its state is divided

A stage has two lanes, which overlap. Its pace is that of the slower one, a microbatch:

    work      (F + B) share                 share: of a batch's M microbatches that the busiest of D replicas runs
    links     sending share + ring updates  updates: a microbatch, 1/M where a batch is one

The dynamic program of `partition()` looks at the same lanes where only the stage's range of devices is known, not yet
the ranks of its neighbours (`solver/ranges.py`): it is never slower there than here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .topology import Floats, TransferTime


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSums:
    """Sums over the nodes of stages, arrays of one shape.

    Arguments:
        forward, backward, update: F, B, optimizer's step [s].
        weights, buffers, stash: held, and kept from F to B [bytes].
        before, behind: of tensors that cross the cut in front of the stage and behind it [bytes].
        workspace: of the node that needs most while it runs [bytes].
    """

    forward: Floats
    backward: Floats
    update: Floats
    weights: Floats
    buffers: Floats
    stash: Floats
    before: Floats
    behind: Floats
    workspace: Floats

    @property
    def work(self) -> Floats:
        """F + B [s]."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSeconds:
    """[S] seconds of each stage: of a microbatch (F, B, message to the next stage, all that it sends), of an update."""

    forward: Floats
    backward: Floats
    message: Floats
    sending: Floats
    ring: Floats
    step: Floats

    @property
    def work(self) -> Floats:
        """[S] F + B."""
        return self.forward + self.backward


def busiest_share(num_microbatches: int | None, replicas: Floats) -> Floats:
    """Part of a batch that the busiest of so many replicas runs; without a batch all have equal parts.

    >>> busiest_share(8, np.array([1, 3, 4])).tolist(), busiest_share(None, np.array([4])).tolist()
    ([1.0, 0.375, 0.25], [0.25])
    """
    if num_microbatches is None:
        return np.asarray(1 / replicas)
    return np.asarray(-(-num_microbatches // replicas) / num_microbatches)


def pace(*, work: Floats, links: Floats) -> Floats:
    """Seconds a microbatch of the slower of two lanes."""
    return np.maximum(work, links)


def stage_seconds(
    sums: StageSums,
    *,
    speeds: Floats,
    inward: Sequence[TransferTime],
    outward: Sequence[TransferTime],
    rings: Sequence[TransferTime],
    tensor: int,
    recompute: Floats,
    shards: Floats,
) -> StageSeconds:
    """The table above for S stages whose ranks are known.

    Arguments:
        speeds: [S] of the slowest device, times that of the profile's.
        inward, outward, rings: [S] to the stage in front and behind, over the replicas.
        tensor: T; each of T ranks sends its share of a message.
        recompute: [S] 1 where F runs again in B, else 0.
        shards: [S] ranks over which the optimizer's state is divided.
    """
    links_in, links_out = (np.array([each.seconds_a_byte for each in links]) / tensor for links in (inward, outward))
    sent_in, sent_out = sums.before * links_in, sums.behind * links_out
    return StageSeconds(
        forward=sums.forward / speeds,
        backward=(sums.backward + recompute * sums.forward) / speeds,
        message=np.array([each.latency for each in outward]) + sent_out,
        sending=sent_in + sent_out,
        ring=np.array(
            [each.seconds(w) if w > 0 else 0.0 for each, w in zip(rings, sums.weights.tolist(), strict=True)]
        ),
        step=sums.update / speeds / shards,
    )

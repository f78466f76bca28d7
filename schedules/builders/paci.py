"""PACI: batches follow each other without a flush, on one version of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from ..families import Family
from ..ir import Schedule
from .replicas import replica_counts
from .streams import build_stream, check_update_every, deepest_first
from .warmup import plain_warmup


def paci(
    *,
    num_ranks: int,
    num_microbatches: int,
    update_every: int | None = None,
    replicas: Sequence[int] | None = None,
    num_batches: int | None = None,
) -> Schedule:
    """1F1B without a flush and without a stash, where few updates bound how far weights drift (Elam et al., 2026).

        rank 0 | F0 F1 F2 .  .  B0 F3 B1 U F4 B2 ...      P=3, M=2: one update between F2 and B2, none between F1 and B1
        rank 1 | .  F0 F1 .  B0 F2 B1 U F3 B2 F4 ...      one between F2 and B2, too
        rank 2 | .  .  F0 B0 F1 B1 U F2 B2 F3 B3 ...      never one

    A stage has one set of weights, which it updates in place behind the backward of each `update_every`-th (K-th)
    microbatch. Forward and backward alike read what is there when they run: a microbatch whose forward ran before an
    update and whose backward runs behind it uses the activations that its forward kept, and the new weights.

    Of n microbatches in flight at a stage, n - 1 backwards run between the forward and the backward of the last, so
    that these are at most ceil((n - 1)/K) updates apart: with K >= P - 1 none or one. The checker proves it.

    Arguments:
        update_every: microbatches between two updates, K; it divides M, and is M by default. A multiple of the replica
            counts, since replicas share their gradients at each update, for which they wait for each other.
        replicas: of each stage, `sum(replicas) == num_ranks`; one each by default.
        num_batches: that the program spans; enough to show the steady state by default.

    Raises ValueError for options that do not fit.
    """
    counts = replica_counts(replicas, num_ranks)
    every = num_microbatches if update_every is None else update_every
    check_update_every(every, num_microbatches, counts)
    return build_stream(
        name="paci",
        rule="one-version",
        counts=counts,
        num_microbatches=num_microbatches,
        warmups=[plain_warmup(counts, stage) for stage in range(len(counts))],
        update_every=every,
        num_batches=num_batches,
    )


PACI = Family(
    name="paci",
    build=paci,
    options=("num_batches", "replicas", "update_every"),
    weight_rules=("one-version",),
    full_after=1,
    batch_seconds=lambda equal: None if equal.latency else equal.work,
    peak_activations=deepest_first,
)

"""PipeDream and PipeDream-2BW: batches follow each other without a flush, each stage on weight versions of its own.

What differs is when a stage updates (U) and which version a forward uses; the order is that of `streams`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..families import Family
from ..ir import Schedule
from .replicas import replica_counts
from .streams import build_stream, check_update_every, deepest_first
from .warmup import plain_warmup

Warmup = str | Sequence[int]


def pipedream(
    *,
    num_ranks: int,
    num_microbatches: int,
    update_every: int = 1,
    vertical_sync: bool = False,
    replicas: Sequence[int] | None = None,
    num_batches: int | None = None,
) -> Schedule:
    """1F1B without a flush, with weight stashing (Narayanan et al., SOSP 2019).

        rank 0 | F0 F1 F2 .  .  B0 U F3 B1 U F4 B2 U ...      P=3, unit time: F3 uses version 1, F4 version 2
        rank 1 | .  F0 F1 .  B0 U F2 B1 U F3 B2 U ...         the same F3 uses version 2 here
        rank 2 | .  .  F0 B0 U F1 B1 U F2 B2 U ...            and version 3 here

    A forward uses the newest weights of its stage, its backward the same: a rank keeps one version more than its
    warm-up is deep. With vertical sync all stages use the version that the input stage saw; then every rank keeps P.

    Arguments:
        update_every: microbatches between two updates; it divides M. Replicas share their gradients at each update,
            so it is a multiple of the replica counts (by default their least common multiple), and wait for each other
            even where sums take no time.
        vertical_sync: see above.
        replicas: of each stage, `sum(replicas) == num_ranks`; one each by default.
        num_batches: that the program spans; enough to show the steady state by default.

    Raises ValueError for options that do not fit.
    """
    counts = replica_counts(replicas, num_ranks)
    if math.lcm(*counts) > 1 and update_every == 1:
        update_every = math.lcm(*counts)
    check_update_every(update_every, num_microbatches, counts)
    if not isinstance(vertical_sync, bool):
        raise ValueError(f"vertical_sync={vertical_sync!r}: expected True or False")
    warmups = [plain_warmup(counts, stage) for stage in range(len(counts))]
    return build_stream(
        name="pipedream",
        rule="vertical-sync" if vertical_sync else "stashing",
        counts=counts,
        num_microbatches=num_microbatches,
        warmups=warmups,
        update_every=update_every,
        num_batches=num_batches,
    )


def two_bw(
    *,
    num_ranks: int,
    num_microbatches: int,
    warmup: Warmup = "plain",
    replicas: Sequence[int] | None = None,
    num_batches: int | None = None,
) -> Schedule:
    """PipeDream-2BW: double-buffered weights (Narayanan et al., ICML 2021).

        rank 0 | F0 F1 .  B0 F2 B1 U F3 B2 F4 B3 U F5 ...     P=2, M=2: F2 and F3 (batch 1) use version 0,
        rank 1 | .  F0 B0 F1 B1 U F2 B2 F3 B3 U F4 B4 ...     F4 and F5 (batch 2) version 1

    All microbatches of batch t use version max(t - 1, 0) on every stage, in forward and backward, and one update a
    batch makes version t + 1 from version t: W(t+1) = W(t) - update(gradient at W(t-1)). Two versions are enough.

    M must be at least the warm-up of rank 0: batch t + 2 begins on version t + 1, which needs the last backward of
    batch t; rank 0 runs that backward `warm-up` forwards later, and those must belong to batch t + 1.

    Arguments:
        warmup: forwards ahead of the backwards, by stage. "plain": P - 1 - s, as 1F1B, without a bubble when messages
            take no time. "eager": twice that (where M allows), which hides messages of up to half of F + B each way,
            at the price of as many more activations. Or S numbers.
        replicas, num_batches: as in `pipedream`; M need not be a multiple of the replicas.

    Raises ValueError for options that do not fit, and for M below the warm-up.
    """
    counts = replica_counts(replicas, num_ranks)
    warmups = _warmups(warmup, counts, num_microbatches)
    return build_stream(
        name="2bw",
        rule="2bw",
        counts=counts,
        num_microbatches=num_microbatches,
        warmups=warmups,
        most_ahead=num_microbatches,
        update_every=num_microbatches,
        num_batches=num_batches,
    )


def _warmups(warmup: Warmup, counts: Sequence[int], num_microbatches: int) -> list[int]:
    num_stages = len(counts)
    plain = [plain_warmup(counts, stage) for stage in range(num_stages)]
    if not isinstance(warmup, list | tuple):
        if warmup not in ("plain", "eager"):
            raise ValueError(f"warmup={warmup!r}: expected 'plain', 'eager', or one number a stage")
        # Replicas start with fewer where they have fewer; a stage of one rank has all M.
        least = max([depth for depth, count in zip(plain, counts, strict=True) if count == 1] + [max(counts)])
        if num_microbatches < least:
            raise ValueError(
                f"num_microbatches={num_microbatches} under 2bw: expected at least {least}, the warm-up of its first "
                f"stage (and one for each replica), since batch t + 2 begins on the weights that the last backward of "
                f"batch t makes; give more microbatches, or fewer ranks"
            )
        if warmup == "plain":
            return plain
        # Each stage at least one deeper than the next: else it would wait for the next one's backward each time.
        return [min(2 * depth, num_microbatches - stage) for stage, depth in enumerate(plain)]
    if num_microbatches < max(counts):
        raise ValueError(
            f"num_microbatches={num_microbatches} with replicas={tuple(counts)}: expected at least {max(counts)}, one "
            f"for each replica of a stage"
        )
    depths = list(warmup)
    if len(depths) != num_stages or not all(isinstance(d, int) and 0 <= d <= num_microbatches for d in depths):
        raise ValueError(
            f"warmup={depths} for {num_stages} stages: expected {num_stages} whole numbers from 0 to "
            f"num_microbatches={num_microbatches}"
        )
    if depths != sorted(depths, reverse=True):
        raise ValueError(f"warmup={depths}: expected no stage deeper than the one before it, whose outputs it takes")
    return depths


PIPEDREAM = Family(
    name="pipedream",
    build=pipedream,
    options=("num_batches", "replicas", "update_every", "vertical_sync"),
    weight_rules=("stashing", "vertical-sync"),
    full_after=1,
    batch_seconds=lambda equal: None if equal.latency else equal.work,
    peak_activations=deepest_first,
)

TWO_BW = Family(
    name="2bw",
    build=two_bw,
    options=("num_batches", "replicas", "warmup"),
    aliases=("pipedream-2bw",),
    weight_rules=("2bw",),
    full_after=1,
    batch_seconds=lambda equal: None if equal.latency else equal.work,
    peak_activations=deepest_first,
)

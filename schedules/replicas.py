"""Replicated stages: how many ranks each stage has, and how far its replicas run ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence


def replica_counts(replicas: Sequence[int] | None, num_ranks: int) -> list[int]:
    """The ranks of each stage, one each where nothing is given; ValueError unless they make `num_ranks` in all."""
    if replicas is None:
        return [1] * num_ranks
    counts = list(replicas)
    if not all(isinstance(count, int) and count >= 1 for count in counts) or sum(counts) != num_ranks:
        raise ValueError(
            f"replicas={tuple(counts)} on {num_ranks} ranks: expected a count of at least 1 for each stage, "
            f"{num_ranks} in all"
        )
    return counts


def plain_warmup(counts: Sequence[int], stage: int) -> int:
    """Forwards of one replica ahead of its backwards, so that all ranks behind it have work (PipeDream's rule,
    Narayanan et al., SOSP 2019): P - 1 - s without replicas."""
    return math.ceil(sum(counts[stage:]) / counts[stage]) - 1

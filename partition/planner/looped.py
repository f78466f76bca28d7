"""The partitioner where a rank has several stages: cuts and equal replicas for one schedule, one V, one M."""

from __future__ import annotations

from ..cluster import Cluster
from ..plans.plan import Plan
from ..profile import Profile
from ..strict import count
from .plan import plan

LOOPING = ("interleaved", "looped-bfs")


def partition_looped(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str,
    num_chunks: int,
    num_microbatches: int | None,
    compression: float | None,
    straight: bool,
    memory_limit: float | None,
    optimizer_bytes: float,
    num_candidates: int,
    max_cuts: int,
) -> Plan:
    """The planner with all but the cuts, P and D given: nothing is recomputed or sharded.

    Raises ValueError without a number of microbatches, with a compression, and where nothing fits.
    """
    if num_microbatches is None or compression is not None:
        raise ValueError(
            f"schedule={schedule!r} with num_microbatches={num_microbatches}, activation_compression_ratio="
            f"{compression}: expected a number of microbatches, and no compression"
        )
    if count("num_chunks", num_chunks) < 2:
        raise ValueError(
            f"num_chunks={num_chunks} with schedule={schedule!r}: expected at least 2 (a schedule with one stage a "
            f"rank is 1f1b)"
        )
    return plan(
        profile,
        cluster,
        global_batch=num_microbatches * (profile.microbatch_size or 1),
        memory_limit=memory_limit,
        schedules=(schedule,),
        chunk_sizes=(num_chunks,),
        data_sizes=(1,) if straight else None,
        recompute=("none",),
        optimizer_sharding=("none",),
        optimizer_bytes=optimizer_bytes,
        num_runners_up=num_candidates,
        max_cuts=max_cuts,
    )

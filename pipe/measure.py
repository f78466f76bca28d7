"""Measurements of all ranks put together: timelines and costs. Collective over the processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from ..comm import World
from ..schedules import Costs, Op, Schedule, Timeline
from .recorder import RankRecord, Recorder, assemble_timeline, costs_from_medians

T = TypeVar("T")


def gather_records(schedule: Schedule, records: Sequence[RankRecord], world: World) -> Timeline:
    """The Timeline of all ranks, on every rank."""
    if not world.distributed:
        return assemble_timeline(schedule, records)
    # Hosts differ in their monotonic clocks; between hosts the wall clock must do.
    mine = (socket.gethostname(), time.time() - time.perf_counter(), records[0])
    everyone = _gather(mine, world)
    host, anchor, _ = everyone[0]
    return assemble_timeline(
        schedule, [replace(r, offset=0.0 if h == host else a - anchor) for h, a, r in everyone]
    )


def gather_costs(schedule: Schedule, recorders: Sequence[Recorder], world: World, *, latency: float = 0.0) -> Costs:
    """Median costs by stage and op of all ranks, on every rank."""
    medians: dict[tuple[int, Op], float] = {}
    for recorder in recorders:
        medians.update(recorder.medians())
    if world.distributed:
        merged: dict[tuple[int, Op], float] = {}
        for one in _gather(medians, world):
            merged.update(one)
        medians = merged
    if not medians:
        raise ValueError("nothing was measured yet: expected at least one train_step before measured_costs()")
    return costs_from_medians(medians, num_stages=schedule.num_stages, latency=latency)


def _gather(mine: T, world: World) -> list[T]:
    everyone: list[T | None] = [None] * world.size
    dist.all_gather_object(everyone, mine)
    return everyone  # type: ignore[return-value]



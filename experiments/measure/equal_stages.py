"""Pipelines of equal stages that the experiments simulate, and emulate with stages that sleep. No torch.

A rank's work of one microbatch takes `FORWARD` and `BACKWARD` seconds under every schedule: with V chunks, each action
takes a V-th of it. So all schedules of equal P and M have the same ideal, and differ in their waits.
"""

from __future__ import annotations

from ...schedules import Costs, Schedule, build
from ...schedules.families.registry import family
from ..jobs.case import Case

FORWARD, BACKWARD = 0.020, 0.040  # [s] per rank and microbatch; of the split backward, I and W are half each
_CHUNKS = 2  # of interleaved schedules by default


def schedule_of(case: Case) -> Schedule:
    """The schedule of a case: its `schedule`, `ranks`, `microbatches` and, if interleaved, `chunks` (2)."""
    chunks = case.count("chunks", _CHUNKS) if family(case.text("schedule")).takes_chunks else None
    return build(
        case.text("schedule"),
        num_ranks=case.count("ranks"),
        num_microbatches=case.count("microbatches"),
        num_chunks=chunks,
    )


def costs_of(schedule: Schedule) -> Costs:
    chunks = schedule.num_stages // schedule.num_ranks
    half = BACKWARD / 2 / chunks
    return Costs(forward=FORWARD / chunks, input_grad=half, weight_grad=half)

"""Measurements of all ranks put together: timelines and costs. Collective over the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...comm import Collectives, HostClocks
from ...schedules import Costs, Op, Spread, Timeline, estimate_spread
from ...schedules.timing.costs import CostTable
from ...schedules.timing.records import RankRecord
from .recorder import Recorder, Timed, costs_from_medians


def gather_records(
    records: Sequence[RankRecord],
    collectives: Collectives,
    assemble: Callable[[Sequence[RankRecord]], Timeline],
    clocks: HostClocks,
) -> Timeline:
    """The Timeline of all ranks, on every rank, put together by `assemble`; clocks of hosts are compared before."""
    if len(records) > 1:  # all ranks are here
        return assemble(records)
    clocks.compare()
    (record,) = records
    offset, error = clocks.offset_at(record.compute[0].start) if record.compute else (0.0, 0.0)
    mine = replace(record, offset=offset, error=error)
    return assemble(collectives.gather_ranks(mine, what="gathering the timeline"))


def gather_costs(
    recorders: Sequence[Recorder], collectives: Collectives, *, num_stages: int, latency: float
) -> Costs | None:
    """Median costs by stage and op of all ranks, on every rank; None if nothing was measured yet.

    Arguments:
        latency: of a message as this rank measured it (0 where it did not) [s].
    """
    medians: dict[Timed, float] = {}
    own_overheads: dict[int, float] = {}
    for recorder in recorders:
        medians.update(recorder.medians())
        own_overheads.update(recorder.median_overheads())
    merged: dict[Timed, float] = {}
    overheads: dict[int, float] = {}
    norms: list[float | None] = []
    mine = (medians, own_overheads, latency, [recorder.median_norm() for recorder in recorders])
    for one, seen_overheads, seen_latency, seen_norms in collectives.gather(mine, what="gathering the measured costs"):
        for key, seconds in one.items():
            # The rank that comes last to a sum waits for nobody: its time is what the sum takes.
            waits = key[1] is Op.REDUCE_GRAD and key in merged
            merged[key] = min(merged[key], seconds) if waits else seconds
        overheads |= seen_overheads
        latency = max(latency, seen_latency)
        norms += seen_norms
    # The rank that comes last to the norm waits for nobody: its time is what the norm takes.
    norm = min((seconds for seconds in norms if seconds is not None), default=None)
    if not merged:
        return None
    return costs_from_medians(merged, overheads, num_stages=num_stages, latency=latency, norm=norm)


def gather_spread(recorders: Sequence[Recorder], collectives: Collectives, costs: CostTable) -> Spread | None:
    """How the durations of the last steps vary around these costs, on every rank; None where too few were measured."""
    if len(recorders) > 1:  # all ranks are here
        return estimate_spread([recorder.steps() for recorder in recorders], costs)
    (recorder,) = recorders
    return estimate_spread(collectives.gather_ranks(recorder.steps(), what="gathering the measured durations"), costs)

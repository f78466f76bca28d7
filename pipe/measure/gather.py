"""Measurements of all ranks put together: timelines and costs. Collective over the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...comm import Collectives, HostClocks
from ...schedules import Costs, Op, Schedule, Spread, Timeline, estimate_spread
from ...schedules.timing.costs import CostTable
from ...schedules.timing.estimate_spread import LEAST_STEPS
from ...schedules.timing.records import RankRecord, as_it_ran, assemble_timeline
from .recorder import Recorder, Timed, costs_from_medians

_MOST_ACTIONS = 100_000  # of the steps whose times are all looked at


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
    return assemble(collectives.gather_ranks(_placed(record, clocks), what="gathering the timeline"))


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
    outside: list[tuple[float, float, float]] = []
    mine = (
        medians,
        own_overheads,
        latency,
        [recorder.median_norm() for recorder in recorders],
        [around for recorder in recorders if (around := recorder.median_around()) is not None],
    )
    for one, seen_overheads, seen_latency, seen_norms, seen_around in collectives.gather(
        mine, what="gathering the measured costs"
    ):
        for key, seconds in one.items():
            # The rank that comes last to a sum waits for nobody: its time is what the sum takes.
            waits = key[1] is Op.REDUCE_GRAD and key in merged
            merged[key] = min(merged[key], seconds) if waits else seconds
        overheads |= seen_overheads
        latency = max(latency, seen_latency)
        norms += seen_norms
        outside += seen_around
    # The rank that comes last to the norm waits for nobody: its time is what the norm takes.
    norm = min((seconds for seconds in norms if seconds is not None), default=None)
    if not merged:
        return None
    # Likewise the rank that begins first, and the one that ends last: there what is around a step has no waits in it.
    around = sum(min(each) for each in zip(*outside, strict=True))
    return costs_from_medians(merged, overheads, num_stages=num_stages, latency=latency, norm=norm, around=around)


def gather_spread(
    recorders: Sequence[Recorder], collectives: Collectives, costs: CostTable, *, schedule: Schedule, clocks: HostClocks
) -> Spread | None:
    """How the durations of the last steps vary around these costs, on every rank; None where too few were measured."""
    steps = [recorder.steps() for recorder in recorders]
    records = [recorder.records()[-_most_steps(schedule) :] for recorder in recorders]
    if len(recorders) == 1:
        clocks.compare()
        mine = [_placed(record, clocks) for record in records[0]]
        seen = collectives.gather_ranks((steps[0], mine), what="gathering the measured durations")
        steps, records = [each for each, _ in seen], [each for _, each in seen]
    number = min(map(len, records))
    together = zip(*(own[len(own) - number :] for own in records), strict=True)
    timelines = [assemble_timeline(as_it_ran(schedule, step), step) for step in together]
    return estimate_spread(steps, costs, timelines)


def _most_steps(schedule: Schedule) -> int:
    """Steps of which all times are looked at."""
    return max(LEAST_STEPS, _MOST_ACTIONS // max(1, sum(map(len, schedule.programs))))


def _placed(record: RankRecord, clocks: HostClocks) -> RankRecord:
    offset, error = clocks.offset_at(record.compute[0].start) if record.compute else (0.0, 0.0)
    return replace(record, offset=offset, error=error)

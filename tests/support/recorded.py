"""What the ranks of a run would have recorded of a simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagewright.schedules import Op, Timeline
from stagewright.schedules.needs import Needs
from stagewright.schedules.timing.records import RankRecord, assemble_timeline


def records_of(truth: Timeline, overhead: float | Sequence[float] = 0.0) -> list[RankRecord]:
    """Actions without what is around them, by stage, and waits."""
    schedule, needs, records = truth.schedule, Needs(truth.schedule), []
    around = [overhead] * schedule.num_stages if isinstance(overhead, float) else overhead
    for trace in truth.ranks:
        came, free, arrivals = {span.what: span.end for span in trace.comm}, 0.0, []
        for span in trace.compute:
            for message, *_ in needs.arrivals(span.what):
                if message in came:
                    arrivals.append((message, free, max(free, came[message])))
            free = span.end
        compute = tuple(s if s.what.op is Op.U else s._replace(end=s.end - around[s.what.stage]) for s in trace.compute)
        records.append(RankRecord(compute=compute, arrivals=tuple(arrivals), collectives=trace.collectives))
    return records


def recorded(truth: Timeline, overhead: float | Sequence[float] = 0.0) -> Timeline:
    """The timeline that comes of these records.

    Of a simulated stream the first batches are no steady state; a run is in it when it is traced.
    """
    found = assemble_timeline(truth.schedule, records_of(truth, overhead))
    return replace(found, measured=not truth.schedule.is_asynchronous)

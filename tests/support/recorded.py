"""Records that the ranks of a run would have made of a simulated step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from stagewright.schedules import Action, Op, Timeline
from support.inside import Dependencies, RankRecord, assemble_timeline, run_as_one


def records_of(truth: Timeline, overhead: float | Sequence[float] = 0.0) -> list[RankRecord]:
    """Actions without what is around them, by stage, and waits; half of what is around the step on either side."""
    schedule, needs, records = truth.schedule, Dependencies(truth.schedule), []
    around = [overhead] * schedule.num_stages if isinstance(overhead, float) else overhead
    joined = run_as_one(schedule)
    for trace in truth.ranks:
        came, free, arrivals = {span.what: span.end for span in trace.comm}, 0.0, []
        for span in trace.compute:
            for message, *_ in needs.arrivals(span.what):
                if message in came:
                    arrivals.append((message, free, max(free, came[message])))
            free = span.end
        compute = tuple(
            s if s.what.op is Op.U or _is_joined(s.what, joined) else s._replace(end=s.end - around[s.what.stage])
            for s in trace.compute
        )
        step = truth.start - truth.around / 2, truth.end + truth.around / 2
        records.append(RankRecord(compute=compute, arrivals=tuple(arrivals), collectives=trace.collectives, step=step))
    return records


def _is_joined(action: Action, joined: Mapping[int, Collection[int]]) -> bool:
    """Whether it is an I that runs with its W as one: there is nothing in between."""
    return action.op is Op.I and action.index in joined.get(action.stage, ())


def recorded(truth: Timeline, overhead: float | Sequence[float] = 0.0) -> Timeline:
    """The timeline that comes of these records.

    Of a simulated stream the first batches are no steady state; a run is in it when it is traced.
    """
    found = assemble_timeline(truth.schedule, records_of(truth, overhead))
    return replace(found, measured=not truth.schedule.is_asynchronous)

"""What a prediction is held against: the family's closed form, and the lower bound of any order."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from ...schedules import Op, Timeline, family, lower_bound
from ...schedules.families import EqualStages
from ..exhibit import Exhibit
from ..gantt import num_chunks


def figures(exhibit: Exhibit) -> dict[str, Any]:
    """Seconds from batch to batch and bubble of the closed form, and the lower bound of a batch [s]; None where there
    is none."""
    timeline = exhibit.predicted or (exhibit.measured[-1].timeline if exhibit.measured else None)
    if timeline is None:
        return {}
    equal = _equal_stages(timeline)
    seconds = None if equal is None else _closed_form(timeline, equal)
    work = 0.0 if equal is None else equal.num_microbatches * equal.num_chunks * equal.both
    return {
        "closed_seconds": seconds,
        "closed_bubble": 1 - work / seconds if seconds else None,
        "lower_bound": _bound(timeline, exhibit),
    }


def _closed_form(timeline: Timeline, equal: EqualStages) -> float | None:
    try:
        form = family(timeline.schedule.name).batch_seconds
    except ValueError:  # a schedule of another origin
        return None
    return None if form is None else form(equal)


def _equal_stages(timeline: Timeline) -> EqualStages | None:
    """Stages that all take what the mean stage of a timeline takes; None with replicas, and without backwards."""
    schedule = timeline.schedule
    if any(len(owners) > 1 for owners in schedule.owners) or not schedule.has_backward:
        return None
    took: dict[Op, list[float]] = {}
    for trace in timeline.ranks:
        for (_, op, _), start, end in trace.compute:
            took.setdefault(op, []).append(end - start)
    mean = {op: fmean(seconds) for op, seconds in took.items()}
    whole = mean.get(Op.B, 0.0)
    return EqualStages(
        num_ranks=schedule.num_ranks,
        num_microbatches=schedule.num_microbatches,
        num_chunks=num_chunks(timeline),
        forward=mean.get(Op.F, 0.0),
        input_grad=mean.get(Op.I, whole / 2),
        weight_grad=mean.get(Op.W, whole / 2),
    )


def _bound(timeline: Timeline, exhibit: Exhibit) -> float | None:
    """Of a flush batch, under the costs of the prediction."""
    if exhibit.costs is None or timeline.schedule.is_asynchronous:
        return None
    try:
        return lower_bound(timeline.schedule, exhibit.costs, exhibit.links)
    except ValueError:  # costs of other stages than the timeline's
        return None

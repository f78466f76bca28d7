"""Actions beside sums of gradients in measured steps, and the share of the processor that these took of it.

rank 0   |  B0  |     B1     |  B2  |        B1 ran beside a sum and took 2 s longer than B0, B2, ...: the sum's
sum             |------------|               share of the processor is 2 s over the seconds beside it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from ..ir import COMPUTE_OPS, Action, Collective, Op
from .sharing import Taken, seconds_left
from .timeline import Span, Timeline


def under_way(timeline: Timeline) -> dict[Collective, tuple[float, float]]:
    """When each sum and gather began on the last of its ranks, and was through [s]."""
    spans: dict[Collective, list[Span[Collective]]] = defaultdict(list)
    for trace in timeline.ranks:
        for span in trace.collectives:
            spans[span.what].append(span)
    # A rank sees that it is through when it looks: the first one to see it is the nearest to the truth.
    return {what: (max(s.start for s in each), min(s.end for s in each)) for what, each in spans.items()}


def whole_seconds(timeline: Timeline, shares: Sequence[float]) -> list[list[tuple[Action, float]]]:
    """By rank its actions with the seconds that each would have taken of a whole processor.

    Arguments:
        shares: [S] of the processor that sums of a stage take; see `Costs.sum_busy`.
    """
    found = []
    for together, trace in zip(_by_rank(timeline), timeline.ranks, strict=True):
        taken = [Taken(a, b, share) for what, a, b in together if (share := max(shares[s] for s in what.stages)) > 0]
        found.append([(what, seconds_left(taken, start, end)) for what, start, end in trace.compute])
    return found


def measured_shares(timelines: Iterable[Timeline]) -> dict[int, float]:
    """By stage the share of the processor that its sums took of what ran beside them, 0 to 1.

    By as much actions took longer than those of the same stage and op on that rank with no sum beside them (their
    median). A stage is missing where no such action ran beside its sums.
    """
    usual: dict[tuple[int, int, Op], list[float]] = defaultdict(list)
    beside: list[tuple[tuple[int, int, Op], float, float, dict[Collective, float]]] = []
    for timeline in timelines:
        for rank, (together, trace) in enumerate(zip(_by_rank(timeline), timeline.ranks, strict=True)):
            for (stage, op, _), start, end in trace.compute:
                if op not in COMPUTE_OPS:
                    continue
                parts = {what: min(b, end) - max(a, start) for what, a, b in together if a < end and b > start}
                if parts:
                    all_of_it = [Taken(a, b, 1.0) for _, a, b in together]
                    union = end - start - seconds_left(all_of_it, start, end)
                    beside.append(((rank, stage, op), end - start, union, parts))
                else:
                    usual[rank, stage, op].append(end - start)
    medians = {key: median(seconds) for key, seconds in usual.items()}
    return _shares(medians, beside)


def _shares(
    medians: Mapping[tuple[int, int, Op], float],
    beside: Iterable[tuple[tuple[int, int, Op], float, float, Mapping[Collective, float]]],
) -> dict[int, float]:
    """By stage: seconds that actions beside its sums took longer, over seconds beside them."""
    longer: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    for key, took, union, parts in beside:
        if key not in medians or union <= 0:
            continue
        for what, part in parts.items():
            for stage in what.stages:
                longer[stage] += (took - medians[key]) * part / union
                seconds[stage] += part
    return {stage: min(1.0, max(0.0, longer[stage] / seconds[stage])) for stage in seconds if seconds[stage] > 0}


def _by_rank(timeline: Timeline) -> list[list[tuple[Collective, float, float]]]:
    """Sums under way on each rank: from when to when [s]."""
    moments = under_way(timeline)
    return [[(span.what, *moments[span.what]) for span in trace.collectives] for trace in timeline.ranks]

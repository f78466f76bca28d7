"""Inputs of a simulation from measured steps, with the meaning that the simulator gives them.

rank 0   |  B0  |     B1     |  B2  |        B1 overlapped with a sum and took 2 s longer than B0, B2, ...: the sum's
sum             |------------|               share of the processor is 2 s over the seconds of overlap
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from ..ir import COMPUTE_OPS, Action, Collective, Op, Schedule
from ..program import run_as_one
from .costs import COST_OF_OP, NOT_APART, Costs
from .inputs import Cause, Input, action_input, around_actions
from .links import Taken, seconds_left
from .records import launches
from .timeline import Span, Timeline
from .waits import find_gaps, waits


def typical(samples: Sequence[float]) -> float:
    """The mean, where a sample counts as twice the median at most [s].

    Sums of many actions, such as a step, come out near the sum of their means, above that of their medians: what else
    runs on a machine only makes samples longer. A single burst says nothing of the next steps, and counts little.

    >>> typical([1.0] * 8 + [1.5, 90.0])
    1.15
    """
    most = 2 * median(samples)
    return fmean(min(each, most) for each in samples)


def measured_inputs(
    timelines: Sequence[Timeline],
    known: Costs | None = None,
    *,
    planned: Costs | None = None,
    many: Callable[[Sequence[float]], float] = median,
) -> dict[Input, float]:
    """The inputs that measured steps of one schedule show [s]; others are not included.

    Arguments:
        timelines: at least one.
        known: costs that the run measured over all of its steps: they include overhead between actions, without waits,
            and whether there is a norm.
        planned: where the steps do not show the overhead of a stage (one that always waits), theirs is subtracted from
            its messages.
        many: of the samples of an input that occurs several times in a step: median or `typical`; else the median.
    """
    found: dict[Input, list[float]] = defaultdict(list)
    seen = measured_shares(timelines)
    usual = (Costs() if planned is None else planned).table_for(timelines[0].schedule).sum_busy
    shares = [seen.get(stage, share) for stage, share in enumerate(usual)]
    for timeline in timelines:
        for each, seconds in (*_actions(timeline, shares), *_together(timeline)):
            found[each].append(seconds)
    for stage, share in seen.items():
        if (summed := Input(Cause.SUMS, "sum", (stage,))) in found:
            found[summed._replace(kind="held")] = [share * seconds for seconds in found[summed]]
    between = _overheads(timelines, known)
    for stage, seconds in between.items():
        found[Input(Cause.OVERHEAD, "overhead", (stage,))].append(seconds)
    if planned is not None:
        between = dict(enumerate(around_actions(planned, timelines[0].schedule.num_stages))) | between
    messages = [message for timeline in timelines for message in _awaited_messages(timeline)]
    seen_whole = {pair for pair, _, _, whole in messages if whole}
    for pair, maker, took, whole in messages:
        if whole or pair not in seen_whole:
            found[Input(Cause.MESSAGES, "message", pair)].append(max(0.0, took - between.get(maker.stage, 0.0)))
    if known is None or known.norm is not None:
        norms = [norm for timeline in timelines if (norm := _norm(timeline, between)) is not None]
        if len(norms) == len(timelines):
            found[Input(Cause.UPDATE, "norm", ())] = norms
        elif known is not None and known.norm is not None:
            found[Input(Cause.UPDATE, "norm", ())] = [known.norm]
    outside = [seconds_around(timeline, known) for timeline in timelines]
    if any(outside):
        found[Input(Cause.OUTSIDE, "around", ())] = outside
    several = {each for each, seconds in found.items() if len(seconds) > len(timelines)}
    return {each: (many if each in several else median)(seconds) for each, seconds in found.items()}


def durations_of_transfers(
    timelines: Sequence[Timeline], busy: Sequence[Mapping[Action, float]]
) -> Iterator[tuple[int, str, tuple[int, ...], float]]:
    """Messages, sums and norms of measured steps one by one: the step's number, "messages", "sums" or "norm", the
    stages that the message leaves or whose gradients are summed, seconds, which rounding may make negative. `busy`: by
    timeline, the seconds of each action with the overhead after it, which is not part of its message; for a missing
    action the median overhead."""
    between = _overheads(timelines, None)
    for number, (timeline, seconds_of) in enumerate(zip(timelines, busy, strict=True)):
        took = {span.what: span.end - span.start for trace in timeline.ranks for span in trace.compute}
        for _, maker, seconds, whole in _awaited_messages(timeline):
            if whole:
                usual = took[maker] + between.get(maker.stage, 0.0)
                yield number, "messages", (maker.stage,), seconds + took[maker] - seconds_of.get(maker, usual)
        for each, seconds in _together(timeline):
            if each.kind == "sum":
                yield number, "sums", each.at, seconds
        norm = _norm(timeline, between)
        if norm is not None:
            yield number, "norm", (), norm


def seconds_around(timeline: Timeline, known: Costs | None = None) -> float:
    """Seconds of a measured step outside of its actions, sums and updates, including the wait for its batch [s]; 0 if
    the step has no time stamps.

    Without a norm (by `known`) the time between the last backward or sum and the first update belongs to it; else to
    the norm.
    """
    around = timeline.around + (timeline.first_action - timeline.start)
    if not timeline.around or known is None or known.norm is not None:
        return around
    between = around_actions(known, timeline.schedule.num_stages)
    return around + max(0.0, _before_updates(timeline, dict(enumerate(between))) or 0.0)


def own_durations(schedule: Schedule, timeline: Timeline, costs: Costs) -> Costs:
    """Costs with the durations of a measured step's own actions, as they would be on a whole processor.

    For a stream with more batches than were measured these are repeated.
    """
    size = schedule.batch_indices
    seen: dict[tuple[Op, int, int], list[float]] = defaultdict(list)
    for rank in whole_seconds(timeline, costs.table_for(schedule).sum_busy):
        for (stage, op, index), seconds in rank:
            if op in COMPUTE_OPS:
                seen[op, stage, index % size].append(seconds)
    table = costs.free_of_overhead.table_for(schedule)

    def of(op: Op, stage: int, index: int) -> float:
        batch, k = divmod(index, size)
        own = seen.get((op, stage, k))
        return own[batch % len(own)] if own else table.of(op, stage, index)

    stages, indices = range(schedule.num_stages), range(schedule.total_indices)
    rows: dict[str, Any] = {name: [[of(op, s, k) for k in indices] for s in stages] for op, name in COST_OF_OP.items()}
    return replace(costs, **rows, **NOT_APART, index_factors=None)


def _actions(timeline: Timeline, shares: Sequence[float]) -> Iterator[tuple[Input, float]]:
    for rank, actions in enumerate(whole_seconds(timeline, shares)):
        for (stage, op, _), seconds in actions:
            if op in COMPUTE_OPS:
                yield action_input(timeline.schedule, op, stage, rank), seconds
            elif op is Op.U:
                yield Input(Cause.UPDATE, "update", (stage,)), seconds


def _overheads(timelines: Sequence[Timeline], known: Costs | None) -> dict[int, float]:
    if known is not None:
        return dict(enumerate(around_actions(known, timelines[0].schedule.num_stages)))
    found: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        for stage, seconds in _between(timeline):
            found[stage].append(seconds)
    return {stage: median(seconds) for stage, seconds in found.items()}


def _between(timeline: Timeline) -> Iterator[tuple[int, float]]:
    """(stage of the action before, seconds) where a rank continued without a wait, and began no sum."""
    joined = run_as_one(timeline.schedule)
    for trace, gaps in zip(timeline.ranks, find_gaps(timeline), strict=True):
        ends, begun = [span.end for span in trace.compute], [each.start for each in trace.collectives]
        launched = launches(ends, begun, between=lambda begin, end: end - begin)
        for number, (before, span) in enumerate(zip(trace.compute, trace.compute[1:], strict=False)):
            if Op.U in (before.what.op, span.what.op) or number in launched:
                continue
            if before.what == span.what._replace(op=Op.I) and span.what.index in joined.get(span.what.stage, ()):
                continue
            gap = gaps.get(span.what)
            if gap is None:
                yield before.what.stage, 0.0
            elif gap.data == gap.late_peer == gap.transfer == 0:
                yield before.what.stage, gap.unexplained


def _awaited_messages(timeline: Timeline) -> Iterator[tuple[tuple[int, int], Action, float, bool]]:
    """Messages that were waited for: (sender, receiver), the action that made it, seconds from then until its user
    began, and whether its receiver waited from before it was made (else only late messages are seen)."""
    waited = waits(timeline)
    for trace in timeline.ranks:
        previous = timeline.start
        for action, begun, ended in trace.compute:
            seen = [(each, made, way) for each, made, way in waited[action] if way is not None]
            lag = begun - max([previous, *(way.end for _, _, way in seen)])
            previous = ended
            for each, made, way in seen:
                if made is not None:
                    took = way.end - made + max(0.0, lag)
                    yield (each.sender, each.receiver), each.maker, took, way.start <= made


def _together(timeline: Timeline) -> Iterator[tuple[Input, float]]:
    for what, (begun, ended) in collective_times(timeline).items():
        kind = "gather" if what.op is Op.UNSHARD else "sum"
        yield Input(Cause.SUMS, kind, what.stages), max(0.0, ended - begun)


def _norm(timeline: Timeline, between: Mapping[int, float]) -> float | None:
    return None if len(timeline.ranks) == 1 else _before_updates(timeline, between)


def _before_updates(timeline: Timeline, between: Mapping[int, float]) -> float | None:
    """Seconds from the last backward and sum of all ranks to the first update, without the overhead of an action
    (`between`, by stage); None if an update came before."""
    if not timeline.schedule.has_epilogue or timeline.missing:
        return None
    updates = [span.start for trace in timeline.ranks for span in trace.compute if span.what.op is Op.U]
    ends = [
        span.end + between.get(span.what.stage, 0.0)
        for trace in timeline.ranks
        for span in trace.compute
        if span.what.op is not Op.U
    ]
    ends += [s.end for trace in timeline.ranks for s in trace.collectives if s.what.op is Op.REDUCE_GRAD]
    if not updates or min(updates) < max(ends):
        return None
    return min(updates) - max(ends)


def collective_times(timeline: Timeline) -> dict[Collective, tuple[float, float]]:
    """When each sum and gather began on the last of its ranks, and when it ended [s]."""
    spans: dict[Collective, list[Span[Collective]]] = defaultdict(list)
    for trace in timeline.ranks:
        for span in trace.collectives:
            spans[span.what].append(span)
    # A rank notices the end when it looks: the first one to notice it is the most accurate.
    return {what: (max(s.start for s in each), min(s.end for s in each)) for what, each in spans.items()}


def whole_seconds(timeline: Timeline, shares: Sequence[float]) -> list[list[tuple[Action, float]]]:
    """By rank its actions with the seconds that each would have taken on a whole processor; `shares` as `sum_busy`."""
    found = []
    for together, trace in zip(_by_rank(timeline), timeline.ranks, strict=True):
        taken = [Taken(a, b, share) for what, a, b in together if (share := max(shares[s] for s in what.stages)) > 0]
        found.append([(what, seconds_left(taken, start, end)) for what, start, end in trace.compute])
    return found


def measured_shares(timelines: Iterable[Timeline]) -> dict[int, float]:
    """By stage the share of the processor that its sums took from overlapping actions, 0 to 1.

    Such actions took longer than the median of the same stage and op on that rank without overlap. A stage without
    overlapping actions is missing.
    """
    usual: dict[tuple[int, int, Op], list[float]] = defaultdict(list)
    # (rank, stage, op), its seconds, those that overlap with sums, and these by sum
    overlaps: list[tuple[tuple[int, int, Op], float, float, dict[Collective, float]]] = []
    for timeline in timelines:
        for rank, (together, trace) in enumerate(zip(_by_rank(timeline), timeline.ranks, strict=True)):
            for (stage, op, _), start, end in trace.compute:
                if op not in COMPUTE_OPS:
                    continue
                parts = {what: min(b, end) - max(a, start) for what, a, b in together if a < end and b > start}
                if parts:
                    all_of_it = [Taken(a, b, 1.0) for _, a, b in together]
                    union = end - start - seconds_left(all_of_it, start, end)
                    overlaps.append(((rank, stage, op), end - start, union, parts))
                else:
                    usual[rank, stage, op].append(end - start)
    medians = {key: median(seconds) for key, seconds in usual.items()}
    longer: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    for key, took, union, parts in overlaps:
        if key not in medians or union <= 0:
            continue
        for what, part in parts.items():
            for stage in what.stages:
                longer[stage] += (took - medians[key]) * part / union
                seconds[stage] += part
    return {stage: min(1.0, max(0.0, longer[stage] / seconds[stage])) for stage in seconds if seconds[stage] > 0}


def _by_rank(timeline: Timeline) -> list[list[tuple[Collective, float, float]]]:
    times = collective_times(timeline)
    return [[(span.what, *times[span.what]) for span in trace.collectives] for trace in timeline.ranks]


def median_costs(timeline: Timeline) -> Costs:
    """The median of each stage and op in a timeline. Messages and norms cost nothing."""
    found: dict[tuple[Op, int], list[float]] = {}
    for trace in timeline.ranks:
        for (stage, op, _), start, end in trace.compute:
            found.setdefault((op, stage), []).append(end - start)
    stages = range(timeline.schedule.num_stages)
    present = {op for op, _ in found}

    def column(op: Op) -> list[float]:
        return [median(found.get((op, stage), (0.0,))) for stage in stages]

    split = bool(present & {Op.I, Op.W})
    return Costs(
        forward=column(Op.F),
        backward=column(Op.B) if Op.B in present or not split else None,
        input_grad=column(Op.I) if split else None,
        weight_grad=column(Op.W) if split else None,
        update=column(Op.U),
    )

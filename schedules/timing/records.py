"""Records of measured steps, one per rank, assembled to the Timeline of all ranks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..dependencies import Dependencies
from ..ir import COMPUTE_OPS, LAST_USES, MOVE_OPS, Action, Collective, Op, Schedule
from ..lowering.calls import RunCalls
from ..messages import STAGE_KINDS, Message
from ..program import indices_per_batch
from .timeline import ExpertRows, RankTrace, Span, Timeline, What

Moment = TypeVar("Moment")
_REALLY_WAITED = 20e-6  # [s]: below this, a message arrived before it was needed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's step, in seconds of the host's clock."""

    compute: tuple[Span[Action], ...]
    arrivals: tuple[Span[Message], ...]  # (message, wait began, message arrived)
    collectives: tuple[Span[Collective], ...] = ()  # from when this rank began them to their end
    data: tuple[tuple[float, float], ...] = ()  # when this rank began to wait for a batch, and had it
    exchanges: tuple[Span[Collective], ...] = ()  # within actions, from when this rank began them to their end
    rows: tuple[tuple[Action, ExpertRows], ...] = ()  # of actions in which experts, divided over a group, computed
    # when this rank's step began and ended, including everything outside of its actions; None: not stamped
    step: tuple[float, float] | None = None
    offset: float = 0.0  # to add to this rank's times to compare them with rank 0's (hosts differ) [s]
    error: float = 0.0  # most that the offset may be wrong by [s]


_NOTHING = RankRecord(compute=(), arrivals=())


def was_waited_for(message: Message, began: float, there: float) -> bool:
    """Whether a rank waited for a message of a microbatch; the arrival of an early one is not seen."""
    return message.kind in STAGE_KINDS and there - began >= _REALLY_WAITED


def assemble_timeline(schedule: Schedule, records: Sequence[RankRecord | None]) -> Timeline:
    """The measured Timeline of all ranks, beginning at 0; ranks without a record are missing.

    The comm lane of a rank shows the messages that it had to wait for: from when they were made on the other rank, or
    from when this one began to wait if that is later, until they arrived. The arrival of an early message is not seen.
    """
    needs = Dependencies(schedule)
    known = [_NOTHING if record is None else record for record in records]
    made_at = {span.what: span.end + record.offset for record in known for span in record.compute}
    ranks = []
    for record in known:
        actions = [Span(a, s + record.offset, e + record.offset) for a, s, e in record.compute]
        comm: list[Span[Message]] = []
        for message, began, there in record.arrivals:
            if not was_waited_for(message, began, there):
                continue
            made = made_at.get(needs.maker(message))
            if made is None:
                continue
            end = there + record.offset
            comm.append(Span(message, min(max(made, began + record.offset), end), end))
        moves = [span for span in actions if span.what.op in MOVE_OPS]
        collectives, exchanges = (
            tuple(Span(c, s + record.offset, e + record.offset) for c, s, e in sorted(own, key=lambda span: span.start))
            for own in (record.collectives, record.exchanges)
        )
        ranks.append(
            RankTrace(
                compute=tuple(span for span in actions if span.what.op not in MOVE_OPS),
                moves=tuple(sorted(moves, key=lambda span: span.start)),
                comm=tuple(sorted(comm, key=lambda span: span.start)),
                collectives=collectives,
                exchanges=exchanges,
                rows=record.rows,
                data=tuple((s + record.offset, e + record.offset) for s, e in record.data if e - s >= _REALLY_WAITED),
            )
        )
    errors = tuple(record.error for record in known)
    waits = [rank.data[0][0] for rank in ranks if rank.compute and rank.data]
    timeline = Timeline(
        schedule=schedule,
        ranks=tuple(ranks),
        measured=True,
        clock_error=errors if any(errors) else (),
        around=0.0 if schedule.is_asynchronous else _step_overhead(known, min(waits, default=math.inf)),
        missing=tuple(rank for rank, record in enumerate(records) if record is None),
    )
    return timeline.shifted(-timeline.start)


def _step_overhead(records: Sequence[RankRecord], waits: float) -> float:
    """Seconds of a step before its first action, or the first wait for data, and after its last action [s].

    The former are those of the rank that begins first, the latter those of the one that ends last: neither waits there
    for other ranks.
    """
    first: tuple[float, float] | None = None  # when its first action began, and the step's seconds before it
    last: tuple[float, float] | None = None
    for record in records:
        if record.step is None or not record.compute:
            continue
        (began, ended), start, end = record.step, record.compute[0].start, record.compute[-1].end
        end = max([end, *(span.end for span in record.collectives)])
        if first is None or start + record.offset < first[0]:
            first = start + record.offset, min(start, waits - record.offset) - began
        if last is None or end + record.offset > last[0]:
            last = end + record.offset, ended - end
    return 0.0 if first is None or last is None else max(0.0, first[1]) + max(0.0, last[1])


def as_it_ran(schedule: Schedule, records: Sequence[RankRecord | None]) -> Schedule:
    """The schedule in the order in which it ran: a run may have a schedule for each batch.

    A rank without a complete record keeps its program.
    """
    if schedule.num_batches > 1 or schedule.rule.is_asynchronous or schedule.compute_programs != schedule.programs:
        return schedule
    programs = []
    for own, record in zip(schedule.programs, records, strict=True):
        ran = tuple(span.what for span in record.compute if span.what.op in COMPUTE_OPS) if record is not None else ()
        programs.append(ran if _work(ran) == _work(own) else own)
    if tuple(programs) == schedule.programs:
        return schedule
    return replace(schedule, name="auto", programs=tuple(programs), overlapped=())


def _work(program: Sequence[Action]) -> list[tuple[int, int, bool]]:
    return sorted((s, k, op is Op.F) for s, op, k in program if op is Op.F or op in LAST_USES)


def assemble_stream(calls: RunCalls, records: Sequence[RankRecord | None]) -> Timeline:
    """The measured Timeline of a few batches of a stream: the oldest recorded batch becomes batch 0. If the stream
    began among them, after batches with a flush, those are left out."""
    schedule = calls.schedule

    def batch(what: Action | Collective | Message) -> int:
        return what.index // indices_per_batch(schedule, what)

    batches = [batch(span.what) for record in records if record is not None for span in record.compute]
    last = max(batches, default=0)
    since = 0 if calls.is_alone(last) else calls.flush_first
    first = min((each for each in batches if each >= since), default=0)

    def rebased_index(what: What) -> What:
        return what._replace(index=what.index - first * indices_per_batch(schedule, what))

    def moved(spans: Sequence[Span[What]]) -> tuple[Span[What], ...]:
        return tuple(Span(rebased_index(what), start, end) for what, start, end in spans if batch(what) >= since)

    def moved_record(record: RankRecord) -> RankRecord:
        return replace(
            record,
            compute=moved(record.compute),
            arrivals=moved(record.arrivals),
            collectives=moved(record.collectives),
            exchanges=moved(record.exchanges),
            rows=tuple((rebased_index(what), rows) for what, rows in record.rows if batch(what) >= since),
            data=tuple(wait for wait in record.data if wait[0] >= begins(record)),
        )

    def begins(record: RankRecord) -> float:
        return min((span.start for span in record.compute if batch(span.what) >= since), default=math.inf)

    rebased = [None if record is None else moved_record(record) for record in records]
    return assemble_timeline(calls.stream_of(last).unrolled(last - first + 1), rebased)


def launches(
    ends: Sequence[Moment], begun: Iterable[Moment], *, between: Callable[[Moment, Moment], float]
) -> set[int]:
    """Numbers of the actions after which sums or gathers were begun; -1: before the first.

    The time between such an action and the next is no overhead: gradients are packed and sent. `ends`: of a rank's
    actions in order; `begun`: when each of its sums and gathers began; `between`: seconds from one moment to another.

    >>> launches([1.0, 3.0, 5.0], [3.0, 4.5], between=lambda begin, end: end - begin)
    {1}
    """
    return {bisect_right(ends, 0.0, key=lambda end: between(moment, end)) - 1 for moment in begun}

"""The difference of two timelines: what changed, and the cost of each change.

    makespan = compute + warm-up + late peers + ... + update      of each rank, and so of their mean:
    change   = change of compute + changes of each cause          adds up exactly

If they show different numbers of batches (a stream's prediction, and a few traced batches), seconds per batch are
compared. Actions are compared one by one if the same rank runs them in both; else only ranks and totals are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..ir import Action, Op
from ..timing.timeline import Idle, Timeline
from ..timing.waits import attribute_idle
from ..wording import count
from .critical_path import critical_path
from .stragglers import Straggler, find_stragglers

COMPUTE = "compute"


class Change(NamedTuple):
    """Seconds of one kind in both; `name` is "compute", a cause of `Idle`, or a kind of a critical path's steps."""

    name: str
    before: float
    after: float

    @property
    def seconds(self) -> float:
        """Increase [s]."""
        return self.after - self.before


class Departure(NamedTuple):
    """One action that took `before` seconds and then `after`."""

    rank: int
    action: Action
    before: float
    after: float

    @property
    def seconds(self) -> float:
        """Increase [s]."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Changes from one timeline to another.

    Arguments:
        makespan: of both; like `causes`, `path`, `links` and `ranks` seconds per batch if `per_batch`.
        batch_seconds: from batch to batch, in both; under a flush the makespan.
        bubble: of both (`Change.seconds` is a fraction).
        causes: seconds of compute and of idle time by cause, as a mean over the recorded ranks; they add up to the
            makespans, and their changes to its change.
        path: seconds of the critical path by kind, the largest change first; they add up likewise.
        links: seconds of messages on the critical path by link, "link 0 -> 1"; they add up to its "message".
        ranks: [P] the causes of each rank; empty if the numbers of ranks differ, () for a rank missing in one.
        departures: actions of both, the largest differences first.
        stragglers: of the later one, compared with the earlier one and with their peers.
        notes: what cannot be compared, and why.
        per_batch: the two show different numbers of batches, by which those seconds are divided.
    """

    makespan: Change
    batch_seconds: Change
    bubble: Change
    causes: tuple[Change, ...]
    path: tuple[Change, ...]
    links: tuple[Change, ...]
    ranks: tuple[tuple[Change, ...], ...]
    departures: tuple[Departure, ...]
    stragglers: tuple[Straggler, ...]
    notes: tuple[str, ...]
    per_batch: bool = False

    @property
    def largest_cause(self) -> Change:
        """The cause with the largest part of the makespan's change, in its direction."""
        sign = 1.0 if self.makespan.seconds >= 0 else -1.0
        return max(self.causes, key=lambda change: sign * change.seconds)


def compare(before: Timeline, after: Timeline, *, num_departures: int = 20) -> Difference:
    """Changes from one timeline to another, simulated or measured, of one schedule or of two.

    O(actions log actions).
    """
    shown = num_batches(before), num_batches(after)
    per = shown if shown[0] != shown[1] and min(shown) > 0 else (1, 1)
    notes = _what_differs(before, after)
    if per != (1, 1):
        notes.append(
            f"{count(per[0], 'batch')} in view before and {per[1]} after: makespan, causes of idle time and critical "
            f"path are seconds per batch"
        )
    causes = [_causes_by_rank(each, batches) for each, batches in zip((before, after), per, strict=True)]
    num_ranks = len(before.ranks)
    ranks: tuple[tuple[Change, ...], ...] = ()
    if len(after.ranks) == num_ranks:
        lacking = {*before.missing, *after.missing}
        ranks = tuple(
            () if rank in lacking else _changes(causes[0][rank], causes[1][rank]) for rank in range(num_ranks)
        )
    paths = critical_path(before), critical_path(after)
    kinds = ({kind.value: s / n for kind, s in each.by_kind.items()} for each, n in zip(paths, per, strict=True))
    links = (
        {f"link {src} -> {dst}": s / n for (src, dst), s in each.by_link.items()}
        for each, n in zip(paths, per, strict=True)
    )
    same_places = before.schedule.placement == after.schedule.placement
    departures = _departures(before, after) if same_places else []
    against = find_stragglers(after, expected=before) if same_places else ()
    known = {each.who for each in against}
    peers = tuple(each for each in find_stragglers(after) if each.who not in known) if after.measured else ()
    return Difference(
        makespan=Change("makespan", before.makespan / per[0], after.makespan / per[1]),
        batch_seconds=Change("batch seconds", before.batch_seconds, after.batch_seconds),
        bubble=Change("bubble", before.bubble, after.bubble),
        causes=_changes(_mean(causes[0], before.missing), _mean(causes[1], after.missing)),
        path=_largest_first(_changes(*kinds)),
        links=_largest_first(_changes(*links)),
        ranks=ranks,
        departures=tuple(departures[:num_departures]),
        stragglers=(*against, *peers),
        notes=tuple(notes),
        per_batch=per != (1, 1),
    )


def num_batches(timeline: Timeline) -> int:
    size = timeline.schedule.batch_indices
    spans = (span.what for rank in timeline.ranks for span in rank.compute)
    return len({action.index // size for action in spans if action.op is Op.F})


def _causes_by_rank(timeline: Timeline, batches: int) -> list[dict[str, float]]:
    """[P] seconds per batch of compute and of each cause of idle time, which add up to the makespan of each rank."""
    return [
        {name: seconds / batches for name, seconds in {COMPUTE: trace.busy, **idle._asdict()}.items()}
        for trace, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True)
    ]


def _mean(ranks: Sequence[Mapping[str, float]], missing: Sequence[int]) -> dict[str, float]:
    known = [rank for number, rank in enumerate(ranks) if number not in missing]
    names = (COMPUTE, *Idle._fields)
    return {name: sum(rank[name] for rank in known) / max(1, len(known)) for name in names}


def _largest_first(changes: Sequence[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: -abs(change.seconds)))


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    return tuple(Change(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names)


def _departures(before: Timeline, after: Timeline) -> list[Departure]:
    """Actions that the same rank runs in both, the largest difference first."""
    found = []
    for rank, (old, new) in enumerate(zip(before.ranks, after.ranks, strict=True)):
        took = {span.what: span.end - span.start for span in old.compute}
        found += [
            Departure(rank, span.what, took[span.what], span.end - span.start)
            for span in new.compute
            if span.what in took
        ]
    return sorted(found, key=lambda each: (-abs(each.seconds), each.rank, each.action))


def _what_differs(before: Timeline, after: Timeline) -> list[str]:
    """Notes on what cannot be compared."""
    old, new = before.schedule, after.schedule
    notes = []
    if old.num_ranks != new.num_ranks:
        notes.append(
            f"{count(old.num_ranks, 'rank')} before and {new.num_ranks} after: figures are of the mean rank, and no "
            f"rank is compared with another"
        )
    if old.placement != new.placement:
        stages = [f"{count(each.num_stages, 'stage')} on {count(each.num_ranks, 'rank')}" for each in (old, new)]
        notes.append(f"stages are on other ranks ({stages[0]} before, {stages[1]} after): no action is compared")
    else:
        notes += _other_actions(before, after)
    if old.num_microbatches != new.num_microbatches:
        notes.append(
            f"{count(old.num_microbatches, 'microbatch')} a batch before and {new.num_microbatches} after: an action "
            f"may work on another number of samples"
        )
    if old.num_slices != new.num_slices:
        notes.append(
            f"{count(old.num_slices, 'slice')} a microbatch before and {new.num_slices} after: no action works on the "
            f"same tokens"
        )
    for name, timeline in (("before", before), ("after", after)):
        if timeline.missing:
            ranks = ", ".join(map(str, timeline.missing))
            notes.append(f"nothing was recorded of rank {ranks} {name}: figures are of the others")
    return notes


def _other_actions(before: Timeline, after: Timeline) -> list[str]:
    old, new = ({(r, a) for r, rank in enumerate(each.ranks) for a in rank.actions} for each in (before, after))
    alone = [f"{len(some)} only {name}" for some, name in ((old - new, "before"), (new - old, "after")) if some]
    return [f"{count(len(old & new), 'action')} in both, {', '.join(alone)}: the former are compared"] if alone else []

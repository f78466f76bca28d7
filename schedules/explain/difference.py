"""The difference of two timelines: what changed, and the cost of each change.

    makespan = compute + warm-up + late peers + ... + update      of each rank, and so of their mean:
    change   = change of compute + changes of each cause          adds up exactly

If they show different numbers of batches (a simulated stream, and a few traced batches), seconds per batch are
compared. Actions are compared one by one if the same rank runs them in both; else only ranks and totals are.

Stragglers: ranks whose actions, or links whose messages, take longer than others'.

    ratio of each action      its seconds over the expected ones: of the same action in another timeline, or of
                              the median rank in its own
    ratio of a rank           median of these, over the median of the other ranks'

A rank is reported if its ratio is both large (`SLOW_RANK`, `SLOW_LINK`) and more than `DEVIATIONS` standard errors of
the medians. The errors follow from the median absolute deviation of all ratios from their ranks' medians, which is
robust against a few slow actions, and grow with fewer actions. Stragglers that cost less than `LEAST_SHARE` of the
makespan are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ..ir import COMPUTE_OPS, Action, Op
from ..timing.timeline import Idle, Timeline
from ..timing.waits import attribute_idle
from ..wording import count
from .critical_path import critical_path

COMPUTE = "compute"
SLOW_RANK = 1.15
SLOW_LINK = 1.5
DEVIATIONS = 6.0
FEWEST = 6  # actions or messages to judge by
LEAST_SHARE = 0.01  # of the makespan that a straggler costs: a message of 0.1 ms that takes 0.5 does not matter
_TO_SIGMA = 1.4826  # standard deviation of normal numbers over their median absolute deviation
_OF_MEDIAN = 1.2533  # standard error of their median over that of their mean


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


# --- stragglers ---

Who = int | tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank or link.

    Arguments:
        who: the rank, or the link as (sending rank, receiving rank).
        ratio: by which factor its actions or messages take longer.
        seconds: total beyond the others' pace [s].
        against: "the other timeline", or "its peers" (then an uneven cut of the model shows, too).
        number: of actions or messages that were compared.
    """

    who: Who
    ratio: float
    seconds: float
    against: str
    number: int

    @property
    def name(self) -> str:
        return f"rank {self.who}" if isinstance(self.who, int) else f"link {self.who[0]} -> {self.who[1]}"


def find_stragglers(timeline: Timeline, *, expected: Timeline | None = None) -> tuple[Straggler, ...]:
    """The ranks, then the links that straggle, those that cost most first.

    Arguments:
        expected: a timeline of the same placement to compare with; None: the other ranks and links of this one.
    """
    against = "its peers" if expected is None else "the other timeline"
    ranks, links = (
        _odd_ones(_samples(taken(timeline), None if expected is None else taken(expected)), least, against)
        for taken, least in ((_action_seconds, SLOW_RANK), (_message_seconds, SLOW_LINK))
    )
    surely = [each for each in links if each.seconds / each.number > _clock_error(timeline, each.who)]
    return tuple(each for each in (*ranks, *surely) if each.seconds >= LEAST_SHARE * timeline.makespan)


Samples = dict[Who, list[tuple[float, float]]]  # seconds of each, and their ratio to the expected ones
_Taken = Mapping[Who, Sequence[tuple[object, object, float]]]  # by who: (what, its kind, seconds)


def _action_seconds(timeline: Timeline) -> _Taken:
    return {
        rank: [(what, what.op, end - start) for what, start, end in trace.compute if what.op in COMPUTE_OPS]
        for rank, trace in enumerate(timeline.ranks)
    }


def _message_seconds(timeline: Timeline) -> _Taken:
    owner = timeline.schedule.owner  # all makers of a message are on the same ranks
    found: dict[Who, list[tuple[object, object, float]]] = {}
    for rank, trace in enumerate(timeline.ranks):
        for message, made, arrived in trace.comm:
            sender = owner(message.src, message.index)
            found.setdefault((sender, rank), []).append((message, message.kind, arrived - made))
    return found


def _samples(taken: _Taken, expected: _Taken | None) -> Samples:
    if expected is None:
        like = _typical(taken)
        usual = {who: {what: like[kind] for what, kind, _ in own} for who, own in taken.items()}
    else:
        usual = {who: {what: seconds for what, _, seconds in own} for who, own in expected.items()}
    return {
        who: [
            (seconds, seconds / usual[who][what])
            for what, _, seconds in own
            if seconds > 0 and usual.get(who, {}).get(what, 0.0) > 0
        ]
        for who, own in taken.items()
    }


def _typical(taken: _Taken) -> dict[object, float]:
    """By kind, the median over ranks (or links) of the medians of each."""
    by_kind: dict[object, list[float]] = {}
    for own in taken.values():
        kinds: dict[object, list[float]] = {}
        for _, kind, seconds in own:
            kinds.setdefault(kind, []).append(seconds)
        for kind, found in kinds.items():
            by_kind.setdefault(kind, []).append(median(found))
    return {kind: median(found) for kind, found in by_kind.items()}


def _odd_ones(samples: Samples, least: float, against: str) -> list[Straggler]:
    logs = {who: [math.log(ratio) for _, ratio in own] for who, own in samples.items() if len(own) >= FEWEST}
    middle = {who: median(own) for who, own in logs.items()}
    apart = [abs(each - middle[who]) for who, own in logs.items() for each in own]
    sigma = _TO_SIGMA * median(apart) if apart else 0.0
    found = []
    for who, own in logs.items():
        others = [middle[other] for other in middle if other != who]
        if not others:
            continue
        usual = median(others)
        excess = middle[who] - usual
        of_others = sum(len(logs[other]) for other in middle if other != who)
        error = _OF_MEDIAN * sigma * math.sqrt(1 / len(own) + _OF_MEDIAN**2 / of_others)
        few = len(own) / (len(own) - 2)  # small samples are closer to their own median than to the true one
        if excess > max(math.log(least), DEVIATIONS * error * few):
            ratio = math.exp(excess)
            # Each compared with its own seconds at the others' pace.
            over = sum(seconds * (1 - math.exp(usual) / own_ratio) for seconds, own_ratio in samples[who])
            found.append(Straggler(who=who, ratio=ratio, seconds=over, against=against, number=len(own)))
    return sorted(found, key=lambda each: -each.seconds)


def _clock_error(timeline: Timeline, who: Who) -> float:
    if isinstance(who, int) or not timeline.clock_error:
        return 0.0
    return timeline.clock_error[who[0]] + timeline.clock_error[who[1]]

"""Stragglers: ranks whose actions, or links whose messages, take longer than others'.

    ratio of each action      its seconds over the expected ones: of the same action in another timeline, or of the
        median rank in its own
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

from ..ir import COMPUTE_OPS
from ..timing.timeline import Timeline

SLOW_RANK = 1.15
SLOW_LINK = 1.5
DEVIATIONS = 6.0
FEWEST = 6  # actions or messages to judge by
LEAST_SHARE = 0.01  # of the makespan that a straggler costs: a message of 0.1 ms that takes 0.5 does not matter
_TO_SIGMA = 1.4826  # standard deviation of normal numbers over their median absolute deviation
_OF_MEDIAN = 1.2533  # standard error of their median over that of their mean

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
        for taken, least in ((_actions, SLOW_RANK), (_messages, SLOW_LINK))
    )
    surely = [each for each in links if each.seconds / each.number > _clock_error(timeline, each.who)]
    return tuple(each for each in (*ranks, *surely) if each.seconds >= LEAST_SHARE * timeline.makespan)


Samples = dict[Who, list[tuple[float, float]]]  # seconds of each, and their ratio to the expected ones
_Taken = Mapping[Who, Sequence[tuple[object, object, float]]]  # by who: (what, its kind, seconds)


def _actions(timeline: Timeline) -> _Taken:
    return {
        rank: [(what, what.op, end - start) for what, start, end in trace.compute if what.op in COMPUTE_OPS]
        for rank, trace in enumerate(timeline.ranks)
    }


def _messages(timeline: Timeline) -> _Taken:
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
    """Largest error of a message's seconds between these ranks [s]."""
    if isinstance(who, int) or not timeline.clock_error:
        return 0.0
    return timeline.clock_error[who[0]] + timeline.clock_error[who[1]]

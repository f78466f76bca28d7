"""Clocks of hosts: their offsets, known within bounds, and the effect on a timeline.

    clock of rank 0's host   ------- there -------------      sent and back are stamped by this host, there by rank 0's:
                                   /       \\                  there = (sent + back) / 2 + offset, with an error of at
    clock of this host       -- sent ----- back --------      most (back - sent) / 2, for any delays

Of many pings the quickest is the most accurate. Readings at the beginning and at the end of a run show the drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..messages import Message
from ..timing.timeline import Timeline
from ..timing.waits import waits
from ..wording import count, duration

MAX_DRIFT = 1e-4  # seconds per second, for two working clocks (quartz, slewed by NTP, is within 5e-5)


Ping = tuple[float, float, float]  # sent, there, back: see above [s]


class ClockReading(NamedTuple):
    """At time `at` of this host's clock, that of rank 0's host showed `at + offset`, within `error` [s]."""

    at: float
    offset: float
    error: float


def read_clock(pings: Iterable[Ping]) -> ClockReading:
    """The reading of the quickest of some pings; ValueError without any."""
    quickest = min(pings, key=lambda ping: ping[2] - ping[0], default=None)
    if quickest is None:
        raise ValueError("no ping: expected at least one round trip to read a clock by")
    sent, there, back = quickest
    middle = sent + (back - sent) / 2
    return ClockReading(middle, there - middle, (back - sent) / 2)


def offset_at(readings: Sequence[ClockReading], at: float) -> tuple[float, float]:
    """Offset of this host's clock at a time of its own, and its largest error [s], by ascending readings.

    Between two readings both are interpolated: exact bounds for clocks with an even drift. Before the first and after
    the last reading the offset is constant, with an error that grows by MAX_DRIFT per second. Without readings the host
    is rank 0's: (0, 0).
    """
    if not readings:
        return 0.0, 0.0
    for before, after in pairwise(readings):
        if before.at <= at <= after.at and after.at > before.at:
            part = (at - before.at) / (after.at - before.at)
            return (
                before.offset + part * (after.offset - before.offset),
                before.error + part * (after.error - before.error),
            )
    nearest = readings[0] if at < readings[0].at else readings[-1]
    return nearest.offset, nearest.error + MAX_DRIFT * abs(at - nearest.at)


def early_messages(timeline: Timeline) -> tuple[tuple[Message, float, float], ...]:
    """Messages that were used, by their receiver's clock, before they were made, by their sender's: by how many
    seconds, and how many of them the errors of the two clocks explain."""
    waited = waits(timeline)
    errors = timeline.clock_error or (0.0,) * len(timeline.ranks)
    return tuple(
        (each.message, made - start, errors[each.sender] + errors[each.receiver])
        for rank in timeline.ranks
        for what, start, _ in rank.compute
        for each, made, _ in waited[what]
        if made is not None and made > start
    )


def clock_note(timeline: Timeline) -> str:
    """Note on the clocks of a timeline for people, as half a sentence; empty if one clock stamped all.

    >>> from stagewright.schedules import Costs, build, simulate
    >>> clock_note(simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs()))
    ''
    """
    if not timeline.clock_error:
        return ""
    note = f"clocks of hosts aligned to ±{duration(max(timeline.clock_error))}"
    early = early_messages(timeline)
    if early:
        most = max(seconds for _, seconds, _ in early)
        note += f"; by them {count(len(early), 'message')} came up to {duration(most)} before being sent"
        beyond = sum(seconds > allowed for _, seconds, allowed in early)
        note += f", {beyond} of them by more than that explains" if beyond else ", which that explains"
    return note

"""A flush schedule in two calls: the forwards in front of all backwards, which may be thrown away, and the rest.

rank 0 | F0 F1 F2 | B0 F3 B1 B2 B3       1f1b, P=3: a batch that began with weights which were then
rank 1 | F0 F1 | B0 F2 B1 ...            found wrong begins again, and nothing of it has been added up
rank 2 | F0 | B0 F1 B1 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..check import check_lowered
from ..ir import Op, Schedule
from ..messages import Message, Sharing, Transfer
from ..needs import Needs
from ..program import RankProgram, check_calls, parts_of
from ..progress import post_in_time
from .lower import lower


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Programs of a batch in two parts, by rank.

    Arguments:
        first: forwards in front of the first backward; none needs what another rank makes behind its own `first`.
        rest: everything else.
        under_way: receives of messages that others send in `first` and the rank does not take there, in the order in
            which they are sent, with whether `first` has posted them.
    """

    first: Sequence[RankProgram]
    rest: Sequence[RankProgram]
    under_way: Sequence[Sequence[tuple[Transfer, bool]]]


def cut_behind_warm_up(schedule: Schedule, *, sharing: Sharing) -> WarmUp:
    """Lower a flush schedule so that its warm-up can run, and be thrown away, by itself."""
    lengths = _warm_up_lengths(schedule)
    calls = [
        [int(position >= length) for position in range(len(program))]
        for program, length in zip(schedule.programs, lengths, strict=True)
    ]
    lowered = lower(schedule, sharing=sharing, calls=calls)
    check_calls(lowered)
    lowered = replace(lowered, programs=post_in_time(lowered.programs))
    check_lowered(lowered)
    parts = [parts_of(program, count=2) for program in lowered.programs]
    first, rest = [part[0] for part in parts], [part[1] for part in parts]
    return WarmUp(first=first, rest=rest, under_way=[_under_way(first, program.rank) for program in first])


def _warm_up_lengths(schedule: Schedule) -> list[int]:
    """Per rank, how many actions stand in front of its first that is no forward, or that needs one which is not."""
    needs = Needs(schedule)
    lengths = [next((i for i, a in enumerate(own) if a.op is not Op.F), len(own)) for own in schedule.programs]
    outside = {action for own, length in zip(schedule.programs, lengths, strict=True) for action in own[length:]}
    changed = True
    while changed:
        changed = False
        for rank, own in enumerate(schedule.programs):
            here = range(lengths[rank])
            shorter = next((i for i in here if not outside.isdisjoint(needs.of(own[i]))), None)
            if shorter is not None:
                outside.update(own[shorter : lengths[rank]])
                lengths[rank] = shorter
                changed = True
    return lengths


def _under_way(first: Sequence[RankProgram], rank: int) -> list[tuple[Transfer, bool]]:
    posted = {step.message for step in first[rank].steps if isinstance(step, Transfer) and not step.is_send}
    taken: set[Message] = {message for messages in first[rank].inputs.values() for message in messages}
    return [
        (Transfer(step.message, program.rank, False), step.message in posted)
        for program in first
        for step in program.steps
        if isinstance(step, Transfer) and step.is_send and step.peer == rank and step.message not in taken
    ]

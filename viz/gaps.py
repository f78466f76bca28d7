"""The waiting before each action, and what makes it wait: an idle attribution action by action.

rank 0 |   0F3   |                     made      made and arrived are those of the latest input
rank 1 | 1F2 |....|~~~~|????| 1F3 |    late peer until `made`, transfer until it arrived, then unexplained
"""

from __future__ import annotations

from typing import NamedTuple

from ..schedules import Action, Message, MessageKind, Op, Timeline
from ..schedules.needs import Needs


class Gap(NamedTuple):
    """The idle time [s] right before `action`, by cause (the fields of `Idle` that a gap can have)."""

    action: Action
    warm_up: float
    late_peer: float
    transfer: float
    unexplained: float

    @property
    def seconds(self) -> float:
        """The whole gap [s]."""
        return self.warm_up + self.late_peer + self.transfer + self.unexplained

    @property
    def cause(self) -> str:
        """The cause with the most seconds."""
        seconds = self._asdict()
        del seconds["action"]
        return max(seconds, key=seconds.__getitem__)


class Arrow(NamedTuple):
    """`consumer` on its rank used what `maker` made on another one."""

    maker: Action
    maker_rank: int
    consumer: Action
    consumer_rank: int
    kind: MessageKind


def find_arrows(timeline: Timeline) -> list[Arrow]:
    """What was passed between ranks, in the order of the consumers' ranks and programs."""
    needs = Needs(timeline.schedule)
    rank_of = {what: rank for rank, trace in enumerate(timeline.ranks) for what, _, _ in trace.compute}
    arrows = []
    for rank, trace in enumerate(timeline.ranks):
        for action, _, _ in trace.compute:
            assert isinstance(action, Action)
            for need in needs.of(action):
                maker_rank = rank_of.get(need, rank)
                if maker_rank != rank:
                    arrows.append(Arrow(need, maker_rank, action, rank, _kind(need)))
    return arrows


def find_gaps(timeline: Timeline) -> tuple[dict[Action, Gap], ...]:
    """By rank, the gap before each action that has one.

    Sums over a rank are those of `attribute_idle`, where `imbalance` is a part of the late peer's seconds
    that only the whole run can tell.
    """
    inputs: dict[Action, list[Action]] = {}
    for arrow in find_arrows(timeline):
        inputs.setdefault(arrow.consumer, []).append(arrow.maker)
    made_at = {what: end for trace in timeline.ranks for what, _, end in trace.compute}
    found: list[dict[Action, Gap]] = []
    for trace in timeline.ranks:
        arrived = {message: end for message, _, end in trace.comm}
        gaps: dict[Action, Gap] = {}
        previous = None
        for action, start, end in trace.compute:
            assert isinstance(action, Action)
            if previous is None:
                if start > timeline.start:
                    gaps[action] = Gap(action, start - timeline.start, 0.0, 0.0, 0.0)
            elif start > previous:
                made = arrival = previous
                for maker in inputs.get(action, ()):
                    made = max(made, made_at[maker])
                    message = Message(_kind(maker), maker.stage, action.stage, action.index)
                    arrival = max(arrival, arrived.get(message, made_at[maker]))
                made = min(made, start)
                arrival = min(max(arrival, made), start)
                gaps[action] = Gap(action, 0.0, made - previous, arrival - made, start - arrival)
            previous = end
        found.append(gaps)
    return tuple(found)


def _kind(maker: Action) -> MessageKind:
    return MessageKind.ACT if maker.op is Op.F else MessageKind.GRAD

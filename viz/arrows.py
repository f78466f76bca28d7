"""Arrows between ranks: from the action that makes a message to the one that uses it."""

from __future__ import annotations

from typing import NamedTuple

from ..schedules import Action, MessageKind, Op, Timeline
from ..schedules.needs import Needs


class Arrow(NamedTuple):
    """`consumer` on its rank used what `maker` made on another one."""

    maker: Action
    maker_rank: int
    consumer: Action
    consumer_rank: int
    kind: MessageKind


def find_arrows(timeline: Timeline) -> list[Arrow]:
    """Arrows between ranks, in the order of the consumers' ranks and programs."""
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


def _kind(maker: Action) -> MessageKind:
    return MessageKind.ACT if maker.op is Op.F else MessageKind.GRAD

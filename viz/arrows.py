"""Arrows between ranks: from the action that makes a message to the one that uses it."""

from __future__ import annotations

from ..schedules import Timeline
from ..schedules.needs import Delivery, Needs


def find_arrows(timeline: Timeline) -> list[Delivery]:
    """The messages of a timeline whose makers stand in it, in the order of the users' ranks and programs."""
    needs = Needs(timeline.schedule)
    made = {what for trace in timeline.ranks for what, _, _ in trace.compute}
    return [
        delivery
        for trace in timeline.ranks
        for action, _, _ in trace.compute
        for delivery in needs.arrivals(action)
        if delivery.maker in made
    ]

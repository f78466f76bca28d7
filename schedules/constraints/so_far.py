"""Actions that have run while an order grows: a filter is shown them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..ir import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """State in which an action is asked for; valid during the call.

    Arguments:
        rank: that would run it.
        program: what this rank has run.
        in_flight: stage activations that this rank holds.
        begun: what all ranks have begun.
    """

    rank: int
    program: Sequence[Action]
    in_flight: int
    begun: AbstractSet[Action]

"""What has run while an order grows: what a filter is shown."""

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

"""Links in a plan: bytes over each cut, the way that they take, and the parts of each update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from ...schedules.timing.links import Links, Sum, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """Messages of a stage to the next one, and its update, part by part.

    Arguments:
        message_bytes: that cross the cut behind it, a microbatch and direction, of all its tensor ranks together.
        latency: of a message to or from the next stage, whichever replicas share the microbatch [s].
        seconds_per_byte: of such a message [s/byte]; T tensor ranks, which each send a part, take a T-th.
        sum_seconds: gradients summed over the replicas, in front of an update [s].
        optimizer_seconds: the optimizer's step on one rank [s].
        gather_seconds: of weights of which each replica updates a part [s].
        message_seconds: for which the rank at either end is busy with such a message, beside its latency [s].
        sum_busy: share of those sums and gathers for which their ranks can't compute (0 to 1).

    Raises ValueError for figures that are negative or not finite, and for a share above 1.
    """

    message_bytes: float
    latency: float
    seconds_per_byte: float
    sum_seconds: float
    optimizer_seconds: float
    gather_seconds: float
    message_seconds: float = 0.0
    sum_busy: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"{each.name}={value!r}: expected a finite number, at least 0")
        if self.sum_busy > 1:
            raise ValueError(f"sum_busy={self.sum_busy!r}: expected a share from 0 to 1")


def links_of(
    stages: Sequence[StageTraffic],
    ranks: Sequence[Sequence[int]],
    *,
    positions: Sequence[int],
    rings: Sequence[Sequence[int]],
    num_microbatches: int | None = None,
) -> Links:
    """Network of ranks with one card each, on which their messages and sums of gradients queue.

    Arguments:
        stages: [S]; of two between the same places either says the way.
        ranks: [P] replicas of each place; microbatch k runs on number k % replicas.
        positions: [S] place of each stage. Between two of the same there is no message.
        rings: [P] members of the sums of a stage, in the order in which they stand around it.
        num_microbatches: of all `ranks`; None: ways for any number.
    """
    ways: dict[tuple[int, int], Way] = {}
    hops: dict[tuple[int, int], StageTraffic] = {}
    for pair, stage in zip(pairwise(positions), stages[:-1], strict=True):
        hops.setdefault(pair, stage)
    for (a, b), stage in hops.items():
        if a == b:
            continue
        here, there = ranks[a], ranks[b]
        different = math.lcm(len(here), len(there))  # microbatches; behind them the pairs come again
        if num_microbatches is not None:
            different = min(different, num_microbatches)
        pairs = {(here[k % len(here)], there[k % len(there)]) for k in range(different)}
        for src, dst in (way for a, b in pairs for way in ((a, b), (b, a))):
            ways[src, dst] = Way(
                latency=stage.latency, seconds_per_byte=stage.seconds_per_byte, sending=src, receiving=dst
            )
    sums = []
    for s, stage in enumerate(stages):
        if stage.sum_seconds > 0:
            members = rings[positions[s]]
            around = tuple(zip(members, (*members[1:], members[0]), strict=True))
            ways |= {(src, dst): Way(sending=src, receiving=dst) for src, dst in around if (src, dst) not in ways}
            sums.append(Sum(stage=s, seconds=stage.sum_seconds, gather=stage.gather_seconds, ways=around))
    return Links(network=ways, activation_bytes=[stage.message_bytes for stage in stages[:-1]], sums=tuple(sums))

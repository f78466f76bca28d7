"""An I and the W right behind it as one backward, where nobody waits for what is between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from .ir import Op, Schedule
from .needs import Needs


def run_as_one(schedule: Schedule) -> Mapping[int, frozenset[int]]:
    """By stage, the indices of I that run with the W behind them as one backward, as `RankProgram.fused` says.

    W stands right behind I, for whose gradient no other rank waits. O(actions).

    >>> from .registry import build
    >>> {stage: sorted(found) for stage, found in run_as_one(build("zb-h1", num_ranks=2, num_microbatches=4)).items()}
    {0: [0, 1, 2, 3]}
    """
    pairs = [
        before
        for program in schedule.programs
        for before, action in pairwise(program)
        if action.op is Op.W and before == action._replace(op=Op.I)
    ]
    if not pairs:
        return {}
    needs = Needs(schedule)
    found: defaultdict[int, set[int]] = defaultdict(set)
    for action in pairs:
        if next(needs.departures(action), None) is None:
            found[action.stage].add(action.index)
    return {stage: frozenset(own) for stage, own in found.items()}

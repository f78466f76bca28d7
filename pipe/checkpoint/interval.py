"""How often to save, from what saving costs.

    overhead = cost of a checkpoint / (steps from one to the next * seconds of an undisturbed step)

Every number here is agreed between the processes, so that all of them save behind the same steps.
Source: CheckFreq (Mohan et al., FAST 2021), section 4.2; here costs are taken from every checkpoint, not from a phase
of profiling alone, so that the interval follows a disk or a machine that gets slower.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

FIRST = 10  # steps before the first checkpoint, and from it to the second
_KEPT = 3  # costs that are taken into account
_GROWTH = 4  # the largest factor from one interval to the next: a single slow save may not end saving


class Cost(NamedTuple):
    """Cost of a checkpoint in one process.

    seconds: that training took longer; busy_steps: those beside which it was under way; step_seconds: of one that
    nothing disturbed, None where there was none.
    """

    seconds: float
    busy_steps: int
    step_seconds: float | None


class Interval:
    """Steps from one checkpoint to the next.

    Arguments:
        overhead: share of undisturbed training that checkpoints may take.

    >>> interval = Interval(0.05)
    >>> interval.learn([Cost(1.0, 2, 0.5)]), interval.learn([Cost(0.25, 1, 0.5)])
    (40, 10)
    """

    def __init__(self, overhead: float) -> None:
        self.every = FIRST
        self._overhead = overhead
        self._costs: deque[float] = deque(maxlen=_KEPT)
        self._num_learnt = 0

    def learn(self, costs: list[Cost]) -> int:
        """Take the cost of the last checkpoint, by process, into account; returns the interval from now on."""
        steps = [cost.step_seconds for cost in costs if cost.step_seconds is not None]
        busy = max(cost.busy_steps for cost in costs)
        if not steps:  # it never ended before the next was due
            self.every = max(self.every, busy) * 2
            return self.every
        self._num_learnt += 1
        if self._num_learnt == 2:  # the first one also paid for memory that later ones use again
            self._costs.clear()
        self._costs.append(max(cost.seconds for cost in costs))
        needed = math.ceil(statistics.median(self._costs) / (self._overhead * statistics.median(steps)))
        # beside an undisturbed step or two, or the next cost could not be told
        self.every = max(min(needed, _GROWTH * self.every), busy + 2)
        return self.every

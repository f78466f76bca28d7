"""The last word on an order: the simulator's, with links that queue, and with what makes it fit the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..ir import Schedule
from ..timing.costs import Costs
from ..timing.simulate import simulate
from ..timing.timeline import Timeline
from ..transform import with_offload
from .asked import Asked
from .contest import Contest
from .evaluate import Evaluator, Orders
from .recomputed import RecomputedProblem, whole
from .spill import peaks_in_time, with_moves
from .starts import fits_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A schedule for one of the problems that were asked.

    Arguments:
        costs: of its stages as they run.
        num_recomputed: stages that recompute, the first ones of the chain.
    """

    asked: Asked
    costs: Costs
    schedule: Schedule
    timeline: Timeline
    num_recomputed: int


class Judge:
    """Offers orders to a contest, for what they are worth once simulated.

    Arguments:
        asked: the problem, whose links and memory count.
        offloads: whether activations may leave, so that an order fits.
        recomputed: the problem with some stages recomputed, if orders are of that one.

    Attributes: `value`, the best of those that fit [s]; `least`, the least that the fullest rank held in an order that
    did not fit.
    """

    def __init__(
        self,
        asked: Asked,
        contest: Contest[Judged],
        *,
        offloads: bool = False,
        recomputed: RecomputedProblem | None = None,
    ) -> None:
        self.asked, self.contest, self.offloads, self.recomputed = asked, contest, offloads, recomputed
        self.costs = asked.costs if recomputed is None else recomputed.costs
        self.evaluator = Evaluator(asked.problem if recomputed is None else recomputed.problem)
        self.value = self.least = math.inf

    def offer(self, orders: Orders, source: str) -> None:
        """Simulate an order, unless it takes too long even if nothing is in its way."""
        if self.evaluator.value(orders) >= self.contest.value:
            return
        self.offer_schedule(self.evaluator.schedule(orders), source)

    def offer_schedule(self, schedule: Schedule, source: str) -> None:
        """Simulate a schedule, and where it does not fit what is made of it."""
        self.contest.evaluations += 1
        timeline = simulate(schedule, self.costs, self.asked.links)
        for made in self._made(timeline):
            if self._fits(timeline):
                break
            timeline = simulate(made, self.costs, self.asked.links)
        if not self._fits(timeline):
            self.least = min(self.least, max(self._peaks(timeline)))
            return
        found = Judged(
            asked=self.asked,
            costs=self.costs,
            schedule=timeline.schedule,
            timeline=timeline,
            num_recomputed=0 if self.recomputed is None else self.recomputed.number,
        )
        value: float = getattr(timeline, self.asked.problem.objective)
        self.value = min(self.value, value)
        self.contest.offer(value, found, source)

    def _made(self, timeline: Timeline) -> Iterator[Schedule]:
        """Schedules of the same order that need less memory."""
        if self.offloads:
            yield with_moves(timeline, self.asked.problem, self.costs)
            yield with_offload(timeline.schedule, costs=self.costs)
        if self.recomputed is not None:
            orders = whole(self.evaluator, self.evaluator.orders(timeline.schedule), self.recomputed.number)
            yield self.evaluator.schedule(orders)

    def _peaks(self, timeline: Timeline) -> list[float]:
        waiting = None if self.recomputed is None else self.recomputed.waiting
        return peaks_in_time(timeline, self.asked.problem, waiting)

    def _fits(self, timeline: Timeline) -> bool:
        return fits_memory(self.asked.problem, self._peaks(timeline))

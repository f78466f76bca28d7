"""A schedule for each batch, where microbatches differ in size from batch to batch.

    batch t:  sizes -> costs, memory -> a short search from what did well on batch t-1 -> the order of batch t

Microbatches have no names that last: what was found for one batch is carried over by size, so that the j-th largest
microbatch of the new batch stands where the j-th largest of the old one stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir import Schedule
from .evaluate import OrderEvaluator, Orders
from .incumbent import Budget
from .listing import Policy
from .problem import SPLIT_OPS, Problem
from .search import OrderingSearch

# Actions that a search may put in order, all its orders together: what a few of these take does not grow with a batch.
_COLD, _WARM = 400_000, 40_000
_FEWEST = 24  # orders that are tried anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOrder:
    """The order found for one batch, by the name "auto", or the fixed one, where nothing is faster. Values are of the
    objective [s]; that of the fixed one is None where it does not fit the memory."""

    schedule: Schedule
    value: float
    fixed_value: float | None
    evaluations: int


class BatchOrders:
    """Orders of batch after batch, of the same stages on the same ranks.

    Where the fixed schedule fits a batch's memory, no order is slower than it. The same problems in the same order find
    the same schedules on every machine: the search looks at no clock.

    Arguments:
        fixed: the schedule to beat; its placement and number of microbatches are those of all batches.
        cold, warm: orders that are tried for the first batch, and for each further one; None: as many as take about
            a second and a tenth of it, the fewer the more actions a batch has (500 and 52 for P=8, M=32).
        seed: of random choices.
    """

    def __init__(self, fixed: Schedule, *, cold: int | None = None, warm: int | None = None, seed: int = 0) -> None:
        self.fixed = fixed
        actions = 3 * fixed.num_stages * fixed.num_microbatches
        self._cold = max(_FEWEST, _COLD // actions) if cold is None else cold
        self._warm = max(_FEWEST, _WARM // actions) if warm is None else warm
        self._seed = seed
        self._ranking: list[int] = []  # microbatches of the newest batch, the largest first
        self._policies: tuple[Policy, ...] = ()
        self._orders: Orders | None = None

    def find(self, problem: Problem) -> FoundOrder:
        """The order of a batch.

        Raises ValueError for a problem of another placement or number of microbatches, MemoryLimitError (a ValueError)
        for a limit that no order can meet.
        """
        problem.check_memory()
        is_first = self._orders is None
        budget = Budget(evaluations=self._cold if is_first else self._warm, seed=self._seed)
        search = OrderingSearch(problem, budget, bound=0.0, has_named=is_first)
        fixed = search.evaluator.orders(self.fixed)
        fits = search.evaluator.fits(fixed)
        ranking = by_size(problem)
        moved_to = dict(zip(self._ranking, ranking, strict=False))
        starts = [fixed] if fits else []
        if self._orders is not None:
            before = relabelled(search.evaluator, self._orders, moved_to)
            if search.evaluator.fits(before):
                starts.append(before)
        orders = search.run(starts, [_policy_for(policy, moved_to) for policy in self._policies])
        fixed_value = search.evaluator.value(fixed) if fits else None
        self._ranking, self._policies, self._orders = ranking, search.policies, orders
        is_better = fixed_value is None or search.value < fixed_value
        return FoundOrder(
            schedule=search.evaluator.schedule(orders) if is_better else self.fixed,
            value=search.value,
            fixed_value=fixed_value,
            evaluations=search.evaluations,
        )


def by_size(problem: Problem) -> list[int]:
    """Microbatches by their work on all stages, the largest first."""
    M = problem.num_microbatches
    work = [sum(problem.seconds[op][s][k] for op in SPLIT_OPS for s in range(problem.num_stages)) for k in range(M)]
    return sorted(range(M), key=lambda k: (-work[k], k))


def _policy_for(policy: Policy, moved_to: dict[int, int]) -> Policy:
    """The policy with each microbatch in the place of one of its size."""
    sequence: Sequence[int] = range(len(moved_to)) if policy.sequence is None else policy.sequence
    return replace(policy, sequence=tuple(moved_to[k] for k in sequence))


def relabelled(evaluator: OrderEvaluator, orders: Orders, moved_to: dict[int, int]) -> Orders:
    """The orders with other microbatches in the places of these."""
    M = evaluator.num_microbatches
    return [[code - code % M + moved_to[code % M] for code in order] for order in orders]

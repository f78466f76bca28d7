"""The search itself: starting orders, then rounds of policies and slides, until the bound is reached or the budget is
spent.

And a short one for each batch, for microbatches whose sizes differ from batch to batch (`BatchOrders`):

    batch t:  sizes -> costs, memory -> a short search from the best of batch t-1 -> the order of batch t

Results of one batch are transferred by size: the j-th largest microbatch of the new batch takes the place of the j-th
largest of the old one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from ..families.family import Family
from ..families.registry import FAMILIES
from ..families.v_blocks import fitting_blocks
from ..ir import Schedule, chain
from ..orders.evaluate import OrderEvaluator, Orders, SlideSearch
from ..orders.listing import Lister, Policy, changed, changed_weights, first_policies, refill
from ..orders.problem import SPLIT_OPS, Problem
from ..placement import StagePlacement
from ..timing.costs import Costs
from .incumbent import Budget, Incumbent, Progress

_POLICIES = 24  # policies of a round
_REFILLS = 16  # times that the W of one order are placed anew, in a round
_SLIDES = 40  # slides of a round, for each policy
_LONG, _LONG_STEPS, _HOT = 0.3, 10_000, 3.0  # part of the slides of small problems with swaps that are long and hot
_SMALL = 500  # actions of a problem in which slides find orders that policies cannot
_BEFORE = 6  # policies before the named schedules, if there is a start
_NEAR = 1.1  # a named schedule within this of the best is worth a second try
_ELITES = 4
# Actions of all orders of a search together, so that its time does not grow with the batch.
_COLD, _WARM = 400_000, 40_000
_FEWEST = 24  # orders that are tried in any case


class _BudgetError(Exception):
    """The budget is spent, or the bound is reached: the search ends here."""


class OrderingSearch:
    """One search; if `has_named`, with the named families, those made for `costs` among them.

    Attributes: `incumbent`, the best orders so far; `elites`, the best few, with each B as I and W; `policies`,
    likewise.
    """

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        *,
        bound: float,
        costs: Costs | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        has_named: bool = True,
    ) -> None:
        self.problem, self.costs, self.has_named, self.random = problem, costs, has_named, Random(budget.seed)
        self.evaluator = OrderEvaluator(problem)
        self.lister = Lister(self.evaluator)
        self.incumbent: Incumbent[Orders] = Incumbent(budget, bound=bound, on_progress=on_progress)
        self._any = problem.num_microbatches * problem.num_stages  # a backlog that no rank reaches: all W may wait
        self._elites: list[tuple[float, int, Orders]] = []
        self._policies: list[tuple[float, int, Policy]] = []

    def run(self, starts: Sequence[Orders] = (), policies: Sequence[Policy] = ()) -> Orders:
        try:
            self._begin(starts, policies)
            while True:
                self._round()
        except _BudgetError:
            pass
        return self._fuse()

    @property
    def value(self) -> float:
        return self.incumbent.value

    @property
    def evaluations(self) -> int:
        return self.incumbent.evaluations

    @property
    def elites(self) -> tuple[Orders, ...]:
        return tuple(orders for _, _, orders in self._elites)

    @property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(policy for _, _, policy in self._policies)

    # --- parts of a search ---

    def _begin(self, starts: Sequence[Orders], policies: Sequence[Policy]) -> None:
        for start in starts:
            self._offer(start, "given")
            self._offer(split(self.evaluator, start), "given")
            for fill in (0.6, 1.0):
                self._refill_as(start, fill=fill)
        for policy in policies:
            self._try_policy(policy)
        first = first_policies(self.problem, self.random)
        self._try_policy(next(first))  # so that there is an order before the time can be over
        for _, policy in zip(range(_BEFORE if starts else 0), first, strict=False):
            self._try_policy(policy)
        for name, orders in named_orders(self.evaluator, seconds=self._half()) if self.has_named else ():
            if self._offer(orders, name) <= _NEAR * self.value:
                self._refill_as(orders, fill=0.6)
        if not starts:
            self._make()
        for _, policy in zip(range(0 if policies else 2 * _POLICIES), first, strict=False):
            self._try_policy(policy)
        if starts:
            self._make()
        self._rest = first

    def _make(self) -> None:
        if self.costs is not None and self.has_named:
            for name, orders in made_orders(self.evaluator, self.costs, seconds=self._half()):
                self._offer(orders, name)
            self._blocks()

    def _blocks(self) -> None:
        """Blocks of a V between those of the families that fill the limit."""
        problem, P = self.problem, self.problem.num_ranks
        if problem.memory_limit is None or problem.placement != StagePlacement.snake(num_ranks=P):
            return
        limit = min(problem.memory_limit) / (max(map(max, problem.held)) or 1.0)
        for schedule in fitting_blocks(P, problem.num_microbatches, limit):
            for fill in (0.6, 1.0):
                self._refill_as(self.evaluator.orders(schedule), fill=fill)

    def _half(self) -> float:
        return (self.incumbent.budget.seconds - self.incumbent.elapsed) / 2

    def _round(self) -> None:
        """Tries changes of one of the best policies, each kept if no worse, and for every fourth try one of the first
        policies that are left; then places W anew, and slides."""
        at = min(int(self.random.expovariate(0.7)), len(self._policies) - 1)
        value, _, policy = self._policies[at]
        for n in range(_POLICIES):
            if n % 4 == 3 and (other := next(self._rest, None)) is not None:
                self._try_policy(other)
                continue
            new = changed(policy, self.problem, self.random)
            found = self._try_policy(new)
            if found <= value:
                value, policy = found, new
        self._refill()
        self._slide()

    def _refill_as(self, orders: Orders, *, fill: float) -> None:
        P = self.problem.num_ranks
        found = refill(self.evaluator, split(self.evaluator, orders), fill=(fill,) * P, backlog=(self._any,) * P)
        if found is None:
            self._count()
        else:
            self._offer(found, "weights")

    def _refill(self) -> None:
        P = self.problem.num_ranks
        orders = self._elites[int(self.random.random() * len(self._elites))][2]
        fill, backlog = (self.random.choice((0.4, 0.6, 0.8)),) * P, (self._any,) * P
        best = math.inf
        for _ in range(_REFILLS):
            tried = changed_weights(fill, backlog, self.problem, self.random) if best < math.inf else (fill, backlog)
            found = refill(self.evaluator, orders, fill=tried[0], backlog=tried[1])
            if found is None:
                self._count()
            elif (value := self._offer(found, "weights")) <= best:
                best, (fill, backlog) = value, tried
            if best is math.inf:
                break

    def _slide(self) -> None:
        at = min(int(self.random.expovariate(0.7)), len(self._elites) - 1)
        _, _, orders = self._elites[at]
        size = sum(map(len, orders))
        if size < _SMALL and self.random.random() < 0.3:  # from another start
            policy = self.random.choice(self._policies)[2]
            for _ in range(5):
                policy = changed(policy, self.problem, self.random)
            orders = self.lister.build(policy)
        search = SlideSearch(self.evaluator)
        steps = min(3000, max(300, 40 * size)) if size < _SMALL else _POLICIES * _SLIDES
        hot = self.random.choice((0.02, 0.1, 0.3, 1.0) if size < _SMALL else (0.02, 0.1, 0.3))
        if search.swaps and size < _SMALL and self.random.random() < _LONG:
            steps, hot = _LONG_STEPS, _HOT
        for found in search.anneal(orders, self.random, steps=steps, hot=hot, cold=hot / 30):
            if found is None:
                self._count()
            else:
                self._offer(found[1], "slides", value=found[0])

    def _try_policy(self, policy: Policy) -> float:
        orders = self.lister.build(policy)
        value = self._offer(orders, "policy")
        self._policies.append((value, self.evaluations, policy))
        self._policies.sort(key=lambda each: each[:2])
        del self._policies[2 * _ELITES :]
        return value

    # --- its record ---

    def _offer(self, orders: Orders, source: str, value: float | None = None) -> float:
        value = self.evaluator.value(orders) if value is None else value
        if not any(value == other for other, _, _ in self._elites):
            self._elites.append((value, self.evaluations, split(self.evaluator, orders)))
            self._elites.sort(key=lambda each: each[:2])
            del self._elites[_ELITES:]
        if value < self.value:
            assert self.evaluator.fits(orders), f"{source} exceeds the memory"
            self.incumbent.offer(value, [list(order) for order in orders], source, spent=1)
        self._count()
        return value

    def _count(self) -> None:
        self.incumbent.evaluations += 1
        if self.incumbent.is_over:
            raise _BudgetError

    def _fuse(self) -> Orders:
        """The best orders, with an I and its W run as one where the simulator does so in any case, at the cost of one
        action, and rank by rank, if that takes no longer."""
        assert self.incumbent.answer is not None
        best = fuse(self.evaluator, self.incumbent.answer, only_local=True)
        self.incumbent.value = self.evaluator.value(best)  # which may round otherwise
        self.incumbent.note(self.value, self.incumbent.history[-1].source)
        end = 1.02 * self.incumbent.budget.seconds
        for rank, order in enumerate(fuse(self.evaluator, best) if self.incumbent.elapsed <= end else ()):
            if self.incumbent.elapsed > end:
                break
            orders = [*best[:rank], order, *best[rank + 1 :]]
            if (value := self.evaluator.value(orders)) <= self.value:
                self.incumbent.value, best = value, orders
        return best


# --- starting orders ---


def named_orders(evaluator: OrderEvaluator, *, seconds: float = math.inf) -> Iterator[tuple[str, Orders]]:
    """Orders of the families on this placement that fit the memory, and the same with each B as I and W; those that are
    built in about so many seconds (CPU time)."""
    until = time.thread_time() + seconds
    for family in FAMILIES.values():
        yield from _fitting(evaluator, family, {}, until)
        if "group_size" in family.options and evaluator.problem.num_ranks % 2 == 0:  # its half-memory form
            yield from _fitting(evaluator, family, {"group_size": evaluator.problem.num_ranks // 2}, until)


def made_orders(evaluator: OrderEvaluator, costs: Costs, *, seconds: float = math.inf) -> Iterator[tuple[str, Orders]]:
    """The same for families that are made for costs and a memory limit, which takes longer. An order made as if all
    memory were kept until W always fits."""
    problem = evaluator.problem
    until = time.thread_time() + seconds
    for family in FAMILIES.values():
        if "costs" not in family.options:
            continue
        yield from _fitting(evaluator, family, {"costs": costs}, until)
        held = {n for row in problem.held for n in row}
        if "memory_limit" in family.options and problem.memory_limit is not None and len(held) == 1 and min(held) > 0:
            kept = min(n for row in problem.kept for n in row) / min(held)
            limit = min(problem.memory_limit) / min(held)
            for share in dict.fromkeys((kept, 1.0)):
                options = {"costs": costs, "memory_limit": limit, "kept": share}
                yield from _fitting(evaluator, family, options, until)


def _fitting(
    evaluator: OrderEvaluator, family: Family, options: dict[str, object], until: float
) -> Iterator[tuple[str, Orders]]:
    problem, left = evaluator.problem, until - time.thread_time()
    if family.rule.is_asynchronous or family.weight_copies > 1 or "num_slices" in family.options or left <= 0:
        return
    sizes: dict[str, object] = {"num_ranks": problem.num_ranks, "num_microbatches": problem.num_microbatches}
    if "seconds" in family.options:
        sizes["seconds"] = left
    if family.takes_chunks:
        sizes["num_chunks"] = problem.num_stages // problem.num_ranks
    elif problem.num_stages != problem.num_ranks * family.num_chunks:
        return
    try:
        schedule = family.build(**sizes, **options)
        orders = evaluator.orders(schedule)
    except ValueError:  # no schedule of these sizes, or not on this placement
        return
    if schedule.edges == chain(problem.num_stages) and evaluator.fits(orders):
        yield family.name, orders
        if (parts := split(evaluator, orders)) != orders:
            yield family.name, parts


def split(evaluator: OrderEvaluator, orders: Orders) -> Orders:
    """The same order with I and W instead of each B."""
    first = 3 * evaluator.num_stages * evaluator.num_microbatches
    size = first // 3
    return [
        [part for code in order for part in ((code - 2 * size, code - size) if code >= first else (code,))]
        for order in orders
    ]


def fuse(evaluator: OrderEvaluator, orders: Orders, *, only_local: bool = False) -> Orders:
    """The same order with a B instead of each I directly followed by its W; `only_local`: where no other rank waits for
    the gradient, as it is run in any case."""
    S, M, rank_of = evaluator.num_stages, evaluator.num_microbatches, evaluator.problem.rank_of
    size, local = S * M, [not only_local or s == 0 or rank_of[s - 1] == rank_of[s] for s in range(S)]
    fused = []
    for order in orders:
        new: list[int] = []
        for code in order:
            if new and size <= new[-1] < 2 * size and code == new[-1] + size and local[code // M % S]:
                new[-1] += 2 * size
            else:
                new.append(code)
        fused.append(new)
    return fused


# --- batch after batch ---


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOrder:
    """The order found for one batch, named "auto", or the fixed one if nothing is faster. Values are of the objective
    [s]; `fixed_value` is None if it does not fit the memory."""

    schedule: Schedule
    value: float
    fixed_value: float | None
    evaluations: int


class BatchOrders:
    """Orders of batch after batch, of the same stages on the same ranks.

    If the fixed schedule fits a batch's memory, no order is slower than it. The same problems in the same order give
    the same schedules on every machine: the search does not depend on time.

    Arguments:
        fixed: the schedule to beat; its placement and number of microbatches are those of all batches.
        cold, warm: orders that are tried for the first batch, and for each further one; None: for about a second and a
            tenth of it, fewer for larger batches (500 and 52 for P=8, M=32).
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
    sequence: Sequence[int] = range(len(moved_to)) if policy.sequence is None else policy.sequence
    return replace(policy, sequence=tuple(moved_to[k] for k in sequence))


def relabelled(evaluator: OrderEvaluator, orders: Orders, moved_to: dict[int, int]) -> Orders:
    M = evaluator.num_microbatches
    return [[code - code % M + moved_to[code % M] for code in order] for order in orders]

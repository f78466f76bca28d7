"""The search itself: starts, then rounds of policies and of slides, until the bound is met or the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from ..timing.costs import Costs
from .evaluate import Evaluator, Orders
from .listing import Lister, Policy
from .policies import changed, changed_weights, first_policies
from .problem import Problem
from .slides import OrderSearch
from .starts import fits_memory, fuse, made_orders, named_orders, split
from .weights import refill

Stopped = Literal["optimal", "seconds", "evaluations", "tried"]

_POLICIES = 24  # policies of a round
_REFILLS = 16  # times that the W of one order are placed anew, in a round
_SLIDES = 40  # slides of a round, for each policy
_SMALL = 500  # actions of a problem in which slides find what policies cannot
_BEFORE = 6  # policies that come before the named schedules, where there is a start
_NEAR = 1.1  # a named schedule within this of the best is worth a second try
_ELITES = 4
CLOSE = 1e-9  # a value so near to the bound, in parts of it, meets it: limits of memory leave as much for rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A point of a search: the best value so far [s], its gap, and what it took.

    Arguments:
        seconds: since the search began.
        evaluations: orders that were tried.
        value: of the objective [s].
        gap: (value - lower bound) / lower bound.
        source: what found it: a family, "given", "policy", "weights", "slides".
    """

    seconds: float
    evaluations: int
    value: float
    gap: float
    source: str


class _BudgetError(Exception):
    """The budget is spent, or the bound is met: the search ends here."""


class Search:
    """One search.

    Arguments: see `synthesize`; `bound` that no value can be below [s], 0 where nobody asked; `costs` for families that
    are made for them; `has_named`, whether named families are tried at all, which takes their building.

    Attributes: `best`, the best orders so far; `policies`, the best ones, the very best first; `history`, each
    improvement; `stopped`, why it ended.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        bound: float,
        costs: Costs | None = None,
        seed: int = 0,
        seconds: float = math.inf,
        evaluations: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        has_named: bool = True,
    ) -> None:
        self.problem, self.bound, self.costs, self.random = problem, bound, costs, Random(seed)
        self.evaluator = Evaluator(problem)
        self.lister = Lister(self.evaluator)
        self.seconds, self.most, self.on_progress = seconds, evaluations, on_progress
        self.has_named = has_named
        self.began = time.monotonic()
        self.evaluations = 0
        self.value = math.inf
        self.best: Orders | None = None
        self.history: list[Progress] = []
        self.stopped: Stopped = "seconds"
        self._elites: list[tuple[float, int, Orders]] = []
        self._policies: list[tuple[float, int, Policy]] = []

    def run(self, starts: Sequence[Orders] = (), policies: Sequence[Policy] = ()) -> Orders:
        """The best orders that it finds; the given starts come first, then the given policies."""
        try:
            self._begin(starts, policies)
            while True:
                self._round()
        except _BudgetError:
            pass
        assert self.best is not None
        self._fuse()
        return self.best

    # --- parts of a search ---

    @property
    def elites(self) -> tuple[Orders, ...]:
        """Orders of the least values, the best first, with each B as I and W."""
        return tuple(orders for _, _, orders in self._elites)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The best ones, the very best first."""
        return tuple(policy for _, _, policy in self._policies)

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
        for name, orders in named_orders(self.evaluator) if self.has_named else ():
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
        """Families that are made for the costs."""
        if self.costs is not None and self.has_named:
            for name, orders in made_orders(self.evaluator, self.costs):
                self._offer(orders, name)

    def _round(self) -> None:
        """Some policies, some slides."""
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
        """The W of an order placed anew, by one rule for all ranks."""
        P, most = self.problem.num_ranks, self.problem.num_microbatches * self.problem.num_stages
        found = refill(self.evaluator, split(self.evaluator, orders), fill=(fill,) * P, backlog=(most,) * P)
        if found is not None:
            self._offer(found, "weights")

    def _refill(self) -> None:
        """The W of one of the best orders, placed anew."""
        P, most = self.problem.num_ranks, self.problem.num_microbatches * self.problem.num_stages
        orders = self._elites[int(self.random.random() * len(self._elites))][2]
        fill, backlog = (self.random.choice((0.4, 0.6, 0.8)),) * P, (most,) * P
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
        if size < _SMALL and self.random.random() < 0.3:  # from somewhere else
            policy = self.random.choice(self._policies)[2]
            for _ in range(5):
                policy = changed(policy, self.problem, self.random)
            orders = self.lister.build(policy)
        steps = min(3000, max(300, 40 * size)) if size < _SMALL else _POLICIES * _SLIDES
        hot = self.random.choice((0.02, 0.1, 0.3, 1.0) if size < _SMALL else (0.02, 0.1, 0.3))
        search = OrderSearch(self.evaluator)
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
        """Keep orders if they are the best so far; returns their value."""
        value = self.evaluator.value(orders) if value is None else value
        if not any(value == other for other, _, _ in self._elites):
            self._elites.append((value, self.evaluations, split(self.evaluator, orders)))
            self._elites.sort(key=lambda each: each[:2])
            del self._elites[_ELITES:]
        if value < self.value:
            assert fits_memory(self.problem, self.evaluator.peaks(orders)), f"{source} exceeds the memory"
            self.value, self.best = value, [list(order) for order in orders]
            point = Progress(
                seconds=self.elapsed,
                evaluations=self.evaluations + 1,
                value=value,
                gap=self.gap,
                source=source,
            )
            self.history.append(point)
            if self.on_progress is not None:
                self.on_progress(point)
        self._count()
        return value

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    @property
    def gap(self) -> float:
        """How far the best value is above the bound, in parts of it."""
        return max(0.0, self.value - self.bound) / self.bound if self.bound > 0 else math.inf

    def _count(self) -> None:
        self.evaluations += 1
        if self.value <= self.bound * (1 + CLOSE):
            self.stopped = "optimal"
            raise _BudgetError
        if self.best is None:
            return
        if self.most is not None and self.evaluations >= self.most:
            self.stopped = "evaluations"
            raise _BudgetError
        if self.elapsed >= self.seconds:
            self.stopped = "seconds"
            raise _BudgetError

    def _fuse(self) -> None:
        """Run an I and its W as one, rank by rank, where that takes no longer."""
        assert self.best is not None
        whole = fuse(self.evaluator, self.best)
        for rank, order in enumerate(whole):
            orders = [*self.best[:rank], order, *self.best[rank + 1 :]]
            if (value := self.evaluator.value(orders)) <= self.value:
                self.value, self.best = value, orders

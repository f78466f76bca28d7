"""`synthesize`: the best schedule that can be found for given costs and memory in a given time.

One search per placement, with a shared budget. Where links queue, the simulator decides between orders.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain as joined
from itertools import pairwise

from ..checks import check
from ..ir import Schedule
from ..orders.evaluate import OrderEvaluator, Orders
from ..orders.problem import Objective, Problem
from ..timing.costs import Costs
from ..timing.links import Links
from ..timing.simulate import simulate
from ..timing.timeline import Timeline
from ..wording import count, duration
from .incumbent import Budget, Incumbent, Progress, Stopped
from .request import Posed, Request
from .search import OrderingSearch, made_orders, named_orders

_JUDGED = 0.1  # part of a search's time for simulating its best orders and the named ones on links that queue
_KEPT = 0.25  # part of the time for orders that would fit even if all memory were kept until W


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A placement that was considered.

    Arguments:
        placement: "plain", "cyclic", "v", or "given".
        lower_bound: seconds that no schedule on it can beat.
        value: of the best schedule that was found on it [s]; None: none that could win.
    """

    placement: str
    lower_bound: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """A schedule that `synthesize` found.

    Arguments:
        problem: the problem on the placement of the schedule.
        costs: of its stages [s]: the given ones, or derived from them for the stages of the placement.
        schedule: the best order, named "auto".
        timeline: of that schedule, simulated.
        value: of the objective: the makespan or the span [s].
        lower_bound: seconds that no schedule of the problem can beat.
        stopped: why the search ended: "optimal", the bound is reached; "seconds" or "evaluations", these are spent;
            "tried", nothing is left to try.
        history: each improvement, the first to the last.
        seconds: that the search took.
        evaluations: orders that it tried.
        placements: that were considered, the one with the least bound first.
    """

    problem: Problem
    costs: Costs
    schedule: Schedule
    timeline: Timeline
    value: float
    lower_bound: float
    stopped: Stopped
    history: tuple[Progress, ...]
    seconds: float
    evaluations: int
    placements: tuple[Tried, ...]

    @property
    def gap(self) -> float:
        """(value - lower bound) / lower bound: the best possible value is at most this part below.

        At most as many points of the bubble could be gained.
        """
        return max(0.0, self.value - self.lower_bound) / self.lower_bound

    @property
    def is_optimal(self) -> bool:
        """Whether the value equals the bound, so that nothing better exists."""
        return self.stopped == "optimal"

    @property
    def source(self) -> str:
        """The finder: the name of a family, "given", "policy", "weights", "slides"."""
        return self.history[-1].source

    def __repr__(self) -> str:
        return f"<Synthesis {self.summary()}>"

    def summary(self) -> str:
        """One line: value, gap, and why it ended."""
        why = {
            "optimal": "optimal: it equals the lower bound",
            "seconds": "best so far, the time was over",
            "evaluations": "best so far, the evaluations were spent",
            "tried": "best of all that was tried",
        }[self.stopped]
        orders = count(self.evaluations, "order")
        return (
            f"{self.problem.objective} {duration(self.value)}, at most {self.gap:.2%} above the best possible; {why} "
            f"({orders} in {duration(self.seconds)})"
        )


def synthesize(
    *,
    num_ranks: int | None = None,
    num_microbatches: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | Sequence[Sequence[int]] = "plain",
    num_chunks: int | None = None,
    objective: Objective = "makespan",
    activations: float | Sequence[float | Sequence[float]] = 1.0,
    kept_share: float | Sequence[float] = 1.0,
    links: Links | None = None,
    start: Schedule | None = None,
    seconds: float = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Synthesis:
    """Search for the schedule of one flush batch that takes the fewest seconds.

    It begins with every named family that has this placement and fits the memory, so that none of them is better, and
    ends when its lower bound is reached or its budget is spent. The same seed and `evaluations` give the same schedule
    on every machine, if `seconds` does not end it first.

    Arguments:
        num_ranks: P; may be left out where `placement` lists the stages of each rank.
        num_microbatches: M.
        costs: of one stage action each [s].
        memory_limit: most that a rank may hold, one number or one per rank, in the unit of `activations`; None: no
            limit.
        placement: "plain" (stage r on rank r), "cyclic" (`num_chunks` stages per rank, stage s on rank s mod P), "v"
            (two stages per rank, down the ranks and back), the stages of each rank, or "any": the best of the first
            three. Then costs and activations are those of the model in P equal parts, one per rank, which the others
            divide into V equal stages each, except for messages; or, if they have more numbers, of so many pieces, of
            which consecutive ones make a stage. Placements whose number of stages does not fit are left out. The limit
            keeps its unit: one activation of a P-th of the model, or bytes.
        num_chunks: V, for "cyclic" (2 by default).
        objective: "makespan", when the optimizer step synchronises all ranks; "span", when steps may overlap.
        activations: memory from a forward of a stage until the end of its W (or B), one number or one per stage: 1, so
            that limits count stage activations, or bytes. A stage may have a row instead, one number per microbatch.
        kept_share: part of that which stays between I and W (0 to 1), one number or one per stage.
        links: the network between ranks. The search ignores queueing; where messages have sizes, or sums share the
            links, its best orders and all named ones are then simulated.
        start: a schedule to begin with, besides the named ones.
        seconds: of CPU time of this thread that the search may take, so that other processes take nothing from it.
        evaluations: most orders that it tries, counting each slide, and as many again if `kept_share` is below 1, so
            that a smaller share is never worse; None: as many as there is time for.
        seed: of the random choices.
        on_progress: called with each improvement.

    Raises ValueError for arguments that do not fit, ScheduleError (a ValueError) for a `start` that cannot run,
    MemoryLimitError (a ValueError) for a limit that no schedule can meet, with the smallest possible.

    >>> found = synthesize(num_ranks=4, num_microbatches=8, costs=Costs(), memory_limit=4)
    >>> found.value, found.is_optimal, found.timeline.peak_activations
    (27.0, True, (4, 4, 4, 4))
    """
    budget = Budget.read(seconds=seconds, evaluations=evaluations, seed=seed)
    if not isinstance(costs, Costs):
        raise ValueError(f"costs={costs!r}: expected Costs(forward=..., input_grad=..., weight_grad=...)")
    request = Request(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
        placement=placement,
        num_chunks=num_chunks,
        objective=objective,
        activations=activations,
        kept_share=kept_share,
        links=links,
    )
    if start is not None:
        check(start)  # the search compares programs that are sound, and keeps them so
    return solve(request, budget, start=start, on_progress=on_progress)


# A simulated schedule for one of the problems.
Judged = tuple[Posed, Timeline]


class Portfolio:
    """Searches for one answer with a shared budget.

    Attributes: `values`, by placement, the best value that was found there [s], None if nothing could win.
    """

    def __init__(
        self,
        problems: Sequence[Posed],
        budget: Budget,
        *,
        start: Schedule | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.start, self.budget = start, budget
        first = None if start is None else start.placement
        self.problems = sorted(problems, key=lambda posed: (posed.problem.placement != first, posed.bound))
        limited = [each for each in self.problems if each.problem.memory_limit is not None]
        self.keeping = [each for each in limited if each.problem.kept != each.problem.held]
        part = 1.0 - _KEPT if self.keeping else 1.0
        self.incumbent: Incumbent[Judged] = Incumbent(
            replace(budget, seconds=part * budget.seconds),
            bound=min(posed.bound for posed in problems),
            on_progress=on_progress,
        )
        self.values: dict[str, float | None] = {}

    def search_as_asked(self) -> None:
        """Search on each placement with the memory as given, then again on the best one with the remaining budget."""
        incumbent, many = self.incumbent, len(self.problems)
        for at, posed in enumerate(self.problems):
            if at == 0 or not (incumbent.is_over or incumbent.promises_nothing(posed.bound)):
                self.values[posed.placement] = self._plain(posed, None if at else self.start, left=many - at)
        won = incumbent.answer
        if many == 1 or won is None or incumbent.is_over:
            return
        posed, timeline = won
        if not incumbent.promises_nothing(posed.bound):
            self._plain(posed, timeline.schedule, left=1)

    def search_as_if_all_were_kept(self) -> None:
        """Search for orders that fit even if all memory is kept until W, with as many evaluations, so that less is
        never worse."""
        if self.keeping:
            self.incumbent.budget = self.budget.after(self.incumbent.evaluations)
        for at, posed in enumerate(self.keeping):
            problem = replace(posed.problem, kept=posed.problem.held)
            if not (self.incumbent.is_over or self.incumbent.promises_nothing(posed.bound)):
                self._plain(posed, None, left=len(self.keeping) - at, problem=problem)

    def _plain(
        self, posed: Posed, start: Schedule | None, *, left: int, problem: Problem | None = None
    ) -> float | None:
        """Search one placement, as one of `left` remaining searches that share the budget. Returns the best value [s];
        None if links queue and no order can beat the best so far."""
        queues = _queues(posed.request.links, posed.problem)
        search = self._search(posed, problem or posed.problem, left, reports=not queues)
        share = search.incumbent.budget
        until = self.incumbent.elapsed + share.seconds
        if queues:
            search.incumbent.budget = replace(share, seconds=(1.0 - _JUDGED) * share.seconds)
        evaluator = search.evaluator
        starts = [] if start is None else [evaluator.orders(start)]
        if not all(map(evaluator.fits, starts)):
            most = max(evaluator.peaks(starts[0]))
            raise ValueError(f"start={start!r} holds up to {most:g} on a rank: expected at most memory_limit")
        orders = search.run(starts)
        self.incumbent.evaluations += search.evaluations
        source = search.incumbent.history[-1].source
        if not queues:
            timeline = simulate(evaluator.schedule(orders), posed.request.costs, posed.request.links)
            self.incumbent.offer(search.value, (posed, timeline), source)
            return search.value
        offers = [("given", each) for each in starts] + [(source, each) for each in (orders, *search.elites)]
        seconds = (until - self.incumbent.elapsed) / 2
        made = made_orders(evaluator, posed.request.costs, seconds=seconds)
        named = joined(named_orders(evaluator, seconds=seconds), made)
        values = list[float]()
        for name, each in joined(offers, named):
            if len(values) <= len(starts) or self.incumbent.elapsed < until:
                values.append(self._judge(posed, evaluator, each, name))
        return min(values) if min(values) < math.inf else None

    def _search(self, posed: Posed, problem: Problem, left: int, *, reports: bool) -> OrderingSearch:
        incumbent = self.incumbent

        def note(point: Progress) -> None:
            incumbent.note(point.value, point.source, spent=point.evaluations)

        on_progress = note if reports else None
        return OrderingSearch(
            problem, incumbent.share(left), bound=posed.bound, costs=posed.request.costs, on_progress=on_progress
        )

    def _judge(self, posed: Posed, evaluator: OrderEvaluator, orders: Orders, source: str) -> float:
        """Offer an order at its simulated value.

        Returns that value [s]; infinite if the order is too slow even without queueing.
        """
        if evaluator.value(orders) >= self.incumbent.value:
            return math.inf
        self.incumbent.evaluations += 1
        timeline = simulate(evaluator.schedule(orders), posed.request.costs, posed.request.links)
        value: float = getattr(timeline, posed.problem.objective)
        self.incumbent.offer(value, (posed, timeline), source)
        return value


def solve(
    request: Request,
    budget: Budget,
    *,
    start: Schedule | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Synthesis:
    """`synthesize` with its arguments as records."""
    began = time.thread_time()
    problems = request.problems()
    budget = replace(budget, seconds=max(0.0, budget.seconds + began - time.thread_time()))
    portfolio = Portfolio(problems, budget, start=start, on_progress=on_progress)
    portfolio.search_as_asked()
    portfolio.search_as_if_all_were_kept()
    incumbent = portfolio.incumbent
    assert incumbent.answer is not None
    posed, timeline = incumbent.answer
    values = portfolio.values | {posed.placement: incumbent.value}
    return Synthesis(
        problem=posed.problem,
        costs=posed.request.costs,
        schedule=timeline.schedule,
        timeline=timeline,
        value=incumbent.value,
        lower_bound=incumbent.bound,
        stopped=incumbent.stopped,
        history=tuple(incumbent.history),
        seconds=incumbent.elapsed,
        evaluations=incumbent.evaluations,
        placements=tuple(
            Tried(placement=each.placement, lower_bound=each.bound, value=values.get(each.placement))
            for each in sorted(portfolio.problems, key=lambda each: each.bound)
        ),
    )


def _queues(links: Links | None, problem: Problem) -> bool:
    """Whether messages may queue on links, for each other or for all-reduces of gradients."""
    if links is None:
        return False
    if links.sums:
        return True
    ranks = problem.rank_of
    ways = [links.way(*pair) for a, b in pairwise(ranks) if a != b for pair in ((a, b), (b, a))]
    return any(way.seconds_per_byte > 0 for way in ways)

"""The searches behind one `synthesize`: each placement by itself, then with what else may make its orders fit.

Where links queue, or activations leave or are made again, the simulator has the last word on an order. Then problems
are searched in place of the one that was asked, whose orders fit the memory by other means.

**Moves.** A stage whose activations wait on the host takes next to nothing, so the search is asked for the order of a
problem in which the first stages of the chain take none: their activations live longest. Or it is given some times the
memory.

**Recomputation.** Stages keep their inputs alone and run their forward again in front of their backward: I takes F
more; between F and I the inputs are held, from I on all of it as ever. The first stages of the chain are chosen. A
search sees a problem of small activations and a limit that leaves room for one whole backward; where a rank puts off
more W of such stages than there is room for, they run whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain as joined
from itertools import pairwise
from operator import add, sub
from typing import Any

from ..ir import Op, Schedule
from ..timing.costs import COST_OF_OP, Costs, Row, together
from ..timing.links import Links
from ..timing.simulate import simulate
from ..timing.timeline import Timeline
from ..transform import with_offload
from ..wording import count, duration
from .evaluate import OrderEvaluator, Orders
from .incumbent import Budget, Incumbent, Progress, Stopped
from .problem import MemoryLimitError, Problem, Table
from .request import Posed, Request, numbers
from .search import OrderingSearch, made_orders, named_orders, whole
from .spill import MoveKind, peaks_in_time, with_moves

_PARTS = (0.5, 0.25, 0.75, 1.0)  # of the stages, those that leave or recompute
_TIMES = (2.0, 1.4, math.inf)  # as much memory
_JUDGED = 0.1  # part of a search's time in which its orders, and the named ones, are simulated on links that queue
_KEPT = 0.25  # part of the time for orders that fit even if all were kept until W, where less is
_MOVING = 2.0  # activations of a stage that are under way, out and back


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A problem in place of another, as a search sees it. `offloads`: activations then leave, so that an order fits;
    `num_recomputed`: of the first stages of the chain; `waiting`: [S][M] what is held between a forward and its
    backward, None: as much as ever."""

    problem: Problem
    costs: Costs
    offloads: bool = False
    num_recomputed: int = 0
    waiting: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A placement that was looked at.

    Arguments:
        placement: "plain", "cyclic", "v", or "given".
        lower_bound: what no schedule on it can beat [s].
        value: of the best schedule that was found on it [s]; None: none that could win.
    """

    placement: str
    lower_bound: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """A schedule that `synthesize` found.

    Arguments:
        problem: what was to be put in order, on the placement of the schedule.
        costs: of its stages [s]: those that were given, or what follows from them for the stages of the placement,
            with a forward in the backward of those that recompute.
        schedule: the best order, by the name "auto".
        timeline: of that schedule, simulated.
        recompute: of each stage, "full" or "none", as `PipelineModule(recompute=)` takes them.
        value: of the objective: the makespan or the span [s].
        lower_bound: what no schedule of the problem can beat [s].
        stopped: why the search ended: "optimal", when the bound was met; "seconds" or "evaluations", when these were
            spent, or "tried", when all was that is worth a try: then it is the best so far.
        history: each improvement, the first to the last.
        seconds: that the search took.
        evaluations: orders that it tried.
        placements: that were looked at, the one with the least bound first.
    """

    problem: Problem
    costs: Costs
    schedule: Schedule
    timeline: Timeline
    recompute: tuple[str, ...]
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
        """Whether the bound was met, so that nothing better exists."""
        return self.stopped == "optimal"

    @property
    def source(self) -> str:
        """The finder: the name of a family, "given", "policy", "weights", "slides", "moves", "recompute"."""
        return self.history[-1].source

    def __repr__(self) -> str:
        return f"<Synthesis {self.summary()}>"

    def summary(self) -> str:
        """One line: value, gap, and why it ended."""
        why = {
            "optimal": "optimal: the lower bound is met",
            "seconds": "best so far, the time was over",
            "evaluations": "best so far, the evaluations were spent",
            "tried": "best of all that was tried",
        }[self.stopped]
        orders = count(self.evaluations, "order")
        return (
            f"{self.problem.objective} {duration(self.value)}, at most {self.gap:.2%} above the best possible; {why} "
            f"({orders} in {duration(self.seconds)})"
        )


# A simulated schedule for one of the problems, and the variant that its order was found for.
Judged = tuple[Posed, Variant, Timeline]


class Portfolio:
    """Searches for one answer. The budget is of all searches together, for orders as they are asked for, and once more
    beyond these (`has_more`): but of the seconds half.

    Attributes: `values`, by placement, the best that was found there [s], None where nothing could win; `least`, the
    least that the fullest rank held in an order that did not fit.
    """

    def __init__(
        self,
        problems: Sequence[Posed],
        budget: Budget,
        *,
        start: Schedule | None,
        has_more: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.start, self.budget = start, budget
        self.solvable = [posed for posed in problems if posed.bound_whole < math.inf]
        self.solvable.sort(key=lambda posed: (not self._is_for(posed), posed.bound_whole))
        self.problems = sorted(problems, key=lambda posed: (not self._is_for(posed), posed.bound))
        part = 0.5 if has_more and self.solvable else 1.0
        self.budget_as_asked = replace(budget, seconds=part * budget.seconds)
        self.keeping = [each for each in self.solvable if _keeps_less(each.problem)]
        part *= 1.0 - _KEPT if self.keeping else 1.0
        self.incumbent: Incumbent[Judged] = Incumbent(
            replace(budget, seconds=part * budget.seconds),
            bound=min(posed.bound for posed in problems),
            on_progress=on_progress,
        )
        self.values: dict[str, float | None] = {}
        self.least = math.inf

    def _is_for(self, posed: Posed) -> bool:
        return self.start is not None and posed.problem.placement == self.start.placement

    def search_as_asked(self) -> None:
        """Search for orders that fit as they are, on each placement, then with what others did not need."""
        incumbent, many = self.incumbent, len(self.solvable)
        for at, posed in enumerate(self.solvable):
            if at == 0 or not (incumbent.is_over or incumbent.promises_nothing(posed.bound_whole)):
                self.values[posed.placement] = self._plain(posed, None if at else self.start, left=many - at)
        won = incumbent.answer
        if many == 1 or won is None or incumbent.is_over:
            return
        posed, _, timeline = won
        if not incumbent.promises_nothing(posed.bound_whole):
            self._plain(posed, timeline.schedule, left=1)

    def search_as_if_all_were_kept(self) -> None:
        """Search for orders that fit even if all is kept until W, with as many evaluations: less is never worse."""
        if self.keeping:
            self.incumbent.budget = self.budget_as_asked.after(self.incumbent.evaluations)
        for at, posed in enumerate(self.keeping):
            problem = replace(posed.problem, kept=posed.problem.held)
            if not (self.incumbent.is_over or self.incumbent.promises_nothing(posed.bound_whole)):
                self._plain(posed, None, left=len(self.keeping) - at, problem=problem)

    def search_beyond(self, *, offloads: bool, recompute: float | Sequence[float] | None) -> None:
        """Search each problem once more with activations that leave, and with stages that recompute."""
        self.incumbent.budget = self.budget.after(self.incumbent.evaluations)
        kinds = [True] * offloads + [False] * (recompute is not None)
        tasks = [(posed, moves) for posed in self.problems for moves in kinds]
        for at, (posed, moves) in enumerate(tasks):
            if self.incumbent.promises_nothing(posed.bound):
                continue
            problem, costs = posed.problem, posed.request.costs
            if moves:
                free = Variant(problem=replace(problem, memory_limit=None), costs=costs, offloads=True)
                evaluator = OrderEvaluator(free.problem)
                seconds = (self.incumbent.budget.seconds - self.incumbent.elapsed) / (4 * (len(tasks) - at))
                for name, orders in joined(
                    named_orders(evaluator, seconds=seconds), made_orders(evaluator, costs, seconds=seconds)
                ):
                    self._judge(posed, free, evaluator, orders, f"{name}, moves")
                self._search_each(posed, list(with_more_room(problem, costs)), "moves", len(tasks) - at)
            elif recompute is not None:
                shares = numbers("recompute", recompute, problem.num_stages, "stage", is_share=True)
                variants = list(recomputing(problem, costs, shares, needs := list[float]()))
                self.least = min([self.least, *needs])
                self._search_each(posed, variants, "recompute", len(tasks) - at)

    def _plain(
        self, posed: Posed, start: Schedule | None, *, left: int, problem: Problem | None = None
    ) -> float | None:
        """Search for orders that fit as they are, with what `left` searches have to share; returns the best value [s],
        None where none of them can win."""
        queues = _queues(posed.request.links, posed.problem)
        variant = Variant(problem=problem or posed.problem, costs=posed.request.costs)
        search = self._search(variant, left, bound=posed.bound_whole, tells=not queues)
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
            self.incumbent.offer(search.value, (posed, variant, timeline), source)
            return search.value
        offers = [("given", each) for each in starts] + [(source, each) for each in (orders, *search.elites)]
        seconds = (until - self.incumbent.elapsed) / 2
        made = made_orders(evaluator, posed.request.costs, seconds=seconds)
        named = joined(named_orders(evaluator, seconds=seconds), made)
        values = list[float]()
        for name, each in joined(offers, named):
            if len(values) <= len(starts) or self.incumbent.elapsed < until:
                values.append(self._judge(posed, variant, evaluator, each, name))
        return min(values) if min(values) < math.inf else None

    def _search_each(self, posed: Posed, variants: Sequence[Variant], source: str, left: int) -> None:
        """Search each of some problems beside the one that was asked, and judge what is best there."""
        for at, variant in enumerate(variants):
            if not self.incumbent.is_over:
                search = self._search(variant, left * (len(variants) - at), bound=posed.bound)
                orders = search.run()
                self.incumbent.evaluations += search.evaluations
                for number, each in enumerate((orders, *search.elites)):
                    if number == 0 or self.incumbent.elapsed < self.incumbent.budget.seconds:
                        self._judge(posed, variant, search.evaluator, each, source)

    def _search(self, variant: Variant, left: int, *, bound: float, tells: bool = False) -> OrderingSearch:
        incumbent = self.incumbent

        def tell(point: Progress) -> None:
            incumbent.tell(point.value, point.source, spent=point.evaluations)

        on_progress = tell if tells else None
        return OrderingSearch(
            variant.problem, incumbent.share(left), bound=bound, costs=variant.costs, on_progress=on_progress
        )

    def _judge(self, posed: Posed, variant: Variant, evaluator: OrderEvaluator, orders: Orders, source: str) -> float:
        """Offer an order for what it is worth once simulated, or what is made of it where it does not fit.

        Returns its value [s]; infinite where nothing of it fits, or where it takes too long even if nothing is in its
        way.
        """
        if evaluator.value(orders) >= self.incumbent.value:
            return math.inf
        self.incumbent.evaluations += 1
        timeline = simulate(evaluator.schedule(orders), variant.costs, posed.request.links)
        smaller = self._with_less_memory((posed, variant, timeline), evaluator, orders)
        while not posed.problem.fits(peaks := peaks_in_time(timeline, posed.problem, variant.waiting)):
            schedule = next(smaller, None)
            if schedule is None:
                self.least = min(self.least, max(peaks))
                return math.inf
            timeline = simulate(schedule, variant.costs, posed.request.links)
        value: float = getattr(timeline, posed.problem.objective)
        self.incumbent.offer(value, (posed, variant, timeline), source)
        return value

    @staticmethod
    def _with_less_memory(judged: Judged, evaluator: OrderEvaluator, orders: Orders) -> Iterator[Schedule]:
        """Schedules of the same order that need less memory."""
        posed, variant, timeline = judged
        if variant.offloads:
            yield with_moves(timeline, posed.problem, variant.costs)
            yield with_offload(timeline.schedule, costs=variant.costs)
        if variant.num_recomputed:
            yield evaluator.schedule(whole(evaluator, orders, variant.num_recomputed))


def solve(
    request: Request,
    budget: Budget,
    *,
    moves: Sequence[MoveKind] = (),
    recompute: float | Sequence[float] | None = None,
    start: Schedule | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Synthesis:
    """The search behind `synthesize`."""
    has_more = request.memory_limit is not None and bool(moves or recompute is not None)
    began = time.monotonic()
    problems = request.problems(may_leave=has_more)
    budget = replace(budget, seconds=max(0.0, budget.seconds + began - time.monotonic()))
    portfolio = Portfolio(problems, budget, start=start, has_more=has_more, on_progress=on_progress)
    portfolio.search_as_asked()
    portfolio.search_as_if_all_were_kept()
    if has_more:
        portfolio.search_beyond(offloads=bool(moves), recompute=recompute)
    if portfolio.incumbent.answer is None:
        raise MemoryLimitError(
            f"memory_limit={request.memory_limit}: nothing that meets it was found, whatever leaves or is recomputed; "
            f"expected at least {portfolio.least:g}, the least that was found to do"
        )
    incumbent, (posed, variant, timeline) = portfolio.incumbent, portfolio.incumbent.answer
    values = portfolio.values | {posed.placement: incumbent.value}
    return Synthesis(
        problem=posed.problem,
        costs=variant.costs,
        schedule=timeline.schedule,
        timeline=timeline,
        recompute=tuple(
            "full" if stage < variant.num_recomputed else "none" for stage in range(posed.problem.num_stages)
        ),
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


def _keeps_less(problem: Problem) -> bool:
    return problem.memory_limit is not None and problem.kept != problem.held


def _queues(links: Links | None, problem: Problem) -> bool:
    """Whether links may take longer than each message alone: these, or all-reduces of gradients, may share them."""
    if links is None:
        return False
    if links.sums:
        return True
    ranks = problem.rank_of
    ways = [links.way(*pair) for a, b in pairwise(ranks) if a != b for pair in ((a, b), (b, a))]
    return any(way.seconds_per_byte > 0 for way in ways)


def with_more_room(problem: Problem, costs: Costs) -> Iterator[Variant]:
    """Problems whose orders moves make fit, those that most often lead to something first."""
    assert problem.memory_limit is not None
    S, M = problem.num_stages, problem.num_microbatches
    largest = [max(row) for row in problem.held]
    for away in dict.fromkeys(round(part * S) for part in _PARTS):
        if away == 0:
            continue
        limits = []
        for limit, own in zip(problem.memory_limit, problem.placement, strict=True):
            least = max(math.fsum(problem.held[s][k] for s in own if s >= away) for k in range(M))
            moving = _MOVING * max((largest[s] for s in own if s < away), default=0.0)
            limits.append(max(limit - moving, least))
        gone = ((0.0,) * M,) * away
        held, kept = (*gone, *problem.held[away:]), (*gone, *problem.kept[away:])
        seen = replace(problem, held=held, kept=kept, memory_limit=tuple(limits))
        yield Variant(problem=seen, costs=costs, offloads=True)
    for times in _TIMES:
        pairs = zip(problem.memory_limit, problem.smallest_memory, strict=True)
        limits = [max(times * limit, least) for limit, least in pairs]
        seen = replace(problem, memory_limit=None if times == math.inf else tuple(limits))
        yield Variant(problem=seen, costs=costs, offloads=True)


def recomputing(problem: Problem, costs: Costs, shares: Sequence[float], needs: list[float]) -> Iterator[Variant]:
    """Problems in which some stages recompute, as far as their orders can fit; `shares`: [S] of an activation, the
    inputs. The limits with which each would fit are added to `needs`."""
    assert problem.memory_limit is not None
    S, M = problem.num_stages, problem.num_microbatches
    for number in dict.fromkeys(max(1, round(part * S)) for part in _PARTS):
        waiting = tuple(tuple(h * shares[s] for h in row) if s < number else row for s, row in enumerate(problem.held))
        rows = (
            [h - w for s in own for h, w in zip(problem.held[s], waiting[s], strict=True)] for own in problem.placement
        )
        again = [*map(max, rows)]
        own_costs = _recomputing_costs(costs, number, S)
        table = own_costs.table(num_stages=S)
        seen = replace(
            problem,
            seconds={op: tuple(row * (M // len(row)) for row in table.rows[op]) for op in COST_OF_OP},
            held=waiting,
            kept=tuple(tuple(map(min, *rows)) for rows in zip(problem.kept, waiting, strict=True)),
            memory_limit=tuple(map(sub, problem.memory_limit, again)),
        )
        needs.append(max(map(add, seen.smallest_memory, again)))
        if seen.fits(seen.smallest_memory):
            yield Variant(problem=seen, costs=own_costs, num_recomputed=number, waiting=waiting)


def _recomputing_costs(costs: Costs, number: int, num_stages: int) -> Costs:
    """Costs with a forward in the I and B of the first stages."""
    table = replace(costs.free_of_overhead, tied=()).table(num_stages=num_stages)

    def cost(op: Op, s: int) -> float | Row:
        new = table.row(op, s)
        if s < number and op in (Op.I, Op.B):
            new = together(new, table.row(Op.F, s), add)
        return new if len(new) > 1 else new[0]

    new: dict[str, Any] = {name: [cost(op, s) for s in range(num_stages)] for op, name in COST_OF_OP.items()}
    return replace(costs, **new, index_factors=None)

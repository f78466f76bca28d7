"""`synthesize_jointly`: the cut of a chain of layers, the placement of its stages and their schedule at once.

    starts, named orders -> cuts moved under these -> chains, if they get further -> cuts moved -> orders of the best

The W of a chain (see `chains`) fill gaps as they come. Where a limit of memory binds, orders whose W have places of
their own, as `zb-v`, hold as much and wait less: their cuts move alone, while all actions keep their places, and slides
adapt the order then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np

from ..ir import Schedule
from ..orders.evaluate import OrderEvaluator, Orders, SlideSearch
from ..orders.listing import refill
from ..orders.problem import MemoryLimitError
from ..placement import StagePlacement
from ..timing.costs import Costs
from ..timing.links import Links
from .arranged import Layer, LayerChain, Stages
from .chains import ChainSearch, shift
from .incumbent import Budget, Incumbent, Progress
from .request import Cut, Request, numbers
from .search import named_orders, split
from .synthesize import Synthesis, solve

_NAMED = 0.1  # part of the budget after which no more named orders are tried
_FIRST = 0.05  # part for moves of these
_CHAINS, _LAST = 0.8, 0.95  # parts that are spent after chains, and after moves of what they found
_BEST = 5  # results that are moved in turn
_DRAWN, _PLAYED, _SLID = 200, 30, 3  # cuts near one; those that are played, by their bounds; of these the best slide
_SLIDES, _HOT = 300, 0.3  # steps of each, and their first temperature, in mean seconds of an action
_POSED = 200  # problems that are kept
_BUDGET = {"seconds": 60.0, "evaluations": None, "seed": 0}


Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A cut of the layers ([S + 1] the first layer of each stage, and the number of layers), and the search for the
    schedule of its stages on their ranks."""

    cut: Cut
    synthesis: Synthesis

    @property
    def placement(self) -> StagePlacement:
        """[P] the stages of each rank."""
        return StagePlacement(self.synthesis.schedule.placement)

    @property
    def value(self) -> float:
        return self.synthesis.value


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSynthesis:
    """The result of `synthesize_jointly`.

    Arguments:
        found: the best few arrangements, the best one first.
        lower_bound: seconds that no cut, placement and schedule can beat.
        seconds, evaluations: that the search took.
    """

    found: tuple[Arrangement, ...]
    lower_bound: float
    seconds: float
    evaluations: int

    @property
    def best(self) -> Arrangement:
        return self.found[0]

    @property
    def gap(self) -> float:
        """(best value - lower bound) / lower bound: an upper bound of the possible improvement."""
        return max(0.0, self.best.value - self.lower_bound) / self.lower_bound


def synthesize_jointly(
    layers: Sequence[Layer],
    *,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | Sequence[float] | None = None,
    runtime: Costs | None = None,
    links: Links | None = None,
    starts: Sequence[tuple[Cut, Schedule]] = (),
    on_progress: Callable[[Progress], None] | None = None,
    **budget: float | None,
) -> JointSynthesis:
    """Search for the cut, the placement and the schedule of one flush batch that together take least.

    Stages may be on any ranks, any number of them on each. `chains` describes the search. With `evaluations` the result
    is the same on every machine, if `seconds` does not end it first.

    Arguments:
        layers: in the order of the chain.
        num_ranks: P.
        num_microbatches: M.
        memory_limit: most that a rank may hold, one number or one per rank, in the unit of `Layer.activation`; None: no
            limit.
        runtime: one number each of `latency` of a message between two ranks, `overhead` of each action,
            `message_overhead` of an action for each message that it receives or sends, and `norm`; all else of it is
            ignored.
        links: the network between ranks; messages have the sizes of `Layer.output`. Queueing is ignored.
        starts: cuts, each with a schedule of its stages. What is found is no slower than any that fits the memory.
        on_progress: called with each improvement of the chains.
        budget: `seconds=60.0`, approximate, of CPU time of this thread, so that other processes take nothing from it;
            `evaluations`, None: as many as there is time for; `seed=0`.

    Raises ValueError for arguments that do not fit, MemoryLimitError (a ValueError) if it finds no cut within the
    limit.

    >>> layers = [Layer(forward=f, input_grad=f, weight_grad=f) for f in (1, 1, 1, 1, 3)]
    >>> found = synthesize_jointly(layers, num_ranks=2, num_microbatches=4, evaluations=2000)
    >>> found.best.value, found.lower_bound
    (48.0, 42.5)
    """
    if unknown := sorted(budget.keys() - _BUDGET.keys()):
        raise TypeError(f"synthesize_jointly takes no {', '.join(unknown)}: expected some of {', '.join(_BUDGET)}")
    if not (isinstance(num_ranks, int | np.integer) and 1 <= num_ranks <= len(layers)):
        raise ValueError(f"num_ranks={num_ranks!r} for {len(layers)} layers: expected 1 to {len(layers)}")
    for name in ("input_grad", "weight_grad"):
        if not any(getattr(layer, name) > 0 for layer in layers):
            raise ValueError(
                f"{name}=0 of all {len(layers)} layers: expected more of one at least, such as half of each backward, "
                f"or plan(), whose 1f1b and interleaved run whole backwards"
            )
    for name in ("latency", "overhead", "message_overhead"):
        if isinstance(value := getattr(runtime or Costs(), name), Sequence):
            raise ValueError(f"runtime={name}={value!r:.40}: expected one number, of any stage")
    request = Request(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        costs=replace(runtime or Costs(), forward=1.0, backward=None, input_grad=None, weight_grad=None, update=0.0),
        memory_limit=None if memory_limit is None else numbers("memory_limit", memory_limit, num_ranks, "rank"),
        links=links,
    )
    replace(request, placement="plain", links=None, memory_limit=None).problem()  # refuses the rest
    search = _JointSearch(layers, request, Budget.read(**_BUDGET | budget), on_progress)  # type: ignore[arg-type]
    return search.run([_checked(cut, schedule, request, len(layers)) for cut, schedule in starts])


def _checked(cut: Cut, schedule: Schedule, request: Request, num_layers: int) -> tuple[Cut, Schedule]:
    """ValueError for a start of other layers, ranks or microbatches."""
    sizes = (request.num_ranks, request.num_microbatches, len(cut) - 1)
    given = (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages)
    if given != sizes or [cut[0], cut[-1]] != [0, num_layers] or sorted({*cut}) != [*cut]:
        raise ValueError(
            f"a start of cut={cut!r:.60} and {schedule!r}: expected the first layers of its stages and {num_layers} at "
            f"the end, {sizes[0]} ranks and {sizes[1]} microbatches"
        )
    return cut, schedule


class _OrderedCut(NamedTuple):
    """Orders of the stages of a cut, W included, and their value [s]."""

    value: float
    cut: Cut
    evaluator: OrderEvaluator
    orders: Orders

    @property
    def plain(self) -> tuple[Stages, Orders]:
        """Its stages and the order of their F and I."""
        problem = self.evaluator.problem
        weights = 2 * problem.num_stages * problem.num_microbatches
        orders = [[code for code in order if code < weights] for order in split(self.evaluator, self.orders)]
        return ([*self.cut], [*problem.rank_of]), orders


class _JointSearch:
    """The request is for stages of any layers."""

    def __init__(
        self,
        layers: Sequence[Layer],
        request: Request,
        budget: Budget,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        assert request.num_ranks is not None
        self.layers, self.request, self.budget, self.P = layers, request, budget, request.num_ranks
        limits = [math.inf] * self.P if request.memory_limit is None else list(request.memory_limit)  # type: ignore[arg-type]
        self.chain = LayerChain(
            layers,
            num_microbatches=request.num_microbatches,
            limits=limits,
            runtime=request.costs,
            links=request.links,
        )
        self.bound, self.random = self.chain.least_seconds(), Random(budget.seed)
        self.incumbent = Incumbent[object](budget, bound=self.bound, on_progress=on_progress)
        self.best: list[_OrderedCut] = []
        self.posed: dict[tuple[Cut, Placement], OrderEvaluator | None] = {}

    def run(self, starts: Sequence[tuple[Cut, Schedule]]) -> JointSynthesis:
        chains = ChainSearch(self.chain, self.incumbent, Random(self.budget.seed))
        for cut, schedule in starts:
            self._take(cut, schedule.placement, lambda evaluator, own=schedule: [evaluator.orders(own)])  # type: ignore[misc]
        until = self.budget.seconds * (_NAMED if self.budget.evaluations is None else 1.0)
        for boundaries, ranks in chains.even_stages():
            self._take(
                tuple(boundaries),
                self._placement(ranks),
                lambda e: (orders for _, orders in named_orders(e, seconds=until - self.incumbent.elapsed)),
            )
            if self.incumbent.is_over or self.incumbent.spent > _NAMED:
                break
        self._move(self.incumbent.spent + _FIRST)
        is_late = self.incumbent.is_over or (self.best and self.incumbent.spent >= _CHAINS)
        first = () if is_late else chains.starts([each.plain for each in self.best])
        for state in chains.run(first, _CHAINS):
            self._take(tuple(state.cut), self._placement(state.ranks), lambda _, own=state: [own.written])  # type: ignore[misc]
        self._move(_LAST)
        most = _SLID if self.incumbent.elapsed < self.budget.seconds else 1
        states = [(each.cut, each.evaluator.schedule(each.orders)) for each in self.best[:most]]
        if not states:
            raise MemoryLimitError(
                f"memory_limit={self.request.memory_limit}: no cut of {len(self.layers)} layers on {self.P} ranks was "
                f"found within it, for one microbatch; expected at least {self._smallest_memory():g}"
            )
        found, incumbent, many = list[Arrangement](), self.incumbent, None
        if self.budget.evaluations is not None:
            many = max(1, (self.budget.evaluations - incumbent.evaluations) // len(states))
        for number, (cut, schedule) in enumerate(states):
            seconds = max(0.0, self.budget.seconds - incumbent.elapsed) / (len(states) - number)
            budget = replace(self.budget, seconds=seconds, evaluations=many)
            polished = solve(self._request_for(cut, schedule.placement), budget, start=schedule)
            found.append(Arrangement(cut=cut, synthesis=polished))
            incumbent.evaluations += found[-1].synthesis.evaluations
        return JointSynthesis(
            found=tuple(sorted(found, key=lambda each: each.value)),
            lower_bound=self.bound,
            seconds=incumbent.elapsed,
            evaluations=incumbent.evaluations,
        )

    # --- cuts that move while actions stay where they are, and slides ---

    def _move(self, end: float) -> None:
        """Move cuts of the best orders, and actions of the best of these, until so much of the budget is spent."""
        while self.best and self.incumbent.spent < end and not self.incumbent.is_over:
            state = self.best[min(int(self.random.expovariate(1.0)), len(self.best) - 1)]
            least = {state.cut: state}
            for each in sorted(self._near(state, end), key=lambda each: each.value):
                least.setdefault(each.cut, each)
            for each in sorted(least.values(), key=lambda each: each.value)[:_SLID]:
                self._slide(each, end)

    def _near(self, state: _OrderedCut, end: float) -> Iterator[_OrderedCut]:
        """Its orders on cuts near its own, as they are where that fits, and at times with W anew; by bounds of cuts;
        none after `end`."""
        random, problem, P = self.random, state.evaluator.problem, self.P
        ranks, most = [*problem.rank_of], problem.num_stages * self.chain.M

        def bound(cut: Cut) -> tuple[float, Cut]:
            loads = self.chain.loads(([*cut], ranks))
            return (max(loads) + 0.3 * sum(loads) / P) * (1.0 + 0.01 * random.random()), cut

        cuts = {self._shifted(state.cut) for _ in range(_DRAWN)}
        for cut in sorted(sorted(cuts), key=bound)[:_PLAYED]:
            if self.incumbent.spent >= end:
                break
            if (evaluator := self._evaluator(cut, problem.placement)) is None:
                continue
            if evaluator.fits(state.orders):
                yield self._played(cut, evaluator, state.orders)
            fill = random.choice((None, None, None, 0.4, 0.6, 1.0))
            if fill and (made := refill(evaluator, state.plain[1], fill=(fill,) * P, backlog=(most,) * P)) is not None:
                yield self._played(cut, evaluator, made)

    def _shifted(self, cut: Cut) -> Cut:
        new = [*cut]
        for _ in range(self.random.choice((1, 2, 2, 3))):
            shift(new, int(self.random.random() * len(new)), self.random.choice((-1, 1)))
        return tuple(new)

    def _played(self, cut: Cut, evaluator: OrderEvaluator, orders: Orders) -> _OrderedCut:
        self.incumbent.evaluations += 1
        return _OrderedCut(evaluator.value(orders), cut, evaluator, orders)

    def _slide(self, state: _OrderedCut, end: float) -> None:
        slides = SlideSearch(state.evaluator)
        for found in slides.anneal(state.orders, self.random, steps=_SLIDES, hot=_HOT, cold=_HOT / 30):
            self.incumbent.evaluations += 1
            if found is not None and found[0] < state.value:
                state = state._replace(value=found[0], orders=found[1])
            if self.incumbent.is_over or self.incumbent.spent >= end:
                break
        self._keep(state)

    def _take(self, cut: Cut, placement: Placement, named: Callable[[OrderEvaluator], Iterable[Orders]]) -> None:
        """Orders that fit, also with each B as I and W."""
        if (evaluator := self._evaluator(cut, placement)) is not None:
            for orders in filter(evaluator.fits, named(evaluator)):
                for each in (orders, split(evaluator, orders)):
                    self._keep(self._played(cut, evaluator, each))

    def _keep(self, state: _OrderedCut) -> None:
        if all(state.value != other.value for other in self.best):
            self.best = sorted([*self.best, state], key=lambda each: each.value)[:_BEST]
            self.incumbent.offer(state.value, state, "cuts")

    # --- problems ---

    def _evaluator(self, cut: Cut, placement: Placement) -> OrderEvaluator | None:
        """None where nothing fits the memory."""
        if (cut, placement) not in self.posed:
            if len(self.posed) >= _POSED:
                self.posed.clear()
            self.posed[cut, placement] = None
            with suppress(MemoryLimitError):
                self.posed[cut, placement] = OrderEvaluator(self._request_for(cut, placement).problem())
        return self.posed[cut, placement]

    def _placement(self, ranks: Sequence[int]) -> Placement:
        return tuple(tuple(s for s, own in enumerate(ranks) if own == rank) for rank in range(self.P))

    def _request_for(self, cut: Cut, placement: Placement) -> Request:
        given, S, ranks = self.request, len(cut) - 1, StagePlacement(placement).rank_of
        tables = self.chain.tables(([*cut], [*ranks]), [1.0] * self.P)
        if min(tables.rooms) < 0.0:
            raise MemoryLimitError(f"memory_limit={given.memory_limit}: expected more than the weights of a rank alone")
        groups = [self.layers[start:end] for start, end in pairwise(cut)]
        hops = [0, *(int(a != b) for a, b in pairwise(ranks)), 0]
        columns = ("forward", "input_grad", "weight_grad", "update")
        whole = [math.fsum(each.both for each in own) for own in groups]
        costs = replace(
            given.costs,
            **{name: [math.fsum(getattr(each, name) for each in own) for own in groups] for name in columns},  # type: ignore[arg-type]
            backward=whole,
            message_overhead=[self.chain.message * sum(both) for both in pairwise(hops)],
        )
        limit: list[float] | None = None
        if given.memory_limit is not None:
            rooms = zip(tables.rooms, self.chain.limits, given.memory_limit, strict=True)  # type: ignore[arg-type]
            limit = [max(0.0, room - rounded + exact) for room, rounded, exact in rooms]
        sizes = [self.chain.output[at] for at in cut[1:-1]]
        return replace(
            given,
            costs=costs,
            placement=placement,
            memory_limit=limit,
            activations=tuple(tables.held),
            links=None if given.links is None or S == 1 else replace(given.links, activation_bytes=sizes),
        )

    def _smallest_memory(self) -> float:
        """The least limit, equal for all ranks, that fits one microbatch with one stage per rank."""
        need, L = self.chain.need, len(self.layers)
        best: list[float] = [need[end] + self.chain.output[end] for end in range(L + 1)]
        for _ in range(1, self.P):
            best = [
                min(
                    (max(best[at], need[end] - need[at] + self.chain.output[end]) for at in range(1, end)),
                    default=math.inf,
                )
                for end in range(L + 1)
            ]
        return best[L]

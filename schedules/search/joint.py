"""`synthesize_jointly`: the cut of a chain of layers, the placement of its stages and their schedule at once."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import accumulate, combinations, pairwise
from random import Random
from typing import cast

import numpy as np

from ..ir import Schedule
from ..kinds import at_least, option
from ..orders.problem import MemoryLimitError, Objective, fits
from ..placement import StagePlacement, place
from ..timing.costs import Costs
from .bounds import problem_bound
from .chains import ChainSearch
from .incumbent import Budget
from .request import ANY, Cut, Request, numbers
from .synthesize import Synthesis, solve

_PROBE = 8  # a cut is first tried with one in so many evaluations
_BOUNDS = 20  # bounds that are evaluated for each cut that may be tried
_FEW = 16  # evaluations for the start of chains
_FINALS = 4  # cuts that then have all evaluations
_COUNTS = {"cuts": 60, "evaluations": 400}  # where only one of them is given
_BUDGET = {"seconds": 60.0, "seed": 0}
_NEARBY = 0.1  # part of the time for cuts near the first ones, if chains follow
_POLISH = 0.1  # part of the time reserved for the orders of the chains' results
_CLOSE = 1e-9  # relative distance of a bound below the best value that is not worth trying


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a chain, which is not cut further.

    Arguments:
        forward, input_grad, weight_grad: F, I and W of one microbatch [s].
        activation: memory from its forward until the end of its W, in the unit of the memory limit.

    Raises ValueError for anything but finite numbers of at least 0, and for a forward of 0.
    """

    forward: float
    input_grad: float
    weight_grad: float
    activation: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (isinstance(value, int | float | np.number) and 0 <= value < math.inf):
                raise ValueError(f"{each.name}={value!r} of a layer: expected a finite number, at least 0")
        if self.forward == 0:
            raise ValueError("forward=0 of a layer: expected more than 0 seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A cut of the layers ([S + 1] the first layer of each stage, and the number of layers), the placement of its
    stages by name, or the stages of each rank, and the search for their schedule."""

    cut: Cut
    placement: str | StagePlacement
    synthesis: Synthesis

    @property
    def value(self) -> float:
        return self.synthesis.value


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSynthesis:
    """A choice that `synthesize_jointly` found.

    Arguments:
        best: cut, placement and schedule chosen together.
        separate: partition first, schedule after: on each placement the cut whose largest stage is smallest, with the
            same evaluations for its schedule; the best of these.
        cuts_tried: (cut, placement) pairs for which schedules were searched.
        lower_bound: seconds that no cut, placement and schedule can beat.
    """

    best: Arrangement
    separate: Arrangement
    cuts_tried: int
    lower_bound: float

    @property
    def gain(self) -> float:
        """How much longer partition first takes, relative to the best value; never below 0."""
        return self.separate.value / self.best.value - 1.0

    @property
    def gap(self) -> float:
        """(best value - lower bound) / lower bound: an upper bound of the possible improvement."""
        return max(0.0, self.best.value - self.lower_bound) / self.lower_bound


def synthesize_jointly(
    layers: Sequence[Layer],
    *,
    num_ranks: int,
    num_microbatches: int,
    latency: float = 0.0,
    memory_limit: float | Sequence[float] | None = None,
    placements: Sequence[str] = ("plain", "cyclic", "v", "any"),
    objective: Objective = "makespan",
    **budget: float,
) -> JointSynthesis:
    """Search for the cut, the placement and the schedule of one flush batch that together take least.

    On each placement it schedules the cut whose largest stage is smallest. From there it moves one or two boundaries by
    one layer, and tries next the cut with the most promising lower bound; cuts whose bound is not below the best value
    are skipped. The best cuts then have as many evaluations as the first ones. With "any" it continues among all cuts
    and placements, also with unequal numbers of stages per rank (see `chains`). With counts the result is the same on
    every machine, if `seconds` does not end it first.

    Arguments:
        layers: in the order of the chain.
        num_ranks: P.
        num_microbatches: M.
        latency: of a message between two ranks [s].
        memory_limit: most that a rank may hold, one number or one per rank, in the unit of `Layer.activation`; None: no
            limit.
        placements: to choose from: "plain", "cyclic" (two stages per rank), "v", "any".
        objective: "makespan" or "span".
        budget: `seconds=60.0`, approximate (wall clock); `cuts`, (cut, placement) pairs tried besides the first ones,
            and `evaluations`, orders for the schedule of each first cut and of the most promising others, their product
            under "any": 60 and 400 if only one is given; if neither is, "any" runs until the time is over; `seed=0`.

    Raises ValueError for arguments that do not fit, MemoryLimitError (a ValueError) if it finds no cut within the
    limit.

    >>> layers = [Layer(forward=f, input_grad=f, weight_grad=f) for f in (1, 1, 1, 1, 3)]
    >>> found = synthesize_jointly(layers, num_ranks=2, num_microbatches=4, placements=["plain"])
    >>> found.best.cut, found.best.value, found.gain
    ((0, 4, 5), 48.0, 0.0625)
    """
    known = _COUNTS | _BUDGET
    if unknown := sorted(budget.keys() - known.keys()):
        raise TypeError(f"synthesize_jointly takes no {', '.join(unknown)}: expected some of {', '.join(known)}")
    cuts, evaluations, seconds, seed = (known | budget).values()
    cuts = option("cuts", cuts, at_least(1, "a whole number above 0"))
    evaluations = option("evaluations", evaluations, at_least(1, "a whole number above 0"))
    if not (isinstance(num_ranks, int | np.integer) and 1 <= num_ranks <= len(layers)):
        raise ValueError(f"num_ranks={num_ranks!r} for {len(layers)} layers: expected 1 to {len(layers)}")
    if not placements or isinstance(placements, str):
        raise ValueError(f"placements={placements!r}: expected at least one name, such as ['plain', 'v']")
    request = Request(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        costs=Costs(
            forward=[layer.forward for layer in layers],
            input_grad=[layer.input_grad for layer in layers],
            weight_grad=[layer.weight_grad for layer in layers],
            latency=latency,
        ),
        memory_limit=memory_limit,
        objective=objective,
        activations=tuple(layer.activation for layer in layers),
    )
    search = _CutSearch(layers, request, Budget.read(seconds=seconds, evaluations=evaluations, seed=seed))
    return search.run(tuple(dict.fromkeys(placements)), cuts, bool(budget.keys() & _COUNTS.keys()))


class _CutSearch:
    """A search among cuts. The request is for stages of one layer each, without a placement; the budget has the seconds
    of all searches, and the evaluations of one schedule."""

    def __init__(self, layers: Sequence[Layer], request: Request, budget: Budget) -> None:
        assert request.num_ranks is not None
        num_ranks = self.num_ranks = request.num_ranks
        self.layers, self.request, self.budget = layers, request, budget
        self.pieces = request.pieces()
        self.until = time.monotonic() + budget.seconds
        self.evaluations = budget.evaluations or 1
        limit = request.memory_limit
        self.limits = (math.inf,) * num_ranks if limit is None else numbers("memory_limit", limit, num_ranks, "rank")
        columns = ((each.forward, each.input_grad, each.weight_grad, each.activation) for each in layers)
        self.sums: list[list[float]] = [list(accumulate(column, initial=0.0)) for column in zip(*columns, strict=True)]
        self.work: list[float] = [sum(each) for each in zip(*self.sums[:3], strict=True)]
        self.found: dict[tuple[str | StagePlacement, Cut], Synthesis] = {}

    def run(self, placements: Sequence[str], cuts: int, is_counted: bool) -> JointSynthesis:
        starts = []
        for name in [name for name in placements if name != ANY] or ["plain"]:
            cut = self.first_cut(name)
            if cut is not None:
                self.schedule(name, cut, self.evaluations)
                starts.append((name, cut))
        if not starts:
            raise MemoryLimitError(
                f"memory_limit={self.request.memory_limit}: no cut of {len(self.layers)} layers on {self.num_ranks} "
                f"ranks was found within it, for one microbatch; expected at least {self.smallest_memory():g}"
            )
        separate = self.best()
        may_go_on = ANY in placements and len(self.layers) > self.num_ranks > 1
        until = self.until - (1.0 - _NEARBY) * self.budget.seconds * (may_go_on and not is_counted)
        bounds = self.explore(starts, cuts, until)
        tried = sorted((key for key in bounds if key in self.found), key=lambda key: self.found[key].value)
        for name, cut in tried[: _FINALS + len(starts)]:
            if (name, cut) not in starts and self.promises(bounds[name, cut]) and time.monotonic() < until:
                self.schedule(name, cut, self.evaluations)
        cuts_tried = len(self.found)
        layers = [[getattr(each, name) for each in self.layers] for name in Layer.__slots__]
        chains = ChainSearch(layers, self.request, self.limits, Random(self.budget.seed))
        if may_go_on:
            self.anywhere(chains, cuts * self.evaluations if is_counted else None)
        bound = self.cut_bound()
        return JointSynthesis(best=self.best(), separate=separate, cuts_tried=cuts_tried, lower_bound=bound)

    def anywhere(self, chains: ChainSearch, most: int | None) -> None:
        """Chains from three stages per rank, or the best so far if these do not fit; then orders for their results."""
        best = self.best()
        start = best.cut, best.synthesis
        chunks = min(3, len(self.layers) // self.num_ranks)
        cut = self.even_cut(placed := place("cyclic", num_ranks=self.num_ranks, num_chunks=chunks))
        if cut is not None and chunks > 1:
            with suppress(MemoryLimitError):
                start = cut, solve(self.asked(placed, cut), replace(self.budget, evaluations=_FEW))
        until = self.until - _POLISH * self.budget.seconds

        def is_over() -> bool:
            return (most is not None and chains.played >= most) or time.monotonic() >= until

        cut, synthesis = start
        elites = chains.run(cut, synthesis.problem, synthesis.schedule, is_over)
        for number, (cut, placed, schedule) in enumerate(elites):
            if number and time.monotonic() >= self.until:
                break
            many = self.evaluations if most is not None else None
            self.schedule(placed, cut, many, start=schedule, searches=len(elites) - number)

    def explore(self, starts: Sequence[tuple[str, Cut]], cuts: int, until: float) -> dict[tuple[str, Cut], float]:
        """Try neighbours of cuts that were tried, in the order of their promise; returns their lower bounds.

        The expected value of a cut is its bound times the value-to-bound ratio of the last tried cut on the path to it.
        Cuts whose bound is not below the best value are not tried, but may lead to others.
        """
        bounds = {key: self.bound(*key) for key in starts}
        waiting = [(self.found[key].value, *key, 1.0) for key in starts]
        heapq.heapify(waiting)
        most = len(self.found) + cuts
        while waiting and len(self.found) < most and len(bounds) < _BOUNDS * cuts and time.monotonic() < until:
            _, name, cut, above = heapq.heappop(waiting)
            if (name, cut) not in self.found and self.promises(bounds[name, cut]):
                self.schedule(name, cut, max(1, self.evaluations // _PROBE))
            if (name, cut) in self.found:
                above = self.found[name, cut].value / bounds[name, cut]
            for other in _neighbours(cut):
                if time.monotonic() >= until:
                    break
                if (name, other) not in bounds and self.excess(name, other) == 0:
                    bounds[name, other] = bound = self.bound(name, other)
                    heapq.heappush(waiting, (bound * above, name, other, above))
        return bounds

    def cut_bound(self) -> float:
        """Seconds that nothing can beat: the r-th rank to start has the forwards of r layers before it."""
        P, M, is_span = self.num_ranks, self.request.num_microbatches, self.request.objective == "span"
        F, latency = self.sums[0], cast(float, self.request.costs.latency)
        heads = [0.0 if is_span else F[r] + r * latency for r in range(P)]
        alone = (M * (b - a) + (0.0 if is_span else f) for (a, b), f in zip(pairwise(self.work), F))  # noqa: B905
        return max((M * self.work[-1] + sum(heads)) / P, *alone)

    def promises(self, bound: float) -> bool:
        return bound < self.best().value * (1.0 - _CLOSE)

    def best(self) -> Arrangement:
        (placement, cut), found = min(self.found.items(), key=lambda pair: pair[1].value)
        return Arrangement(cut=cut, placement=placement, synthesis=found)

    # --- one cut ---

    def asked(self, placement: str | StagePlacement, cut: Cut) -> Request:
        return replace(self.pieces.joined(cut), placement=placement)

    def bound(self, name: str, cut: Cut) -> float:
        return problem_bound(self.asked(name, cut).problem())

    def schedule(
        self,
        placement: str | StagePlacement,
        cut: Cut,
        evaluations: int | None,
        *,
        start: Schedule | None = None,
        searches: int = 1,
    ) -> None:
        """Search for the schedule of a cut, the first of `searches` remaining ones; keeps the better result."""
        seconds = max(0.0, (self.until - time.monotonic()) / searches)
        budget = replace(self.budget, seconds=seconds, evaluations=evaluations)
        request = self.asked(placement, cut)
        found = solve(request, budget) if start is None else solve(request, budget, start=start)
        before = self.found.get((placement, cut))
        if before is None or found.value < before.value:
            self.found[placement, cut] = found

    def excess(self, name: str, cut: Cut) -> float:
        held = [self.sums[3][end] - self.sums[3][start] for start, end in pairwise(cut)]
        ranks = place(name, num_ranks=self.num_ranks)
        needed = [math.fsum(held[s] for s in own) for own in ranks]
        pairs = zip(needed, self.limits, strict=True)
        return math.fsum(need - limit for need, limit in pairs if not fits(need, limit))

    # --- the first cut ---

    def first_cut(self, name: str) -> Cut | None:
        """The cut whose largest stage is smallest, then the most even one; moved until it fits the memory."""
        placement = place(name, num_ranks=self.num_ranks)
        if sum(map(len, placement)) > len(self.layers):
            return None
        cut = self.even_cut(placement)
        while cut is not None and (excess := self.excess(name, cut)) > 0:
            nearest = min(_neighbours(cut), key=lambda other: (self.excess(name, other), other), default=cut)
            cut = nearest if self.excess(name, nearest) < excess else None
        return cut

    def even_cut(self, placement: StagePlacement) -> Cut | None:
        """The cut with the least largest stage, then the least sum of squares, in which each stage fits its rank's
        memory.

        Dynamic programme over boundaries: f[s, e], the best value of the first s stages if they end at layer e, is the
        best over the start b of the last stage of max(f[s-1, b], work(b, e)); then of f[s-1, b] + work(b, e)^2. O(S
        L^2).
        """
        rank_of = placement.rank_of
        work, held, limits = self.work, self.sums[3], self.limits
        L, S = len(self.layers), len(rank_of)

        def least(power: float) -> tuple[float, Cut] | None:
            """By the largest stage; or, if `power` limits it, by the sum of squares."""
            best: dict[int, tuple[float, Cut]] = {0: (0.0, (0,))}
            for stage in range(S):
                ends: dict[int, tuple[float, Cut]] = {}
                for start, (value, cut) in best.items():
                    for end in range(start + 1, L - (S - 1 - stage) + 1):
                        seconds = work[end] - work[start]
                        if not fits(held[end] - held[start], limits[rank_of[stage]]) or seconds > power:
                            break
                        new = max(value, seconds) if power == math.inf else value + seconds**2
                        if end not in ends or (new, (*cut, end)) < ends[end]:
                            ends[end] = new, (*cut, end)
                best = ends
            return best.get(L)

        largest = least(math.inf)
        found = None if largest is None else least(largest[0] * (1.0 + _CLOSE))
        return None if found is None else found[1]

    def smallest_memory(self) -> float:
        """The least limit, equal for all ranks, that fits one microbatch with one stage per rank."""
        held, L = self.sums[3], len(self.layers)
        best: list[float] = [held[end] for end in range(L + 1)]
        for _ in range(1, self.num_ranks):
            best = [
                min((max(best[start], held[end] - held[start]) for start in range(1, end)), default=math.inf)
                for end in range(L + 1)
            ]
        return best[L]


def _neighbours(cut: Cut) -> Iterator[Cut]:
    inner = range(1, len(cut) - 1)
    moves: list[tuple[tuple[int, int], ...]] = [((at, by),) for at in inner for by in (-1, 1)]
    moves += [((a, i), (b, j)) for a, b in combinations(inner, 2) for i in (-1, 1) for j in (-1, 1)]
    for move in moves:
        new = list(cut)
        for at, by in move:
            new[at] += by
        if all(start < end for start, end in pairwise(new)):
            yield tuple(new)

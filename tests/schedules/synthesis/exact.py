"""Small problems to the optimum: a mixed integer program for scipy's HiGHS.

    start(a) for each action; one binary a pair of actions of a rank whose order is open
    start(b) >= start(a) + seconds(a) + delay        a before b, by the chain, by order, by memory
    the same, less a large number where b goes first  pairs that are open
    at each forward of a rank: what is held by then <= its limit

Microbatches that are alike keep their order (see `bounds`: nothing is lost by it). Where all are, and each rank has one
stage that frees all at W, memory is precedence alone: W(s, k) before F(s, k + n) if n activations fit. An order that is
known leaves each action a window; pairs that fit into theirs in one way are decided before HiGHS is asked. It takes
seconds up to some 150 open pairs (P = 3, M = 6): an oracle, and no way to plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from support.inside import SPLIT_OPS, Orders, Problem, fits
from support.inside import SynthesisEvaluateEvaluator as Evaluator
from support.inside import bounds_least_seconds as least_seconds

from stagewright.schedules import Action, Op, Schedule

_CLOSE = 1e-9  # relative: windows leave so much for rounding
_EQUAL = 1e-6  # relative: HiGHS keeps constraints that well, and values within it are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The best order that was found.

    Arguments:
        schedule: None where nothing was found in time, and no order was given.
        seconds: its objective [s]; infinite without a schedule.
        lower_bound: seconds that no order can beat.
        proven: whether the two are equal, so that it is the optimum.
    """

    schedule: Schedule | None
    seconds: float
    lower_bound: float
    proven: bool


def solve_exactly(problem: Problem, *, seconds: float = 60.0, known: Orders | None = None) -> Exact:
    """The optimum of a small problem, or the best order and bound that there were in time.

    Arguments:
        seconds: after which it stops.
        known: an order, to begin from (`Evaluator.orders`): nothing worse is looked at.

    Raises ValueError where a whole backward (B), which it never takes, is quicker than I and W, and for a time of 0 or
    less; MemoryLimitError where no order fits the memory.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r}: expected more than 0")
    for rows in zip(*(problem.seconds[op] for op in (Op.I, Op.W, Op.B)), strict=True):
        if any(b < (i + w) * (1 - _CLOSE) for i, w, b in zip(*rows, strict=True)):
            raise ValueError("a backward is quicker than its input_grad and weight_grad: expected their sum at least")
    bound = least_seconds(problem)
    evaluator = Evaluator(problem)
    best = _sequential(evaluator) if known is None else known
    value = evaluator.value(best)
    if value > bound * (1 + _EQUAL):
        found, dual = _Program(problem, evaluator, value, bound).solve(seconds)
        bound = max(bound, dual)
        if found is not None and (other := evaluator.value(found)) < value:
            best, value = found, other
    return Exact(
        schedule=evaluator.schedule(best, name="exact"),
        seconds=value,
        lower_bound=min(bound, value),
        proven=value <= bound * (1 + _EQUAL),
    )


def _sequential(evaluator: Evaluator) -> Orders:
    """One microbatch after the other: it fits whatever can."""
    problem = evaluator.problem
    orders: Orders = [[] for _ in problem.placement]
    for k in range(problem.num_microbatches):
        for s, rank in enumerate(problem.rank_of):
            orders[rank].append(evaluator.code(Op.F, s, k))
        for s, rank in reversed(list(enumerate(problem.rank_of))):
            orders[rank] += [evaluator.code(Op.I, s, k), evaluator.code(Op.W, s, k)]
    return orders


class _Edge(NamedTuple):
    """Action `before` ends `delay` seconds before `after` starts, at least; both by number."""

    before: int
    after: int
    delay: float


class _Program:
    """Variables: a start an action, a binary an open pair, the objective, the first start and the last end a rank."""

    def __init__(self, problem: Problem, evaluator: Evaluator, value: float, bound: float) -> None:
        self.problem, self.evaluator, self.value, self.least = problem, evaluator, value, bound
        S, M = problem.num_stages, problem.num_microbatches
        self.actions = [Action(s, op, k) for op in SPLIT_OPS for s in range(S) for k in range(M)]
        self.number = {action: at for at, action in enumerate(self.actions)}
        self.length = np.array([problem.seconds[op][s][k] for s, op, k in self.actions])
        self.by_rank = [[n for n, a in enumerate(self.actions) if a.stage in own] for own in problem.placement]
        self.update = [math.fsum(problem.update[s] for s in own) for own in problem.placement]
        self.edges = self._chain() + self._in_order() + (self._by_memory() if problem.same_microbatches else [])
        # One stage a rank, alike microbatches, all freed at W: order says it all.
        self.rows_for_memory = problem.memory_limit is not None and not (
            problem.same_microbatches and problem.num_stages == problem.num_ranks and problem.held == problem.kept
        )
        horizon = float(self.length.sum()) + M * (sum(problem.forward_delay) + sum(problem.gradient_delay))
        self.horizon = horizon + sum(self.update) + (problem.norm or 0.0)
        self._decide()

    # --- what must come before what ---

    def _edge(self, before: Action, after: Action, delay: float = 0.0) -> _Edge:
        return _Edge(self.number[before], self.number[after], delay)

    def _chain(self) -> list[_Edge]:
        problem, edges = self.problem, []
        for s in range(problem.num_stages):
            for k in range(problem.num_microbatches):
                F, I, W = (Action(s, op, k) for op in SPLIT_OPS)
                edges += [self._edge(F, I), self._edge(I, W)]
                if s:
                    edges.append(self._edge(Action(s - 1, Op.F, k), F, problem.forward_delay[s - 1]))
                    edges.append(self._edge(I, Action(s - 1, Op.I, k), problem.gradient_delay[s]))
        return edges

    def _in_order(self) -> list[_Edge]:
        """Constraints between microbatches that are alike."""
        problem = self.problem
        tables = (*(problem.seconds[op] for op in SPLIT_OPS), problem.held, problem.kept)
        newest: dict[tuple[float, ...], int] = {}
        edges = []
        for k in range(problem.num_microbatches):
            like = tuple(row[k] for table in tables for row in table)
            if like in newest:
                for s in range(problem.num_stages):
                    edges += [self._edge(Action(s, op, newest[like]), Action(s, op, k)) for op in SPLIT_OPS]
            newest[like] = k
        return edges

    def _by_memory(self) -> list[_Edge]:
        """F(s, k) behind the I and W that must have freed some, in order and however much other stages leave."""
        problem = self.problem
        limits, M = problem.memory_limit, problem.num_microbatches
        edges: list[_Edge] = []
        for s, rank in enumerate(problem.rank_of) if limits is not None else ():
            assert limits is not None
            held, kept = problem.held[s][0], problem.kept[s][0]
            for amount, op in ((held, Op.I), (kept, Op.W)):
                # In front of the newest, which holds `held`, at most so many that hold `amount`.
                number = 1 + sum(fits(held + count * amount, limits[rank]) for count in range(1, M))
                edges += [self._edge(Action(s, op, k - number), Action(s, Op.F, k)) for k in range(number, M)]
        return edges

    def _decide(self) -> None:
        """Windows of all actions, and the order of pairs of a rank which they leave open."""
        while True:
            before = self._closure()
            head, latest = self._windows()
            self.head, self.latest = head, latest
            self.pairs = []
            decided: list[_Edge] = []
            for own in self.by_rank:
                for at, a in enumerate(own):
                    for b in own[at + 1 :]:
                        if before[a, b] or before[b, a]:
                            continue
                        a_first, b_first = self._may_go_first(a, b), self._may_go_first(b, a)
                        if a_first and b_first:
                            self.pairs.append((a, b))
                        else:  # where neither may, there is nothing better, and HiGHS will say so
                            decided.append(_Edge(a, b, 0.0) if a_first else _Edge(b, a, 0.0))
            self.before = before
            if not decided:
                return
            self.edges += decided

    def _may_go_first(self, a: int, b: int) -> bool:
        return bool(self.head[a] + self.length[a] <= self.latest[b] + _CLOSE * self.horizon)

    def _closure(self) -> NDArray[np.bool_]:
        number = len(self.actions)
        before = np.zeros((number, number), dtype=bool)
        self.order = self._sorted()
        followers: list[list[int]] = [[] for _ in range(number)]
        for edge in self.edges:
            followers[edge.before].append(edge.after)
        for a in reversed(self.order):
            for b in followers[a]:
                before[a] |= before[b]
                before[a, b] = True
        return before

    def _sorted(self) -> list[int]:
        """Actions so that edges lead forwards."""
        waits = [0] * len(self.actions)
        followers: list[list[int]] = [[] for _ in self.actions]
        for edge in self.edges:
            waits[edge.after] += 1
            followers[edge.before].append(edge.after)
        ready = [a for a, count in enumerate(waits) if not count]
        for a in ready:
            for b in followers[a]:
                waits[b] -= 1
                if not waits[b]:
                    ready.append(b)
        return ready

    def _windows(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Earliest and latest start of each action in orders that are no worse than the one that is known."""
        number = len(self.actions)
        head = np.zeros(number)
        into: list[list[_Edge]] = [[] for _ in range(number)]
        out: list[list[_Edge]] = [[] for _ in range(number)]
        for edge in self.edges:
            into[edge.after].append(edge)
            out[edge.before].append(edge)
        for a in self.order:
            head[a] = max((head[e.before] + self.length[e.before] + e.delay for e in into[a]), default=0.0)
        latest = np.full(number, self.horizon) - self.length
        problem = self.problem
        if problem.norm is None:
            ends = self._latest_ends(head)
            for a in reversed(self.order):
                by_rank = ends[problem.rank_of[self.actions[a].stage]]
                after = min((latest[e.after] - e.delay for e in out[a]), default=math.inf)
                latest[a] = min(by_rank, after) - self.length[a]
        return head, latest

    def _latest_ends(self, head: NDArray[np.float64]) -> list[float]:
        """By rank, when its last action must have ended in an order that is no worse."""
        problem = self.problem
        value = self.value * (1 + _CLOSE)
        if problem.objective == "makespan":
            return [value - update for update in self.update]
        first_of = [min(own) for own in problem.placement]
        ends = []
        for rank, update in enumerate(self.update):
            stage = first_of[rank]
            known = problem.same_microbatches and all(first_of[problem.rank_of[s]] == s for s in range(stage))
            start = head[self.number[Action(stage, Op.F, 0)]] if known else 0.0 if stage == 0 else math.inf
            ends.append(min(self.horizon, start + value - update))
        return ends

    # --- the program ---

    def solve(self, seconds: float) -> tuple[Orders | None, float]:
        """The best order, and seconds that none can beat."""
        rows = _Rows()
        number, pairs, P = len(self.actions), len(self.pairs), self.problem.num_ranks
        self.goal = number + pairs
        self.firsts = range(self.goal + 1, self.goal + 1 + P)
        self.lasts = range(self.goal + 1 + P, self.goal + 1 + 2 * P)
        self.binary = {pair: number + at for at, pair in enumerate(self.pairs)}
        for a, b, delay in self.edges:
            rows.add({b: 1.0, a: -1.0}, self.length[a] + delay)
        for (a, b), x in self.binary.items():  # x: a goes first
            large = self.latest[a] + self.length[a] - self.head[b]
            rows.add({b: 1.0, a: -1.0, x: -large}, self.length[a] - large)
            large = self.latest[b] + self.length[b] - self.head[a]
            rows.add({a: 1.0, b: -1.0, x: large}, self.length[b])
        for rank in range(P):
            self._add_rank(rows, rank)
        low = np.concatenate([self.head, np.zeros(pairs), [self.least], np.zeros(2 * P)])
        high = np.concatenate([self.latest, np.ones(pairs), np.full(1 + 2 * P, self.horizon)])
        high[self.goal] = max(self.value * (1 + _CLOSE), self.least)
        found = milp(
            np.eye(1, len(low), self.goal)[0],
            integrality=np.concatenate([np.zeros(number), np.ones(pairs), np.zeros(1 + 2 * P)]),
            bounds=Bounds(low, np.maximum(low, high)),
            constraints=rows.constraint(len(low)),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        dual = found.fun if found.status == 0 else getattr(found, "mip_dual_bound", None)
        if found.status == 2:  # none is better than the one that is known
            dual = self.value
        least = self.least if dual is None or not math.isfinite(dual) else float(dual)
        return None if found.x is None else self._orders(found.x), least

    def _add_rank(self, rows: _Rows, rank: int) -> None:
        """Its part of the objective, and its memory."""
        problem, own = self.problem, self.by_rank[rank]
        first, last = self.firsts[rank], self.lasts[rank]
        for a in own:
            rows.add({last: 1.0, a: -1.0}, self.length[a])
        together = problem.norm is not None and (problem.norm > 0 or any(problem.update))
        more = self.update[rank] + (problem.norm or 0.0 if together else 0.0)
        counted = self.lasts if together else (last,)
        start = {first: 1.0} if problem.objective == "span" else {}
        for each in counted:
            rows.add({self.goal: 1.0, each: -1.0, **start}, more)
        if problem.objective == "span":
            self._add_first(rows, rank, first)
        if self.rows_for_memory:
            for a in own:
                if self.actions[a].op is Op.F:
                    self._add_memory(rows, rank, a)

    def _add_first(self, rows: _Rows, rank: int, first: int) -> None:
        """A rank's first action starts as soon as its input is there, as in a simulation."""
        stage = min(self.problem.placement[rank])
        for k in range(self.problem.num_microbatches):
            opening = self.number[Action(stage, Op.F, k)]
            rows.add({opening: 1.0, first: -1.0}, 0.0)
            # start <= arrival, unless something goes before it on the rank
            coefficients, constant = {opening: -1.0}, 0.0
            if stage:
                made = self.number[Action(stage - 1, Op.F, k)]
                coefficients[made] = 1.0
                constant = -self.length[made] - self.problem.forward_delay[stage - 1]
            for each, weight in self._those_before(opening, rank):
                if each is None:
                    constant -= weight * self.horizon
                else:
                    coefficients[each] = coefficients.get(each, 0.0) + weight * self.horizon
            rows.add(coefficients, constant)

    def _those_before(
        self, action: int, rank: int, weights: Sequence[float] | None = None
    ) -> list[tuple[int | None, float]]:
        """The number of actions of a rank in front of one, each times its weight: (binary or None, factor)."""
        found: list[tuple[int | None, float]] = []
        for other in self.by_rank[rank]:
            weight = 1.0 if weights is None else weights[other]
            if other == action or not weight:
                continue
            if self.before[other, action]:
                found.append((None, weight))
            elif (other, action) in self.binary:
                found.append((self.binary[other, action], weight))
            elif (action, other) in self.binary:
                found += [(None, weight), (self.binary[action, other], -weight)]
        return found

    def _add_memory(self, rows: _Rows, rank: int, forward: int) -> None:
        problem = self.problem
        assert problem.memory_limit is not None
        change = [0.0] * len(self.actions)
        for n in self.by_rank[rank]:
            s, op, k = self.actions[n]
            held, kept = problem.held[s][k], problem.kept[s][k]
            change[n] = {Op.F: held, Op.I: kept - held, Op.W: -kept}[op]
        limit = problem.memory_limit[rank]
        room = limit + 1e-9 * (abs(limit) + 1.0) - change[forward]
        coefficients: dict[int, float] = {}
        for each, weight in self._those_before(forward, rank, change):
            if each is None:
                room -= weight
            else:
                coefficients[each] = coefficients.get(each, 0.0) - weight
        if coefficients:
            rows.add(coefficients, -room)

    def _orders(self, found: NDArray[np.float64]) -> Orders:
        """Orders by start; of equal ones (rounded), by what must come first."""
        orders = []
        for own in self.by_rank:
            codes = sorted(own, key=lambda a: (found[a], found[a] + self.length[a]))
            moved = True
            while moved:  # the binaries are exact where starts are rounded
                moved = False
                for at in range(len(codes) - 1):
                    a, b = codes[at], codes[at + 1]
                    wrong = self.before[b, a]
                    if (b, a) in self.binary:
                        wrong = found[self.binary[b, a]] > 0.5
                    elif (a, b) in self.binary:
                        wrong = found[self.binary[a, b]] < 0.5
                    if wrong:
                        codes[at], codes[at + 1] = b, a
                        moved = True
            actions = [self.actions[n] for n in codes]
            orders.append([self.evaluator.code(op, s, k) for s, op, k in actions])
        return orders


class _Rows:
    """Constraints: coefficients by variable, and what they come to at least."""

    def __init__(self) -> None:
        self.rows: list[dict[int, float]] = []
        self.least: list[float] = []

    def add(self, coefficients: dict[int, float], least: float) -> None:
        self.rows.append(coefficients)
        self.least.append(float(least))

    def constraint(self, number: int) -> LinearConstraint:
        data = [value for row in self.rows for value in row.values()]
        columns = [column for row in self.rows for column in row]
        ends = np.cumsum([0, *(len(row) for row in self.rows)])
        return LinearConstraint(csr_array((data, columns, ends), shape=(len(self.rows), number)), self.least, np.inf)

"""Cut, ranks and order of a chain of layers at once: simulated annealing in which a child inherits its parent's order.

    layers  | e e e f f | g g g | f f |     stages on any ranks, any number of them per rank
    ranks   |     0     |   1   |  0  |     order of F and I on each rank; W fill its gaps

With cost = value + _SIDE * (mean of the ranks - ideal work), temperature T and u uniform in (0, 1], a child replaces
its parent if its cost is below the parent's cost - T ln(u): the rule exp(-d / T), drawn first so that evaluation can
stop at this limit. A child is made in three steps, and evaluated in O(S M); chains restart from the beginning:

1. change: move a boundary, move or exchange ranks, add or remove a stage, which destroys the balance of work;
2. repair: small random moves until the largest (head + M * work) of a rank, a lower bound, is below the limit;
3. order: each F and I takes the time that its first layer had in the parent, which cannot deadlock; or each rank takes
   what has arrived, the earliest by that time first. Then some moves of single actions.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from operator import add
from random import Random
from typing import Any, NamedTuple, cast

from ..ir import Action, Schedule
from ..orders.evaluate import OrderEvaluator
from ..orders.problem import SPLIT_OPS, Problem, with_rounding
from ..placement import StagePlacement
from .request import Cut, Request
from .search import split

_ENDS = 3  # best results of chains that are returned
_TRIES = 20  # order moves of a child without a better one
_ORDERS = 20_000  # of the shortest chain
_FEWEST = 3  # stages beyond two per rank: with fewer, chains end in perfect orders of poor balance
_HOT, _COLD = 0.006, 0.0003  # temperatures of a chain, in parts of a rank's work
_HOT_ORDER, _COLD_ORDER = 0.0015, 0.00005  # of the order moves after it
_SIDE = 0.3  # weight of the average rank relative to the one that determines the value
_NEAR = 0.01  # a child within this part above the limit is worth some order moves
_MARGINS = (0.0, 0.002, 0.004, 0.006)  # of the repaired bound below the limit
_OVERS = (1.0, 1.15, 1.4, 2.0, 4.0)  # a W may be so many times as long as its gap
_REPAIRS = 20


# By code the seconds of F and I, the delay and the code of their input; by stage the seconds of W and the memory; by
# rank its work.
ChainCosts = tuple[list[float], list[float], list[int], list[float], list[float], list[float]]


class Arranged(NamedTuple):
    """An evaluated state. Orders of F and I have codes as in `orders.evaluate`; `over`: by rank, how many times its gap
    a W may last; `written`: orders with W; `ends`, `last`: by code and by rank."""

    cut: list[int]
    ranks: list[int]
    orders: list[list[int]]
    over: list[float]
    tables: ChainCosts
    written: list[list[int]]
    ends: list[float]
    last: list[float]
    value: float
    cost: float


class ChainSearch:
    """A search for layers ([4][L] of F, I, W [s], and memory) on P ranks; `played`: evaluations and rejected
    changes."""

    def __init__(
        self, layers: Sequence[Sequence[float]], request: Request, limits: Sequence[float], random: Random
    ) -> None:
        self.sums = [[*accumulate(column, initial=0.0)] for column in layers]
        self.F, self.I, W, self.held = self.sums
        self.work = [sum(each) for each in zip(self.F, self.I, W, strict=True)]
        self.P, self.M, self.L = len(limits), request.num_microbatches, len(self.F) - 1
        self.limits = [with_rounding(limit) for limit in limits]
        self.latency, self.is_span = cast(float, request.costs.latency), request.objective == "span"
        self.ideal = self.work[-1] * self.M / self.P
        self.random, self.played = random, 0
        self.is_over: Callable[[], bool] = lambda: False

    def run(
        self, cut: Cut, problem: Problem, schedule: Schedule, is_over: Callable[[], bool]
    ) -> list[tuple[Cut, StagePlacement, Schedule]]:
        """Chains from the schedule of a cut until `is_over`, asked before each step; returns the best results."""
        self.is_over = is_over
        start = self._begun(cut, problem, schedule)
        ends, number = [start] if start is not None else [], 0
        while start is not None and not is_over():
            number += 1
            many = _ORDERS * (2 - number % 2)
            ends.append(self._orders(self._chain(start, many), many // 8, _HOT_ORDER, _COLD_ORDER))
            ends = sorted(ends, key=lambda each: each.value)[:_ENDS]
        return [self._written(each) for each in ends]

    def _begun(self, cut: Cut, problem: Problem, schedule: Schedule) -> Arranged | None:
        evaluator = OrderEvaluator(problem)
        most = 2 * problem.num_stages * self.M
        orders = [[c for c in order if c < most] for order in split(evaluator, evaluator.orders(schedule))]
        tries = (self.play(list(cut), list(problem.rank_of), orders, [over] * self.P) for over in _OVERS[:3])
        return min((each for each in tries if each is not None), key=lambda each: each.cost, default=None)

    def _written(self, state: Arranged) -> tuple[Cut, StagePlacement, Schedule]:
        M, S = self.M, len(state.ranks)
        placed = StagePlacement(tuple(s for s in range(S) if state.ranks[s] == rank) for rank in range(self.P))
        programs = tuple(
            tuple(Action(c // M % S, SPLIT_OPS[c // (M * S)], c % M) for c in order) for order in state.written
        )
        return tuple(state.cut), placed, Schedule(name="auto", placement=placed, programs=programs, num_microbatches=M)

    def loads(self, cut: Sequence[int], ranks: Sequence[int]) -> list[float]:
        """By rank, its work after its earliest start; far more if one microbatch does not fit."""
        work, held, head = [0.0] * self.P, [0.0] * self.P, [-1.0] * self.P
        for rank, start, end in zip(ranks, cut, cut[1:]):  # noqa: B905 - the last boundary is an end
            if head[rank] < 0.0:
                head[rank] = 0.0 if self.is_span else self.F[start]
            work[rank] += self.work[end] - self.work[start]
            held[rank] += self.held[end] - self.held[start]
        parts = zip(work, head, held, self.limits, strict=True)
        return [self.M * w + h + 10 * self.ideal * n / limit * (n > limit) for w, h, n, limit in parts]

    def _tables(self, cut: Sequence[int], ranks: Sequence[int]) -> ChainCosts:
        M, late = self.M, self.latency
        F, I, W, held = ([b - a for a, b in pairwise(sums[at] for at in cut)] for sums in self.sums)
        there = [0.0 if a == b else late for a, b in pairwise(ranks)]
        delay = [n for each in (0.0, *there, *there, 0.0) for n in [each] * M]
        SM = M * len(ranks)
        need = [-1] * M + [*range(SM - M)] + [*range(SM + M, 2 * SM)] + [*range(SM - M, SM)]
        work = [0.0] * self.P
        for rank, *parts in zip(ranks, F, I, W, strict=True):
            work[rank] += M * sum(parts)
        return [n for each in (*F, *I) for n in [each] * M], delay, need, W, held, work

    def play(
        self,
        cut: list[int],
        ranks: list[int],
        orders: list[list[int]],
        over: list[float],
        *,
        tables: ChainCosts | None = None,
        most: float = math.inf,
    ) -> Arranged | None:
        """Evaluates orders of F and I, with W in gaps (the longest that fits, else the shortest up to `over` gaps) and
        where an F needs room. None for a deadlock, too much memory, or a value of at least `most`."""
        self.played += 1
        M, SM = self.M, len(ranks) * self.M
        seconds, delay, need, weights, held, work = tables = tables or self._tables(cut, ranks)
        idle = [math.inf if self.is_span else most * (1.0 + 1e-12) - each for each in work]  # still allowed
        ends, blocked, left = [-1.0] * (2 * SM) + [0.0], [-1] * (2 * SM), 2 * SM
        owed: list[list[float]] = [[] for _ in orders]  # seconds of W that may run, the shortest first
        whose: list[list[int]] = [[] for _ in orders]  # their codes
        log: list[list[int]] = [[] for _ in orders]
        at, free, room = [0] * self.P, [0.0] * self.P, list(self.limits)
        ready = [*range(self.P)]
        while ready:
            rank = ready.pop()
            now, mine, codes, own, note = free[rank], owed[rank], whose[rank], orders[rank], log[rank].append
            for n in range(at[rank], len(own)):
                code = own[n]
                there = ends[need[code]]
                if there < 0.0:
                    blocked[need[code]] = rank
                    break
                there += delay[code]
                wanted = held[code // M] if code < SM else 0.0
                while mine and (there > now or room[rank] < wanted):
                    fitting = bisect_right(mine, there - now) - 1
                    if fitting < 0:
                        if room[rank] >= wanted and mine[0] > (there - now) * over[rank]:
                            break
                        fitting = 0
                    now += mine.pop(fitting)
                    note(codes[fitting])
                    room[rank] += held[(codes.pop(fitting) - 2 * SM) // M]
                start = there if there > now else now
                idle[rank] -= start - now
                ends[code] = now = start + seconds[code]
                note(code)
                room[rank] -= wanted
                if code >= SM:
                    place = bisect_right(mine, weights[(code - SM) // M])
                    mine.insert(place, weights[(code - SM) // M])
                    codes.insert(place, code + SM)
                if room[rank] < 0.0 or idle[rank] < 0.0:
                    return None
                if blocked[code] >= 0:
                    ready.append(blocked[code])
                at[rank] += 1
                left -= 1
            free[rank] = now
        if left:
            return None
        written = [[*each, *codes] for each, codes in zip(log, whose, strict=True)]
        return self._valued((cut, ranks, orders, over, tables, written, ends), list(map(add, free, map(sum, owed))))

    def _valued(self, state: tuple[Any, ...], free: list[float]) -> Arranged:
        orders, seconds, ends = state[2], state[4][0], state[6]
        starts = [ends[order[0]] - seconds[order[0]] if self.is_span else 0.0 for order in orders]
        last = [now - start for now, start in zip(free, starts, strict=True)]
        return Arranged._make([*state, last, max(last), max(last) + _SIDE * (sum(last) / self.P - self.ideal)])

    def _carried(self, parent: Arranged, cut: Sequence[int]) -> list[float]:
        """By code, the time in the parent of the first layer of each F and I."""
        M, ends, old = self.M, parent.ends, parent.cut
        before, first, last = len(parent.ranks) * M, 0, 0
        keys: tuple[list[float], list[float]] = [], []  # of F, of I
        for start, end in pairwise(cut):
            while old[first + 1] <= start:
                first += 1
            while old[last + 1] < end:
                last += 1
            shift = self.F[start] - self.F[old[first + 1]]
            keys[0].extend(ends[first * M + k] + shift for k in range(M))
            shift = self.I[old[last]] - self.I[end]
            keys[1].extend(ends[before + last * M + k] + shift for k in range(M))
        return keys[0] + keys[1]

    def _listed(  # noqa: PLR0915 - one loop, as `play`: calls inside take half as long again
        self, cut: list[int], ranks: list[int], keys: Sequence[float], over: float, most: float
    ) -> list[list[int]] | None:
        """List scheduling by `keys`; W fill gaps. An F that leaves no room for a whole microbatch must be of the oldest
        one. None as soon as one rank has idled too long."""
        M, S, SM = self.M, len(ranks), len(ranks) * self.M
        seconds, delay, _, weights, held, work = self._tables(cut, ranks)
        idle = [math.inf if self.is_span else most - each for each in work]  # that a rank may
        coming: list[list[tuple[float, int]]] = [[] for _ in range(self.P)]  # when, code
        there: list[list[tuple[float, int]]] = [[] for _ in range(self.P)]  # key, code
        owed: list[list[tuple[float, float]]] = [[] for _ in range(self.P)]  # seconds and room of W
        orders: list[list[int]] = [[] for _ in range(self.P)]
        wake, busy, room, oldest = [0.0] * self.P, [0.0] * self.P, list(self.limits), [0] * self.P
        whole = [sum(h for h, own in zip(held, ranks, strict=True) if own == rank) for rank in range(self.P)]
        coming[ranks[0]] = [(0.0, k) for k in range(M)]
        events = [(0.0, rank) for rank in range(self.P)]
        while events:
            now, rank = heappop(events)
            if now != wake[rank]:
                continue
            arrivals, mine = coming[rank], there[rank]
            while arrivals and arrivals[0][0] <= now:
                code = heappop(arrivals)[1]
                insort(mine, (keys[code], code))
            gap = arrivals[0][0] - now if arrivals else math.inf
            has_room = room[rank] >= whole[rank]
            may = (e for e in mine if has_room or e[1] >= SM or e[1] % M == oldest[rank])
            if (chosen := next(may, None)) is not None:
                mine.remove(chosen)
                code = chosen[1]
                orders[rank].append(code)
                end, user, stage = now + seconds[code], code + M, code // M % S
                if code < SM:
                    room[rank] -= held[stage]
                    user = user if user < SM else code + SM
                else:
                    insort(owed[rank], (weights[stage], held[stage]))
                    oldest[rank] += stage == ranks.index(rank)
                    user = code - M if stage else -1
                if user >= 0:
                    other = ranks[user // M % S]
                    heappush(coming[other], (end + delay[user], user))
                    if wake[other] > end + delay[user] and busy[other] < wake[other]:
                        wake[other] = max(end + delay[user], busy[other])
                        heappush(events, (wake[other], other))
            elif owed[rank] and (mine or owed[rank][0][0] <= gap * over):
                weight, freed = owed[rank].pop(max(0, bisect_right(owed[rank], (gap, math.inf)) - 1))
                end, room[rank] = now + weight, room[rank] + freed
            else:
                wake[rank] = now + gap
                if gap < math.inf:
                    heappush(events, (wake[rank], rank))
                continue
            idle[rank] -= now - busy[rank]
            if idle[rank] < 0.0:
                return None
            busy[rank] = wake[rank] = end
            heappush(events, (end, rank))
        return orders

    def _moved(self, state: Arranged, most: float) -> Arranged | None:
        random, over, orders = self.random, state.over, state.orders
        if random.random() < 0.04:
            over = list(over)
            over[int(random.random() * self.P)] = random.choice(_OVERS)
        else:
            rank, order = self._waited_for(state) if random.random() < 0.7 else self._anywhere(state)
            orders = list(orders)
            orders[rank] = order
        return self.play(state.cut, state.ranks, orders, over, tables=state.tables, most=most)

    def _anywhere(self, state: Arranged) -> tuple[int, list[int]]:
        random = self.random
        rank = int(random.random() * self.P)
        order = state.orders[rank]
        at = int(random.random() * len(order))
        far = 1 if random.random() < 0.5 else 1 + int(random.random() * 7)
        return rank, _put(order, at, at + (far if random.random() < 0.5 else -far))

    def _waited_for(self, state: Arranged) -> tuple[int, list[int]]:
        """An order in which the action that a rank waits for comes earlier, or another action fills the gap."""
        random, ends, last, (seconds, delay, need, *_) = self.random, state.ends, state.last, state.tables
        rank = last.index(max(last)) if random.random() < 0.6 else int(random.random() * self.P)
        order, now, gaps = state.orders[rank], 0.0, []
        for at, code in enumerate(order):
            start = ends[code] - seconds[code]
            if start > now and ends[need[code]] + delay[code] >= start - 1e-9 * start:
                gaps.append((start - now, at, code))
            now = ends[code]
        if not gaps:
            return self._anywhere(state)
        _, at, code = random.choices(gaps, [gap for gap, _, _ in gaps])[0]
        if random.random() < 0.3:
            start = ends[code] - seconds[code]
            if ready := [n for n in range(at + 1, min(len(order), at + 12)) if ends[need[order[n]]] < start]:
                return rank, _put(order, ready[0] if random.random() < 0.6 else random.choice(ready), at)
        code = need[code]
        while code >= 0:
            start = ends[code] - seconds[code]
            if start > ends[need[code]] + delay[code] + 1e-9 * start:  # it waited for its rank
                rank = state.ranks[code // self.M % len(state.ranks)]
                order = state.orders[rank]
                at = order.index(code)
                if random.random() < 0.5 and at:
                    return rank, _put(order, at, at - 1 if random.random() < 0.6 else at - 1 - int(random.random() * 4))
                if random.random() < 0.5 and at:
                    code = order[at - 1]
                    continue
            code = need[code]
        return self._anywhere(state)

    def _changed(self, cut: list[int], ranks: list[int]) -> tuple[list[int], list[int]]:
        random, cut, ranks, S = self.random, list(cut), list(ranks), len(ranks)
        kind, stage, other = random.random(), int(random.random() * S), int(random.random() * S)
        if kind < 0.45:
            _shift(cut, stage, random.choice((-1, 1)))
        elif kind < 0.55:
            ranks[stage] = int(random.random() * self.P)
        elif kind < 0.78:
            other = (stage + 1) % S if kind < 0.68 else other
            ranks[stage], ranks[other] = ranks[other], ranks[stage]
        elif kind < 0.9:
            if min(4 * self.P, self.L) > S and cut[stage + 1] - cut[stage] > 1:
                cut.insert(stage + 1, random.randrange(cut[stage] + 1, cut[stage + 1]))
                ranks.insert(stage + (random.random() < 0.5), int(random.random() * self.P))
        elif stage and self.P < S:
            del cut[stage]
            del ranks[stage - (random.random() < 0.5)]
        return _joined(cut, ranks)

    def _repaired(self, cut: list[int], ranks: list[int], limit: float) -> tuple[list[int], list[int]] | None:
        """Random moves of the heaviest rank's stages that lower the bound until it is below the limit; None if that
        fails."""
        random, S, loads = self.random, len(ranks), self.loads(cut, ranks)
        for _ in range(_REPAIRS):
            if (value := max(loads)) <= limit:
                return _joined(cut, ranks)
            heavy, kind, new, owners = loads.index(value), random.random(), list(cut), list(ranks)
            stage, other = random.choice([s for s in range(S) if ranks[s] == heavy]), int(random.random() * S)
            if kind < 0.7:
                _shift(new, *random.choice(((stage, 1), (stage + 1, -1))))
                if kind < 0.3:
                    _shift(new, other, random.choice((-1, 1)))
            elif kind < 0.9:
                owners[stage], owners[other] = owners[other], heavy
            else:
                owners[stage] = int(random.random() * self.P)
            if max(changed := self.loads(new, owners)) < value:
                cut, ranks, loads = new, owners, changed
        return None

    def _chain(self, now: Arranged, many: int) -> Arranged:
        random, best, begun = self.random, now, self.played
        while (done := (self.played - begun) / many) < 1.0 and not self.is_over():
            heat = _HOT * (_COLD / _HOT) ** done
            if random.random() < 0.05:
                now = self._orders(now, 8, 0.3 * heat, 0.3 * heat)
            else:
                limit = now.cost - heat * self.ideal * math.log(1.0 - random.random())
                now = self._child(now, limit) or now
            best = now if now.value < best.value else best
        return best

    def _child(self, now: Arranged, limit: float) -> Arranged | None:
        """A child made in the three steps of the module, with a cost below `limit`; None if none is found."""
        random = self.random
        cut, ranks = self._changed(now.cut, now.ranks)
        while random.random() < 0.25:
            cut, ranks = self._changed(cut, ranks)
        new = self._repaired(cut, ranks, max(1.003 * self.ideal, limit - self.ideal * random.choice(_MARGINS)))
        fewest = min(2 * self.P + _FEWEST, len(now.ranks))
        if new is None or new == (now.cut, now.ranks) or len(set(new[1])) < self.P or len(new[1]) < fewest:
            self.played += 1  # so that a chain ends in any case
            return None
        keys, own = self._carried(now, new[0]), new[1]
        orders: list[list[int]] = [[] for _ in range(self.P)]
        for code in sorted(range(len(keys)), key=keys.__getitem__):
            orders[own[code // self.M % len(own)]].append(code)
        most = limit + _NEAR * self.ideal
        child = self.play(*new, orders, now.over, most=most)
        if child is None or child.cost > limit:
            over = random.choice(_OVERS[:3])
            listed = self._listed(*new, keys, over, most)
            other = None if listed is None else self.play(*new, listed, [over] * self.P, most=most)
            child = min((each for each in (child, other) if each), key=lambda each: each.cost, default=None)
        if child is None or child.cost > most:
            return None
        tried = 0
        while tried < _TRIES:
            moved = self._moved(child, child.cost)
            tried += 1
            if moved is not None and moved.cost <= child.cost:
                tried = max(0, tried - 3) if moved.cost < child.cost else tried
                child = moved
        return child if child.cost < limit else None

    def _orders(self, now: Arranged, steps: int, hot: float, cold: float) -> Arranged:
        """Annealing of the order alone, from temperature `hot` to `cold` (times the ideal seconds): the best found, or,
        at one temperature, the last."""
        best = now
        for step in range(steps):
            if self.is_over():
                break
            heat = self.ideal * hot * (cold / hot) ** (step / steps)
            most = now.cost - heat * math.log(1.0 - self.random.random())
            moved = self._moved(now, most)
            if moved is not None and moved.cost < most:
                now = moved
                best = min(best, now, key=lambda each: each.value)
        return best if cold < hot else now


def _put(order: list[int], at: int, to: int) -> list[int]:
    new = list(order)
    new.insert(max(0, to), new.pop(at))
    return new


def _shift(cut: list[int], at: int, by: int) -> None:
    if 0 < at < len(cut) - 1 and cut[at - 1] < cut[at] + by < cut[at + 1]:
        cut[at] += by


def _joined(cut: Sequence[int], ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    firsts = [s for s in range(len(ranks)) if s == 0 or ranks[s] != ranks[s - 1]]
    return [*(cut[s] for s in firsts), cut[-1]], [ranks[s] for s in firsts]

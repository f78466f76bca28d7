"""Cut, ranks and order of a chain of layers at once: simulated annealing in which a child inherits its parent's order.

    layers  | e e e f f | g g g | f f |     stages on any ranks, any number of them per rank
    ranks   |     0     |   1   |  0  |     order of F and I on each rank; W fill its gaps

**State**: x = (cut, ranks, orders, over), see `arranged`, with cost(x) = value + 0.3 (mean of the ranks - ideal).

**Starts**: for V = 1 to 4 stages per rank, in turn or back and forth, boundaries and ranks are annealed by the bound
b(cut, ranks) = max of `loads` alone, which takes microseconds; the order is listed as if microbatches came at equal
intervals, on these and on even stages in place. Others are given. The best on each ranks is a start. Two chains begin
with the best two starts, as a start's stages and ranks decide how far a chain gets, the rest with the one that led
further, until the budget is spent, or the best of them ended far above what something else has found. A chain is long:
where there is little time, there is one, from the best start of all, and it gets all that moves of named orders leave.

**Moves**: a child x' of x is made in three steps, and evaluated in O(S M):

1. change: move a boundary, move or exchange ranks, add or remove a stage, which destroys the balance of work;
2. repair: small random moves that lower b until it is below the limit that is accepted;
3. order: each F and I takes the time that its first layer had in x, which cannot deadlock; or each rank takes what has
   arrived, the earliest by that time first. Then some moves of single actions.

**Acceptance**: with temperature T and u uniform in (0, 1], x' replaces x if cost(x') < cost(x) - T ln(u): the rule
exp(-d / T), drawn first, so that repair and evaluation can stop at this limit. T falls from 0.6% to 0.12% of the ideal
work over seven eighths of a chain; in the rest the order of its best state alone moves.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product, repeat
from random import Random

from ..orders.evaluate import Orders
from .arranged import Arranged, LayerChain, Stages, StageTables
from .incumbent import Incumbent

_CHUNKS = (3, 2, 4, 1)  # stages per rank of starts, what promises most first
_STARTING = 0.2  # part of the budget for them, at most
_SETTLING = 3000  # moves for each
_LAGS = (0.5, 1.0, 2.0, 4.0)  # of the order of a start: the way back takes so many times as long
_CHAIN = 80_000  # evaluations of a chain, about
_SHORT = 22_000  # evaluations that are better spent on one chain
_BEGUN = 2  # starts of chains: from worse ones chains seldom get as far
_LEAST = 3  # chains, if several have time; the first shows whether more are worth it
_HOPELESS = 1.01  # times the best value: where all chains so far ended above it, there are no more
_ALONE = 0.9  # part of the budget that is spent after a chain, where there is time for one only
_ENDS = 3  # best results that are kept
_TRIES = 20  # order moves of a child without a better one
_FEWEST = 3  # stages beyond two per rank: with fewer, chains end in perfect orders of poor balance
_BOUNDARIES, _RANKS, _ALL = 0.45, 0.78, 1.0  # of random changes: of boundaries, then of ranks, and of their number
_HOT, _COLD = 0.006, 0.0012  # temperatures of a chain, in parts of a rank's work
_HOT_ORDER, _COLD_ORDER = 0.0015, 0.00005  # of the order moves after it
_HOT_START, _COLD_START = 0.03, 0.0005  # of the bound alone
_ORDERS = 0.125  # part of a chain for these
_NEAR = 0.01  # a child within this part above the limit is worth some order moves
_MARGINS = (0.0, 0.002, 0.004, 0.006)  # of the repaired bound below the limit
_OVERS = (4.0, 1.15, 0.0, 2.0, 1.4, 1.0, 8.0)  # a W may be so many times as long as its gap; 0: it runs with its I
_REPAIRS = 20


class ChainSearch:
    """A search for the best state of a chain; `incumbent` has the budget and counts evaluations."""

    def __init__(self, chain: LayerChain, incumbent: Incumbent[object], random: Random) -> None:
        self.chain, self.incumbent, self.random = chain, incumbent, random
        self.P, self.M, self.L, self.ideal = chain.P, chain.M, chain.L, chain.ideal
        self.ends: list[Arranged] = []

    def run(self, starts: Sequence[Arranged], end: float) -> list[Arranged]:
        """The best states, the best one first, when so much of the budget is spent; none without a start."""
        least, reached = _LEAST, list[tuple[float, int]]()  # the value of each end, and its start
        while starts and self.incumbent.spent < end and not self.incumbent.is_over:
            now, evaluations, number = self.incumbent.spent, self.incumbent.evaluations, len(reached)
            left = evaluations * (end - now) / max(now, 1e-9)  # at the pace so far
            if number == 0 and left < _SHORT:
                least, end, starts = 1, max(end, _ALONE), sorted(starts, key=lambda each: each.value)
            part = (end - now) / max(1, least - number, round(left / _CHAIN))
            until = now + (1.0 - _ORDERS) * part
            start = number if number < min(_BEGUN, len(starts)) else min(reached)[1]
            found = self._chain(starts[start], self._cooling(until, _HOT, _COLD))
            self._keep(found := self._orders(found, self._cooling(now + part, _HOT_ORDER, _COLD_ORDER)))
            reached.append((found.value, start))
            if self.ends[0].value > _HOPELESS * self.incumbent.value:
                break
        return self.ends

    def _cooling(self, until: float, hot: float, cold: float) -> Iterator[float]:
        """Falling temperatures [s] until so much of the budget is spent."""
        begun = self.incumbent.spent
        while (now := self.incumbent.spent) < until and not self.incumbent.is_over:
            yield self.ideal * hot * (cold / hot) ** ((now - begun) / (until - begun))

    def _keep(self, state: Arranged) -> None:
        if all(state.value != other.value for other in self.ends):
            self.ends = sorted([*self.ends, state], key=lambda each: each.value)[:_ENDS]

    # --- states ---

    def _played(
        self, stages: Stages, orders: Orders, over: list[float], known: StageTables | None, most: float = math.inf
    ) -> Arranged | None:
        found = self.chain.play(stages, orders, over, known, most)
        self.incumbent.evaluations += 1
        if found is not None:
            self.incumbent.offer(found.value, found, "chains")
        return found

    def starts(self, given: Sequence[tuple[Stages, Orders]] = ()) -> list[Arranged]:
        """States whose boundaries and ranks have small bounds, and those with the given orders of F and I, the best one
        first; last those with few stages, from which chains seldom reach others."""
        until = self.incumbent.spent + _STARTING
        first = ((stages, [orders], ()) for stages, orders in given)
        even = (_joined(*stages) for stages in self.even_stages())
        others = ((own, (), _LAGS) for stages in even for own in (self._settled(stages), stages))
        found = list[Arranged]()
        for tries in chain(first, others):
            found += filter(None, [self._start(*tries)])
            if self.incumbent.is_over or (found and self.incumbent.spent > until):
                break
        least = dict[tuple[int, ...], Arranged]()  # by ranks
        for each in sorted(found, key=lambda each: (len(each.ranks) < 2 * self.P + _FEWEST, each.value)):
            least.setdefault(tuple(each.ranks), each)
        return [*least.values()]

    def even_stages(self) -> Iterator[Stages]:
        """Stages of equal work on the ranks in turn, or back and forth."""
        P = self.P
        for V, snakes in product(_CHUNKS, (False, True)):
            if V * P <= self.L:
                yield self._even(V * P), [P - 1 - s % P if snakes and s // P % 2 else s % P for s in range(V * P)]

    def _start(self, stages: Stages, orders: Iterable[Orders], lags: Sequence[float]) -> Arranged | None:
        """The best of these orders, and of those listed with these lags; None if none fits."""
        tries = [(each, [share] * self.P) for each, share in product(orders, _OVERS[:3])]
        for share, lag in product(_OVERS[:3], lags):
            over, tables = [share] * self.P, self.chain.tables(stages, [share] * self.P)
            if (listed := self.chain.listed(stages[1], tables, self.chain.even(tables, lag), over)) is not None:
                tries.append((listed, over))
        states = (self._played(stages, each, over, None) for each, over in tries)
        best = min((each for each in states if each), key=lambda each: each.value, default=None)
        if best is not None:
            self._keep(best)
        return best

    def _even(self, num_stages: int) -> list[int]:
        """The cut into stages of nearly equal work, of a layer each at least."""
        whole, cut = self.chain.whole, [0]
        for s in range(1, num_stages):
            at = bisect_left(whole, whole[-1] * s / num_stages)
            at -= whole[at] + whole[at - 1] > 2 * whole[-1] * s / num_stages
            cut.append(min(max(at, cut[-1] + 1), self.L - num_stages + s))
        return [*cut, self.L]

    def _settled(self, stages: Stages) -> Stages:
        """Find the same number of stages with a small bound, by annealing boundaries and ranks."""
        random, S = self.random, len(stages[1])

        def cost_of(stages: Stages) -> float:
            loads = self.chain.loads(stages)
            return max(loads) + 0.3 * sum(loads) / self.P

        now = least = cost_of(best := stages)
        for step in range(_SETTLING if S > 1 else 0):
            heat = self.ideal * _HOT_START * (_COLD_START / _HOT_START) ** (step / _SETTLING)
            other = self._changed(stages, _RANKS)
            if len(other[1]) == S and len({*other[1]}) == self.P:
                cost = cost_of(other)
                if cost < now - heat * math.log(1.0 - random.random()):
                    stages, now = other, cost
                    best, least = (other, cost) if cost < least else (best, least)
        return best

    # --- moves of stages ---

    def _changed(self, stages: Stages, changes: float = _ALL) -> Stages:
        random, (cut, ranks), S = self.random, (list(stages[0]), list(stages[1])), len(stages[1])
        kind, stage, other = random.random() * changes, int(random.random() * S), int(random.random() * S)
        if kind < _BOUNDARIES:
            shift(cut, stage, random.choice((-1, 1)))
        elif kind < 0.55:
            ranks[stage] = int(random.random() * self.P)
        elif kind < _RANKS:
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

    def _repaired(self, stages: Stages, limit: float) -> Stages | None:
        """Random moves of the heaviest rank's stages that lower the bound until it is below the limit; None if that
        fails."""
        random, (cut, ranks), S = self.random, stages, len(stages[1])
        loads = self.chain.loads(stages)
        for _ in range(_REPAIRS):
            if (value := max(loads)) <= limit:
                return _joined(cut, ranks)
            heavy, kind, new, owners = loads.index(value), random.random(), list(cut), list(ranks)
            stage, other = random.choice([s for s in range(S) if ranks[s] == heavy]), int(random.random() * S)
            if kind < 0.7:
                shift(new, *random.choice(((stage, 1), (stage + 1, -1))))
                if kind < 0.3:
                    shift(new, other, random.choice((-1, 1)))
            elif kind < 0.9:
                owners[stage], owners[other] = owners[other], heavy
            else:
                owners[stage] = int(random.random() * self.P)
            if max(changed := self.chain.loads((new, owners))) < value:
                cut, ranks, loads = new, owners, changed
        return None

    # --- chains ---

    def _chain(self, now: Arranged, heats: Iterator[float]) -> Arranged:
        random, best = self.random, now
        for heat in heats:
            if random.random() < 0.05:
                now = self._orders(now, repeat(0.3 * heat, 8), returns_last=True)
            else:
                limit = now.cost - heat * math.log(1.0 - random.random())
                now = self._child(now, limit) or now
            best = now if now.value < best.value else best
        return best

    def _child(self, now: Arranged, limit: float) -> Arranged | None:
        """A child made in the three steps of the module, with a cost below `limit`; None if none is found."""
        random, before = self.random, (now.cut, now.ranks)
        stages = self._changed(before)
        while random.random() < 0.25:
            stages = self._changed(stages)
        new = self._repaired(stages, max(1.003 * self.ideal, limit - self.ideal * random.choice(_MARGINS)))
        fewest = min(2 * self.P + _FEWEST, self.L // 2, len(now.ranks))
        if new is None or new == before or len({*new[1]}) < self.P or len(new[1]) < fewest:
            self.incumbent.evaluations += 1  # so that a chain ends in any case
            return None
        child = self._ordered(now, new, limit)
        tried = 0
        while child is not None and tried < _TRIES:
            moved = self._moved(child, child.cost)
            tried += 1
            if moved is not None and moved.cost <= child.cost:
                tried = max(0, tried - 3) if moved.cost < child.cost else tried
                child = moved
        return child if child is not None and child.cost < limit else None

    def _ordered(self, now: Arranged, stages: Stages, limit: float) -> Arranged | None:
        """Other stages in the order of a state, or listed by it if that is above the limit; None if both are far
        above."""
        keys, ranks, most = self.chain.carried(now, stages[0]), stages[1], limit + _NEAR * self.ideal
        over, tables = now.over, self.chain.tables(stages, now.over)
        orders: Orders = [[] for _ in range(self.P)]
        for code in sorted(range(len(keys)), key=keys.__getitem__):
            orders[ranks[code // self.M % len(ranks)]].append(code)
        child = self._played(stages, orders, over, tables, most)
        if child is not None and child.cost <= limit:
            return child
        if self.random.random() < 0.5:
            over = [self.random.choice(_OVERS[:4])] * self.P
            tables = self.chain.tables(stages, over)
        listed = self.chain.listed(ranks, tables, keys, over, most)
        other = None if listed is None else self._played(stages, listed, over, tables, most)
        found = min((each for each in (child, other) if each), key=lambda each: each.cost, default=None)
        return None if found is None or found.cost > most else found

    # --- moves of an order ---

    def _orders(self, now: Arranged, heats: Iterator[float], *, returns_last: bool = False) -> Arranged:
        """Annealing of the order alone: the best that was found, or the last."""
        best = now
        for heat in heats:
            if self.incumbent.is_over:
                break
            most = now.cost - heat * math.log(1.0 - self.random.random())
            moved = self._moved(now, most)
            if moved is not None and moved.cost < most:
                now = moved
                best = min(best, now, key=lambda each: each.value)
        return now if returns_last else best

    def _moved(self, state: Arranged, most: float) -> Arranged | None:
        random, over, orders = self.random, state.over, state.orders
        if random.random() < 0.04:
            over = list(over)
            over[int(random.random() * self.P)] = random.choice(_OVERS)
            return self._played((state.cut, state.ranks), orders, over, None, most)
        rank, order = self._waited_for(state) if random.random() < 0.7 else self._anywhere(state)
        orders = list(orders)
        orders[rank] = order
        return self._played((state.cut, state.ranks), orders, over, state.tables, most)

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


def _put(order: list[int], at: int, to: int) -> list[int]:
    new = list(order)
    new.insert(max(0, to), new.pop(at))
    return new


def shift(cut: list[int], at: int, by: int) -> None:
    """Move a boundary, unless a stage would have no layer left."""
    if 0 < at < len(cut) - 1 and cut[at - 1] < cut[at] + by < cut[at + 1]:
        cut[at] += by


def _joined(cut: Sequence[int], ranks: Sequence[int]) -> Stages:
    firsts = [s for s in range(len(ranks)) if s == 0 or ranks[s] != ranks[s - 1]]
    return [*(cut[s] for s in firsts), cut[-1]], [ranks[s] for s in firsts]

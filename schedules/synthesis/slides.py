"""Local search over orders: an action slides along its rank, past others that do not depend on it; annealing keeps it.

    rank 0 | F0 F1 I0 W0 F2 I1        W0 slides two to the right:        rank 0 | F0 F1 I0 F2 I1 W0

Most slides take an action of the critical path, since nothing else can shorten it. Orders that deadlock or exceed the
memory limit are never kept.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from random import Random

from .evaluate import OrderEvaluator, Orders, OrderTimes

_SIDE = 0.1  # weight of the average rank beside the one that counts
_CRITICAL = 0.8  # part of the slides that begin on the critical path
_FAR = 0.3  # part of the slides that may go far
_EXCHANGES = 0.05  # part of the moves that let two microbatches change places everywhere, where these differ


class OrderSearch:
    """Annealing over the orders of one problem."""

    def __init__(self, evaluator: OrderEvaluator) -> None:
        self.evaluator = evaluator
        problem = self.problem = evaluator.problem
        S, M = problem.num_stages, problem.num_microbatches
        # Place of an action on its microbatch's way through the pipeline and back; a W stands beside its I.
        way = [(s, 2 * S - 1 - s, 2 * S - 0.5 - s, 2 * S - 1 - s) for s in range(S)]
        self.way = [way[s][op] for op in range(4) for s in range(S) for _ in range(M)]
        self.ends_way = [op == 2 for op in range(4) for s in range(S) for _ in range(M)]
        alike = problem.same_microbatches  # none gains by going before another
        self.alike = alike or M == 1
        self.group = [(0, 1, 2, 1)[op] * S + s if alike else -1 for op in range(4) for s in range(S) for _ in range(M)]
        self.seconds = sum(evaluator.seconds[: 2 * S * M]) / (2 * S * M)

    def anneal(
        self, orders: Orders, random: Random, *, steps: int, hot: float = 0.3, cold: float = 0.01
    ) -> Iterator[tuple[float, Orders] | None]:
        """Yields after each step: None, or a new best value with its orders. Temperatures are in mean seconds of an
        action."""
        ev = self.evaluator
        orders = [list(order) for order in orders]
        times = ev.play(orders)
        assert times is not None, "the search began with a deadlock"
        value = best = ev.value_of(times)
        side = self._side(times)
        critical = self.critical(orders, times)
        temperature, cooling = hot * self.seconds, (cold / hot) ** (1.0 / max(1, steps))
        for _ in range(steps):
            temperature *= cooling
            moved = self._moved(orders, times, critical, random)
            if moved is None:
                yield None
                continue
            new, new_side = ev.value_of(moved[1]), self._side(moved[1])
            worse = new - value + _SIDE * (new_side - side)
            if worse > 0 and random.random() >= math.exp(-worse / temperature):
                yield None
                continue
            (orders, times), value, side = moved, new, new_side
            critical = self.critical(orders, times)
            if value < best:
                best = value
                yield best, [list(order) for order in orders]
            else:
                yield None

    def _moved(
        self, orders: Orders, times: OrderTimes, critical: list[tuple[int, int]], random: Random
    ) -> tuple[Orders, OrderTimes] | None:
        """The orders after a random move, and their times; None where it deadlocks or exceeds the memory."""
        if not self.alike and random.random() < _EXCHANGES:
            changed = self._exchanged(orders, random)
            found = self.evaluator.play(changed) if self.evaluator.fits(changed) else None
            return None if found is None else (changed, found)
        if critical and random.random() < _CRITICAL:
            rank, at = critical[int(random.random() * len(critical))]
        else:
            rank = int(random.random() * len(orders))
            at = int(random.random() * len(orders[rank]))
        distance = 1 + int(random.random() * (12 if random.random() < _FAR else 3))
        order = self.slide(rank, orders[rank], at, distance if random.random() < 0.5 else -distance)
        if order is None:
            return None
        changed = orders.copy()
        changed[rank] = order
        found = self._replay(changed, times, rank, orders[rank])
        return None if found is None else (changed, found)

    def _exchanged(self, orders: Orders, random: Random) -> Orders:
        """Two microbatches in each other's places on all ranks."""
        M = self.problem.num_microbatches
        one, other = random.sample(range(M), 2)
        step = {one: other - one, other: one - other}
        return [[code + step.get(code % M, 0) for code in order] for order in orders]

    def _side(self, times: OrderTimes) -> float:
        """A second figure, for orders of one value: how soon the ranks are through on average [s]."""
        if self.problem.objective == "makespan":
            return sum(own[-1] for own in times.ends) / len(times.ends)
        return sum(own[-1] - first for first, own in zip(times.firsts, times.ends, strict=True)) / len(times.ends)

    def slide(self, rank: int, order: list[int], at: int, distance: int) -> list[int] | None:
        """The order with one action moved so far, or as far as it may; None where it may not move at all."""
        way, group, M = self.way, self.group, self.problem.num_microbatches
        code = order[at]
        own_way, own_group, microbatch = way[code], group[code], code % M
        to = at
        if distance > 0:
            ends_way = self.ends_way[code]
            for to in range(at + 1, min(len(order), at + distance + 1)):
                other = order[to]
                if (own_group >= 0 and group[other] == own_group) or (
                    other % M == microbatch and not ends_way and own_way < way[other]
                ):
                    to -= 1
                    break
        else:
            for to in range(at - 1, max(-1, at + distance - 1), -1):
                other = order[to]
                if (own_group >= 0 and group[other] == own_group) or (
                    other % M == microbatch and not self.ends_way[other] and way[other] < own_way
                ):
                    to += 1
                    break
        if to == at:
            return None
        moved = order.copy()
        moved.insert(to, moved.pop(at))
        return moved if self.evaluator.has_room(rank, moved) else None

    def critical(self, orders: Orders, times: OrderTimes) -> list[tuple[int, int]]:
        """(rank, position) of the actions on a chain that determines the value, last first."""
        ev = self.evaluator
        firsts, ends = times
        if self.problem.objective == "makespan":
            rank = max(range(len(ends)), key=lambda r: ends[r][-1])
        else:
            rank = max(range(len(ends)), key=lambda r: ends[r][-1] - firsts[r])
        at = len(ends[rank]) - 1
        path = []
        while at >= 0:
            path.append((rank, at))
            code = orders[rank][at]
            start = ends[rank][at] - ev.seconds[code]
            before = ends[rank][at - 1] if at else -1.0
            waits = ev.need[code]
            if waits < 0 or before >= start - 1e-9 * (1.0 + start):
                at -= 1
                continue
            rank, at = self._maker(orders, waits)
        return path

    def _maker(self, orders: Orders, slot: int) -> tuple[int, int]:
        """Rank and position of the action that fills a slot, the input of another."""
        S, M = self.problem.num_stages, self.problem.num_microbatches
        rank = self.problem.rank_of[slot // M % S]
        order = orders[rank]
        if slot < S * M:
            return rank, order.index(slot)
        codes = (slot, slot + 2 * S * M)  # I, or B
        return rank, next(at for at, other in enumerate(order) if other in codes)

    def _replay(self, orders: Orders, times: OrderTimes, changed: int, before: list[int]) -> OrderTimes | None:
        """When each action ends now that one rank has another order; what came before the first change stays."""
        after = orders[changed]
        first = next(at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        since = times.ends[changed][first - 1] if first else 0.0
        cuts = [first if rank == changed else bisect_right(own, since) for rank, own in enumerate(times.ends)]
        stays = OrderTimes(times.firsts.copy(), [own[:cut] for own, cut in zip(times.ends, cuts, strict=True)])
        return self.evaluator.play_on(orders, stays)

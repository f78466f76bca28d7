"""The inner loop of all search: the times of an order, bit-equal to those of `simulate`, and local search over orders.

An action is one number, its *code* (op * S + stage) * M + microbatch, with the ops F, I, W, B in this order; an order
is a list of codes per rank. With `arrived[x]` the end of action x plus its delay to the next rank,

    end(a) = max(end of the action before a on its rank, arrived[input of a]) + seconds(a)

Each action has at most one input from another rank, so no event queue is needed: a rank runs until its next input is
missing, and the rank that makes this input wakes it. O(actions) per order.

`SlideSearch` is simulated annealing: one action slides along its rank, past others that do not depend on it.

    rank 0 | F0 F1 I0 W0 F2 I1        W0 slides two to the right:        rank 0 | F0 F1 I0 F2 I1 W0

A slide that makes the value worse by d is accepted with probability exp(-d / temperature). Most slides take an action
of the critical path, since no other can shorten it. Orders that deadlock or exceed the memory limit are never accepted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from ..ir import Action, Op, Schedule
from .problem import Problem

ORDER_OPS = (Op.F, Op.I, Op.W, Op.B)

Orders = list[list[int]]
_NOT_YET = -1.0


# By rank, the start of its first action, and the end of each of its actions in order [s].
OrderTimes = tuple[list[float], list[list[float]]]


class OrderEvaluator:
    """The costs of one problem as flat lists.

    Attributes, each by code: `seconds`; `delay`, from the end until the result arrives; `slot`, where the arrival is
    noted (-1: no action waits for a W), `need`, the slot that an action waits for (-1: none); `rank`; `change` of the
    memory that its rank holds. `limits`, by rank, see `Problem.limits`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        S, M = problem.num_stages, problem.num_microbatches
        self.num_stages, self.num_microbatches = S, M
        self.num_slots = 2 * S * M  # forwards, gradients
        self.seconds = [n for op in ORDER_OPS for row in problem.seconds[op] for n in row]
        self.rank = [problem.rank_of[s] for _ in ORDER_OPS for s in range(S) for _ in range(M)]
        self.delay: list[float] = []
        self.slot: list[int] = []
        self.need: list[int] = []
        for op in ORDER_OPS:
            for s in range(S):
                for k in range(M):
                    forward, gradient = s * M + k, (S + s) * M + k
                    match op:
                        case Op.F:
                            wiring = problem.forward_delay[s], forward, forward - M if s else -1
                        case Op.W:
                            wiring = 0.0, -1, -1  # its I comes before it on the same rank
                        case _:
                            wiring = problem.gradient_delay[s], gradient, gradient + M if s < S - 1 else forward
                    self.delay.append(wiring[0])
                    self.slot.append(wiring[1])
                    self.need.append(wiring[2])
        held = [n for row in problem.held for n in row]
        kept = [n for row in problem.kept for n in row]
        freed = [k - h for h, k in zip(held, kept, strict=True)]
        self.limits = problem.limits
        self.change = [*held, *freed, *(-k for k in kept), *(-h for h in held)]

    def code(self, op: Op, stage: int, microbatch: int) -> int:
        return (ORDER_OPS.index(op) * self.num_stages + stage) * self.num_microbatches + microbatch

    def action(self, code: int) -> Action:
        rest, microbatch = divmod(code, self.num_microbatches)
        op, stage = divmod(rest, self.num_stages)
        return Action(stage, ORDER_OPS[op], microbatch)

    def codes(self, programs: Iterable[Iterable[Action]]) -> Orders:
        """Actions as codes; KeyError for another op or stage."""
        code_of = {(s, op): self.code(op, s, 0) for op in ORDER_OPS for s in range(self.num_stages)}
        return [[code_of[s, op] + k for s, op, k in program] for program in programs]

    def orders(self, schedule: Schedule) -> Orders:
        """The programs of a schedule as codes; ValueError for a schedule of another problem."""
        problem = self.problem
        sizes = (schedule.total_indices, schedule.num_slices)
        if schedule.placement != problem.placement or sizes != (problem.num_microbatches, 1):
            raise ValueError(f"{schedule!r} is not one of {problem.num_microbatches} microbatches on this placement")
        try:
            orders = self.codes(schedule.programs)
        except KeyError as error:
            raise ValueError(f"{schedule!r} runs {error.args[0]}: expected F, B, I and W alone") from None
        first_whole = 3 * self.num_stages * self.num_microbatches
        if sum(1 + (code >= first_whole) for order in orders for code in order) != first_whole:
            raise ValueError(f"{schedule!r} lacks a backward, or has one twice: expected each forward with its own")
        return orders

    def schedule(self, orders: Sequence[Sequence[int]], *, name: str = "auto") -> Schedule:
        return Schedule(
            name=name,
            placement=self.problem.placement,
            programs=tuple(tuple(map(self.action, order)) for order in orders),
            num_microbatches=self.num_microbatches,
        )

    def play(self, orders: Sequence[Sequence[int]]) -> OrderTimes | None:
        """When each action ends; None for orders that deadlock."""
        return self.play_on(orders, ([0.0] * len(orders), [[] for _ in orders]))

    def play_on(self, orders: Sequence[Sequence[int]], played: OrderTimes) -> OrderTimes | None:
        """When each action ends, given the ends of a prefix of each order in `played`; None for a deadlock.

        No action of the prefixes may need one after them. `played` is completed in place.
        """
        seconds, delay, slot, need = self.seconds, self.delay, self.slot, self.need
        firsts, ends = played
        arrived = [_NOT_YET] * self.num_slots
        for order, own in zip(orders, ends, strict=True):
            for code, end in zip(order, own):  # noqa: B905 - only the prefixes
                fills = slot[code]
                if fills >= 0:
                    arrived[fills] = end + delay[code]
        blocked = [-1] * self.num_slots  # the rank that waits for a slot
        ready = list(range(len(orders)))
        left = sum(map(len, orders)) - sum(map(len, ends))
        while ready:
            rank = ready.pop()
            order, own = orders[rank], ends[rank]
            now = own[-1] if own else 0.0
            for code in order[len(own) :] if own else order:
                waits = need[code]
                if waits >= 0:
                    arrival = arrived[waits]
                    if arrival > now:
                        now = arrival
                    elif arrival < 0.0:
                        blocked[waits] = rank
                        break
                if not own:
                    firsts[rank] = now
                now += seconds[code]
                own.append(now)
                left -= 1
                fills = slot[code]
                if fills >= 0:
                    arrived[fills] = now + delay[code]
                    if blocked[fills] >= 0:
                        ready.append(blocked[fills])
        return None if left else played

    def value(self, orders: Sequence[Sequence[int]]) -> float:
        """The objective of an order [s]; infinite for a deadlock. A W is taken to come after its I on its rank: slides
        and swaps keep it there. Memory is not checked."""
        times = self.play(orders)
        return float("inf") if times is None else self.value_of(times)

    def value_of(self, times: OrderTimes) -> float:
        problem, (firsts, ends) = self.problem, times
        last = [own[-1] if own else 0.0 for own in ends]
        if problem.norm is not None and (problem.norm > 0 or any(problem.update)):
            last = [max(last) + problem.norm] * len(last)
        if any(problem.update):
            for rank, stages in enumerate(problem.placement):
                for stage in stages:
                    last[rank] += problem.update[stage]
        if problem.objective == "makespan":
            return max(last)
        return max(end - first for end, first in zip(last, firsts, strict=True))

    def has_room(self, rank: int, order: Sequence[int]) -> bool:
        """Whether a rank that runs the codes in `order` stays within its memory limit after each of them."""
        limit, change = self.limits[rank], self.change
        if limit == math.inf:
            return True
        now = 0.0
        for code in order:
            now += change[code]
            if now > limit:
                return False
        return True

    def fits(self, orders: Sequence[Sequence[int]]) -> bool:
        return all(map(self.has_room, range(len(orders)), orders))

    def peaks(self, orders: Sequence[Sequence[int]]) -> list[float]:
        # Forwards have the lowest codes, and only they take memory.
        first_after = self.num_stages * self.num_microbatches
        change = self.change
        peaks = []
        for order in orders:
            now = peak = 0.0
            for code in order:
                now += change[code]
                if code < first_after and now > peak:
                    peak = now
            peaks.append(peak)
        return peaks


# --- slides ---

_SIDE = 0.1  # weight of the average rank relative to the one that determines the value
_CRITICAL = 0.8  # part of the slides that begin on the critical path
_FAR = 0.3  # part of the slides that may go far
_SWAPS = 0.3  # with limited memory, part of the moves that exchange two actions of one op
_TOGETHER = 0.6  # likewise, part of the slides that an action of a chunk makes on several ranks
_EXCHANGES = 0.05  # with unequal microbatches, part of the moves that exchange two of them everywhere


class SlideSearch:
    """Annealing over the orders of one problem."""

    def __init__(self, evaluator: OrderEvaluator) -> None:
        self.evaluator = evaluator
        problem = self.problem = evaluator.problem
        S, M = problem.num_stages, problem.num_microbatches
        # Position of an action on the path of its microbatch through the pipeline and back; a W is next to its I.
        way = [(s, 2 * S - 1 - s, 2 * S - 0.5 - s, 2 * S - 1 - s) for s in range(S)]
        self.way = [way[s][op] for op in range(4) for s in range(S) for _ in range(M)]
        self.ends_way = [op == 2 for op in range(4) for s in range(S) for _ in range(M)]
        alike = problem.same_microbatches  # none gains by preceding another
        self.alike = alike or M == 1
        self.group = [(0, 1, 2, 1)[op] * S + s if alike else -1 for op in range(4) for s in range(S) for _ in range(M)]
        # Several chunks and limited memory: single actions can hardly move.
        self.swaps = min(evaluator.limits) < math.inf and max(map(len, problem.placement)) > 1
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
        """The orders after a random move, and their times; None for a deadlock or too much memory."""
        if not self.alike and random.random() < _EXCHANGES:
            changed = self._exchanged(orders, random)
            found = self.evaluator.play(changed) if self.evaluator.fits(changed) else None
            return None if found is None else (changed, found)
        if critical and random.random() < _CRITICAL:
            rank, at = critical[int(random.random() * len(critical))]
        else:
            rank = int(random.random() * len(orders))
            at = int(random.random() * len(orders[rank]))
        step, distance = 1 if random.random() < 0.5 else -1, 0
        if self.swaps and random.random() < _SWAPS:
            order = self.swap(rank, orders[rank], at, step)
        else:
            distance = 1 + int(random.random() * (12 if random.random() < _FAR else 3))
            order = self.slide(rank, orders[rank], at, step * distance)
        if order is None:
            return None
        changed = orders.copy()
        if distance and self.swaps and random.random() < _TOGETHER:
            return self._moved_together(changed, order, rank, (orders[rank][at], step * distance), random)
        changed[rank] = order
        found = self._replay(changed, times, rank, orders[rank])
        return None if found is None else (changed, found)

    def _moved_together(
        self, changed: Orders, order: list[int], rank: int, moved: tuple[int, int], random: Random
    ) -> tuple[Orders, OrderTimes] | None:
        """The same action of a chunk slides equally far on several consecutive ranks."""
        S, M, placement = self.problem.num_stages, self.problem.num_microbatches, self.problem.placement
        (code, distance), changed[rank] = moved, order
        (op, stage), k = divmod(code // M, S), code % M
        chunk = placement[rank].index(stage)
        low, high = sorted((rank, int(random.random() * len(placement))))
        if random.random() < 0.5:
            low, high = 0, len(placement) - 1
        for other in range(low, high + 1):
            if other != rank and chunk < len(placement[other]):
                like = (op * S + placement[other][chunk]) * M + k
                if like in changed[other]:
                    slid = self.slide(other, changed[other], changed[other].index(like), distance)
                    changed[other] = changed[other] if slid is None else slid
        found = self.evaluator.play(changed)
        return None if found is None else (changed, found)

    def _exchanged(self, orders: Orders, random: Random) -> Orders:
        M = self.problem.num_microbatches
        one, other = random.sample(range(M), 2)
        step = {one: other - one, other: one - other}
        return [[code + step.get(code % M, 0) for code in order] for order in orders]

    def _side(self, times: OrderTimes) -> float:
        """A second objective, for orders of equal value: how soon the ranks end on average [s]."""
        firsts, ends = times
        if self.problem.objective == "makespan":
            return sum(own[-1] for own in ends) / len(ends)
        return sum(own[-1] - first for first, own in zip(firsts, ends, strict=True)) / len(ends)

    def slide(self, rank: int, order: list[int], at: int, distance: int) -> list[int] | None:
        """The order with one action moved by this distance, or as far as possible; None if it cannot move."""
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

    def swap(self, rank: int, order: list[int], at: int, step: int) -> list[int] | None:
        """The order with an action and the next one of its op and another stage exchanged, which keeps memory about
        equal where a limit prevents slides; None if there is none."""
        S, M = self.problem.num_stages, self.problem.num_microbatches
        op, stage = divmod(order[at] // M, S)
        to = at + step
        while 0 <= to < len(order):
            other_op, other_stage = divmod(order[to] // M, S)
            if other_op == op:
                if other_stage != stage:
                    break
                at = to
            to += step
        else:
            return None
        low, high = min(at, to), max(at, to)
        if op:  # a W stays after its I
            size = S * M
            own = {order[high] - size, order[low] + size}
            if any(code in own for code in order[low + 1 : high]):
                return None
        moved = order.copy()
        moved[at], moved[to] = order[to], order[at]
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
        S, M = self.problem.num_stages, self.problem.num_microbatches
        rank = self.problem.rank_of[slot // M % S]
        order = orders[rank]
        if slot < S * M:
            return rank, order.index(slot)
        codes = (slot, slot + 2 * S * M)  # I, or B
        return rank, next(at for at, other in enumerate(order) if other in codes)

    def _replay(self, orders: Orders, times: OrderTimes, changed: int, before: list[int]) -> OrderTimes | None:
        """When each action ends after the order of one rank has changed; times before the first change are reused."""
        after = orders[changed]
        first = next(at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        firsts, ends = times
        since = ends[changed][first - 1] if first else 0.0
        cuts = [first if rank == changed else bisect_right(own, since) for rank, own in enumerate(ends)]
        stays = firsts.copy(), [own[:cut] for own, cut in zip(ends, cuts, strict=True)]
        return self.evaluator.play_on(orders, stays)

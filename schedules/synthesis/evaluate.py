"""The inner loop of all search: what an order of the actions takes, to the last bit what `simulate` says.

An action is one number, its *code* (op * S + stage) * M + microbatch, with the ops F, I, W, B in this order; an order
is a list of codes a rank. Since each action has at most one input from another rank, no event queue is needed: a rank
runs until its next input is missing, and who makes that input wakes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..ir import Action, Op, Schedule
from .problem import Problem

OPS = (Op.F, Op.I, Op.W, Op.B)

Orders = list[list[int]]
_NOT_YET = -1.0


class OrderTimes(NamedTuple):
    """When each rank starts its first action, and when each of its actions ends, in its order [s]."""

    firsts: list[float]
    ends: list[list[float]]


class OrderEvaluator:
    """The figures of one problem, flat.

    Attributes, each by code: `seconds`; `delay`, from the end until the result has arrived; `slot`, where the arrival
    is noted (-1: of a W, nobody waits), `need`, the slot that an action waits for (-1: none); `rank`; `change`, of
    what its rank holds [memory]. `limits`, by rank, see `Problem.limits`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        S, M = problem.num_stages, problem.num_microbatches
        self.num_stages, self.num_microbatches = S, M
        self.num_slots = 2 * S * M  # forwards, gradients
        self.seconds = [n for op in OPS for row in problem.seconds[op] for n in row]
        self.rank = [problem.rank_of[s] for _ in OPS for s in range(S) for _ in range(M)]
        self.delay: list[float] = []
        self.slot: list[int] = []
        self.need: list[int] = []
        for op in OPS:
            for s in range(S):
                for k in range(M):
                    forward, gradient = s * M + k, (S + s) * M + k
                    match op:
                        case Op.F:
                            wiring = problem.forward_delay[s], forward, forward - M if s else -1
                        case Op.W:
                            wiring = 0.0, -1, -1  # its I stands on its own rank, in front of it
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
        return (OPS.index(op) * self.num_stages + stage) * self.num_microbatches + microbatch

    def action(self, code: int) -> Action:
        rest, microbatch = divmod(code, self.num_microbatches)
        op, stage = divmod(rest, self.num_stages)
        return Action(stage, OPS[op], microbatch)

    def orders(self, schedule: Schedule) -> Orders:
        """The programs of a schedule as codes; ValueError where it is not one of this problem."""
        problem = self.problem
        sizes = (schedule.total_indices, schedule.num_slices)
        if schedule.placement != problem.placement or sizes != (problem.num_microbatches, 1):
            raise ValueError(f"{schedule!r} is not one of {problem.num_microbatches} microbatches on this placement")
        code_of = {(s, op): self.code(op, s, 0) for op in OPS for s in range(self.num_stages)}
        try:
            orders = [[code_of[s, op] + k for s, op, k in program] for program in schedule.programs]
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
        return self.play_on(orders, OrderTimes([0.0] * len(orders), [[] for _ in orders]))

    def play_on(self, orders: Sequence[Sequence[int]], played: OrderTimes) -> OrderTimes | None:
        """When each action ends, where some beginning of each order was `played` already; None for a deadlock.

        No action of those beginnings may need one behind them. `played` becomes the answer.
        """
        seconds, delay, slot, need = self.seconds, self.delay, self.slot, self.need
        firsts, ends = played
        arrived = [_NOT_YET] * self.num_slots
        for order, own in zip(orders, ends, strict=True):
            for code, end in zip(order, own):  # noqa: B905 - only the beginnings
                fills = slot[code]
                if fills >= 0:
                    arrived[fills] = end + delay[code]
        blocked = [-1] * self.num_slots  # the rank that stands before a slot
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
        """The objective of an order [s]; infinite where it deadlocks. Memory is not looked at."""
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
        """Whether a rank never holds more than it may."""
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
        """[P] the most memory that each rank holds at once."""
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

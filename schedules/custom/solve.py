"""Schedules that keep given rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..checks import check
from ..ir import Action, Edge, Schedule, ScheduleError
from ..kinds import at_least, option
from ..placement import read_placement
from ..timing.costs import UNIT_COSTS, Costs, CostTable
from .ground import Ground, GroundRule, ground_rules
from .notation import Rule
from .search import (
    ClashError,
    Order,
    ScheduleState,
    by_kind,
    by_path,
    contradiction,
    earlier_ones,
    list_schedule,
    numbered,
    search_depth_first,
    topological,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """A schedule by rules: data dependencies are known, and everything else is free.

    Arguments:
        num_microbatches: M.
        rules: see `notation`; a list, or a dict whose keys name them.
        num_ranks: P; may be left out where `placement` lists the stages of each rank.
        placement: [P] the stages of each rank; "plain", stage r on rank r; "cyclic", stage s on rank s mod P; "v", two
            chunks per rank, down the ranks and back up.
        num_chunks: V, stages per rank, for "cyclic" (2 by default).
        split_backward: whether the backward is I and W, or one B.
        prefer: key of an action: of those that may run next, the least is first. By default the one that ends soonest.
        without_backward, owners, num_slices, num_batches, weight_rule, update_every, edges: as in `Schedule`.
        name: of the schedule.

    >>> from stagewright.schedules.custom import in_flight
    >>> P, M = 3, 4
    >>> one_forward_one_backward = in_flight(at_most=lambda rank: P - rank)
    >>> print(Constraints(num_ranks=P, num_microbatches=M, rules=[one_forward_one_backward]).solve().grid())
    rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """

    num_microbatches: int
    rules: Sequence[Rule] | Mapping[str, Rule] = ()
    num_ranks: int | None = None
    placement: str | Sequence[Sequence[int]] = "plain"
    num_chunks: int | None = None
    split_backward: bool = False
    prefer: Callable[[Action], Any] | None = None
    without_backward: Sequence[int] = ()
    owners: Sequence[Sequence[int]] = ()
    num_slices: int = 1
    num_batches: int = 1
    weight_rule: str = "flush"
    update_every: int | None = None
    edges: Sequence[Edge] | None = None
    name: str = "constraints"

    def solve(self, costs: Costs = UNIT_COSTS) -> Schedule:
        """A checked schedule that keeps all rules, short under `costs`; the same for the same rules.

        Each rank begins an action as soon as it may; of several priorities, the one with the shortest makespan is
        taken. It is not the shortest possible: for that, see `synthesize`.

        Raises ValueError for invalid rules, ContradictionError (a ScheduleError) for rules that no order keeps,
        ScheduleError where a filter lets no action continue.
        """
        ground = Ground(self._skeleton(), split_backward=self.split_backward)
        rules = ground_rules(ground, self.rules)
        if self.prefer is not None and not callable(self.prefer):
            raise ValueError(f"prefer={self.prefer!r:.60}: expected a function of an action, or None")
        if not isinstance(costs, Costs):
            raise ValueError(f"costs={costs!r:.60}: expected Costs(forward=..., backward=...)")
        table = costs.table_for(ground.schedule)
        order, state = self._order(ground, rules, table)
        programs = tuple(tuple(order.actions[n] for n in program) for program in state.programs)
        schedule = replace(ground.schedule, programs=programs)
        check(schedule)
        _check_across_ranks(state, rules)
        return schedule

    def _order(self, ground: Ground, rules: Sequence[GroundRule], table: CostTable) -> tuple[Order, ScheduleState]:
        try:
            order = Order(ground, rules)
        except ClashError:
            raise contradiction(ground, rules) from None
        best: ScheduleState | None = None
        shortest = math.inf
        priorities = self._priorities(order, table)
        for priority in priorities:
            state, end = list_schedule(order, table, priority)
            if end is None:
                stuck = state
            elif end < shortest * (1 - 1e-9):
                best, shortest = state, end
        if best is not None:
            return order, best
        if order.filters:
            raise _nothing_goes(stuck)
        state, _ = search_depth_first(order, priorities[0])
        if state.done.bit_count() < len(order.actions):
            raise contradiction(ground, rules)
        return order, state

    def _priorities(self, order: Order, table: CostTable) -> list[list[int]]:
        if self.prefer is None:
            by_paths = [by_path(order, table, kinds_first=kinds_first) for kinds_first in (False, True)]
            return [by_kind(order), *by_paths]
        try:
            return [numbered(order, [self.prefer(action) for action in order.actions])]
        except Exception as error:
            raise ValueError(
                f"prefer={self.prefer!r:.60} fails: {type(error).__name__}: {error}; expected a function of an action "
                f"that returns a number or a tuple of numbers"
            ) from error

    def _skeleton(self) -> Schedule:
        for name in ("num_microbatches", "num_batches"):
            option(name, getattr(self, name), at_least(1))
        if not isinstance(self.without_backward, list | tuple | range | set | frozenset):
            raise ValueError(f"without_backward={self.without_backward!r:.60}: expected stages, such as (0, 1)")
        if not isinstance(self.owners, list | tuple) or not all(isinstance(each, list | tuple) for each in self.owners):
            raise ValueError(f"owners={self.owners!r:.60}: expected the ranks of each stage, as [[0, 1], [1, 0]]")
        placement = read_placement(self.placement, self.num_ranks, self.num_chunks)
        return Schedule(
            name=self.name,
            placement=placement,
            programs=((),) * len(placement),
            num_microbatches=self.num_microbatches,
            without_backward=tuple(self.without_backward),
            owners=tuple(map(tuple, self.owners)),
            num_slices=self.num_slices,
            num_batches=self.num_batches,
            weight_rule=self.weight_rule,
            update_every=self.update_every,
            edges=None if self.edges is None else tuple(self.edges),
        )


def _nothing_goes(state: ScheduleState) -> ScheduleError:
    count = f"{state.done.bit_count()} of {len(state.order.actions)} actions"
    lines = [f"nothing may run next, after {count}:", *state.obstacles()]
    return ScheduleError(
        "\n  ".join(lines) + "\nexpected a filter that lets one of these run; it is asked again when any action ends"
    )


def _check_across_ranks(state: ScheduleState, rules: Sequence[GroundRule]) -> None:
    """Relations between actions of two ranks must follow from messages and programs, or nothing makes ranks wait."""
    order = state.order
    across = [
        (rule, relation)
        for rule in rules
        for relation in rule.relations
        if order.ground.rank[relation.first] != order.ground.rank[relation.then]
    ]
    if not across:
        return
    before = [[order.number[need] for need in order.ground.needs[action]] for action in order.actions]
    for program in state.programs:
        for first, then in pairwise(program):
            before[then].append(first)
    earlier = earlier_ones(before, topological(before))
    for rule, relation in across:
        first, then = (order.number[action] for action in relation)
        if not earlier[then] >> first & 1:
            ranks = order.rank[first], order.rank[then]
            raise ScheduleError(
                f"rule {rule.name!r} wants {relation}, on the ranks {ranks[0]} and {ranks[1]}, but no message makes "
                f"rank {ranks[1]} wait for it: expected a rule for actions of one rank, or an order of rank "
                f"{ranks[1]} in which {relation.then} comes after something that needs {relation.first}"
            )

"""The graph of a problem under some rules, and its cycles."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..ir import LAST_USES, Op, Relation
from .ground import Ground, GroundRule

DATA = "the data"


class Fact(NamedTuple):
    """A relation that a rule asks for, or the data (rule None)."""

    relation: Relation
    rule: str | None

    def __str__(self) -> str:
        why = DATA if self.rule is None else repr(self.rule)
        return f"{self.relation} ({why})"


class ClashError(Exception):
    """No order exists. `lines` name the conflicting actions; `proven`: whether all possibilities were tried."""

    def __init__(self, lines: Sequence[str], *, proven: bool = True) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)
        self.proven = proven


class Order:
    """The graph of all actions as numbers; those of a rank are consecutive.

    Raises ClashError where the rules exclude each other.
    """

    def __init__(self, ground: Ground, rules: Sequence[GroundRule]) -> None:
        self.ground = ground
        # actions, rank: by number
        self.actions = [action for program in ground.schedule.programs for action in program]
        self.number = {action: n for n, action in enumerate(self.actions)}
        self.rank = [ground.rank[action] for action in self.actions]
        # by number, its direct predecessors, with the reasons
        self.before: list[dict[int, Fact]] = [{} for _ in self.actions]
        self.successors: list[list[int]] = [[] for _ in self.actions]  # by number
        for action, needs in ground.needs.items():
            for need in needs:
                self._add(Fact(need.before(action), None))
        for rule in rules:
            for relation in rule.relations:
                self._add(Fact(relation, rule.name))
        # by rank, the stage activations at once, with the name of the rule
        self.limits: dict[int, tuple[int, str]] = {}
        for rule in rules:
            for rank, limit in rule.limits.items():
                if rank not in self.limits or limit < self.limits[rank][0]:
                    self.limits[rank] = limit, rule.name
        self.filters = {rule.name: rule.allows for rule in rules if rule.allows is not None}  # by name
        # rise, net: by number, stage activations that it adds while it runs, and those that remain when it ends
        self.rise = [int(a.op is Op.F) for a in self.actions]
        trains = ground.schedule.trains
        self.net = [int(a.op is Op.F and trains(a.stage)) - int(a.op in LAST_USES) for a in self.actions]
        self.sorted()

    def crosses(self, first: int, then: int) -> bool:
        """Whether a message travels from one action to the other."""
        return self.rank[first] != self.rank[then] and self.before[then][first].rule is None

    def _add(self, fact: Fact) -> None:
        first, then = (self.number[action] for action in fact.relation)
        if first not in self.before[then]:
            self.before[then][first] = fact
            self.successors[first].append(then)

    def sorted(self) -> list[int]:
        """A topological order; ClashError with a short cycle if there is none."""
        order = topological(self.before)
        if len(order) < len(self.actions):
            stuck = set(range(len(self.actions))).difference(order)
            cycle = _shortest_cycle(self.successors, sorted(stuck))
            raise ClashError(_as_lines([self.before[then][first] for first, then in pairwise(cycle)]))
        return order


def _as_lines(facts: Sequence[Fact]) -> list[str]:
    """Each fact once as text; consecutive facts of data become one."""
    shown: list[Fact] = []
    for fact in facts:
        last = shown[-1] if shown else None
        if last is not None and last.rule is None and fact.rule is None and last.relation.then == fact.relation.first:
            shown[-1] = Fact(last.relation.first.before(fact.relation.then), None)
        else:
            shown.append(fact)
    return [str(fact) for fact in dict.fromkeys(shown)]


def _cycle_through(start: int, successors: Sequence[Sequence[int]], inside: set[int]) -> list[int]:
    """A cycle with the fewest actions (breadth-first), its first again at its end; empty if there is none."""
    came: dict[int, int] = {}
    queue = deque([start])
    while queue:
        n = queue.popleft()
        for then in successors[n]:
            if then == start:
                path = [start, n]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if then in inside and then not in came:
                came[then] = n
                queue.append(then)
    return []


def _shortest_cycle(successors: Sequence[Sequence[int]], among: Sequence[int]) -> list[int]:
    """A cycle with the fewest actions through one of the first 200 of `among`, its first again at its end."""
    inside = set(among)
    cycles = (_cycle_through(start, successors, inside) for start in among[:200])
    return min(filter(None, cycles), key=len, default=[])


def topological(before: Sequence[Iterable[int]]) -> list[int]:
    """Numbers, each after its direct predecessors; those on and after a cycle are left out."""
    successors: list[list[int]] = [[] for _ in before]
    waiting = [0] * len(before)
    for n, firsts in enumerate(before):
        for first in firsts:
            successors[first].append(n)
            waiting[n] += 1
    order = [n for n, count in enumerate(waiting) if not count]
    for n in order:
        for then in successors[n]:
            waiting[then] -= 1
            if not waiting[then]:
                order.append(then)
    return order


def earlier_ones(before: Sequence[Iterable[int]], order: Sequence[int]) -> list[int]:
    """All predecessors of each number, as bits, from its direct predecessors and a topological order."""
    earlier = [0] * len(order)
    for n in order:
        for first in before[n]:
            earlier[n] |= earlier[first] | 1 << first
    return earlier

"""Orders that keep all rules: a list scheduler over time, and a depth-first search where that gets stuck; or the rules
that contradict each other.

List scheduling: when a rank is free, it begins the action with the least priority among those whose predecessors have
ended and arrived. Depth-first search: the state is the set of actions that have run (bits), independent of time. All
actions that take no limited memory run at once, since running them early never excludes an order; each forward that
takes some is a branch, and no set is visited twice.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

from ..ir import LAST_USES, Action, Op, Relation, ScheduleError
from ..timing.costs import UNIT_COSTS, CostTable
from .ground import Ground, GroundRule
from .notation import SoFar

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


MOST_STATES = 20_000


class ScheduleState:
    """Actions that have run so far, and those that may begin."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.waiting = [len(before) for before in order.before]  # by number, predecessors that have not ended
        self.held = [0] * order.ground.schedule.num_ranks  # by rank, stage activations
        self.programs: list[list[int]] = [[] for _ in self.held]  # by rank, numbers in order
        self.done = 0  # all of them, as bits
        self._begun: set[Action] = set()
        self._own: list[list[Action]] = [[] for _ in self.held]

    def copy(self) -> ScheduleState:
        """A copy to continue from in another way; filters are not asked there."""
        other = object.__new__(ScheduleState)
        other.order, other.done = self.order, self.done
        other.waiting, other.held = self.waiting.copy(), self.held.copy()
        other.programs = [program.copy() for program in self.programs]
        other._begun, other._own = self._begun, self._own
        return other

    def why_not(self, n: int) -> str | None:
        """Why an action may not begin although its inputs are there; None: it may."""
        order = self.order
        rank, action = order.rank[n], order.actions[n]
        if rank in order.limits:
            limit, name = order.limits[rank]
            if self.held[rank] + order.rise[n] > limit:
                return f"rank {rank} holds {self.held[rank]}, with at most {limit} allowed by {name!r}"
        for name, allows in order.filters.items():
            so_far = SoFar(rank=rank, program=self._own[rank], in_flight=self.held[rank], begun=self._begun)
            try:
                allowed = allows(action, so_far)
            except Exception as error:
                raise ValueError(f"rule {name!r} fails at {action}: {type(error).__name__}: {error}") from error
            if not isinstance(allowed, bool):
                raise ValueError(f"rule {name!r} returns {allowed!r:.60} for {action}: expected True or False")
            if not allowed:
                return f"{name!r} says no"
        return None

    def begin(self, n: int) -> None:
        order = self.order
        rank = order.rank[n]
        self.programs[rank].append(n)
        self.done |= 1 << n
        if order.filters:
            self._own[rank].append(order.actions[n])
            self._begun.add(order.actions[n])
        self.held[rank] += order.rise[n]

    def end(self, n: int) -> list[int]:
        """An action ends; returns those that waited for nothing else."""
        self.held[self.order.rank[n]] += self.order.net[n] - self.order.rise[n]
        freed = []
        for then in self.order.successors[n]:
            self.waiting[then] -= 1
            if not self.waiting[then]:
                freed.append(then)
        return freed

    def _reasons(self, able: Sequence[int]) -> list[str]:
        by_reason: dict[str | None, list[str]] = {}
        for n in able:
            by_reason.setdefault(self.why_not(n), []).append(str(self.order.actions[n]))
        return [
            f"{names[0]}{f' (and {len(names) - 1} more)' * (len(names) > 1)} may not begin: {why}"
            for why, names in list(by_reason.items())[:3]
        ]

    def obstacles(self) -> list[str]:
        """By unfinished rank, what it waits for."""
        order, lines = self.order, []
        for rank, program in enumerate(self.programs):
            own = [n for n, its in enumerate(order.rank) if its == rank and not self.done >> n & 1]
            if not own:
                continue
            able = [n for n in own if not self.waiting[n]]
            reasons = self._reasons(able)
            freeing = [n for n in own if order.net[n] < 0 and self.waiting[n]]
            for n in freeing[:1] if able else own[:1]:
                lacking, why = next((b, w) for b, w in order.before[n].items() if not self.done >> b & 1)
                by_rule = f" ({why.rule!r})" if why.rule is not None else ""
                reasons.append(f"{order.actions[n]} waits for {order.actions[lacking]}{by_rule}")
            ran = " ".join(str(order.actions[n]) for n in program[-3:]) or "nothing"
            lines.append(f"rank {rank}, after {ran}: {'; '.join(reasons)}")
        return lines


def list_schedule(order: Order, table: CostTable, priority: Sequence[int]) -> tuple[ScheduleState, float | None]:
    """Each rank begins an action as soon as it is free and one may begin, the least by `priority` first.

    An action may begin when its inputs have ended, and have arrived where they ran on another rank. Returns the last
    state, and when the last action ended [s]; None: all ranks were stuck before. O(actions * log + choices).
    """
    state = ScheduleState(order)
    seconds = [table.of(a.op, a.stage, a.index) for a in order.actions]
    latency = [table.latency[a.stage] for a in order.actions]
    ready: list[list[tuple[int, int]]] = [[] for _ in state.held]  # by rank: (priority, number)
    arrives = [0.0] * len(seconds)
    free = [True] * len(state.held)
    # (time, an action can begin rather than ends, number)
    events = [(0.0, True, n) for n, count in enumerate(state.waiting) if not count]
    now, ended = 0.0, 0
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, begins, n = heappop(events)
            rank = order.rank[n]
            if begins:
                insort(ready[rank], (priority[n], n))
                continue
            ended += 1
            free[rank] = True
            for then in order.successors[n]:
                arrives[then] = max(arrives[then], now + latency[n] * order.crosses(n, then))
            for then in state.end(n):
                heappush(events, (arrives[then], True, then))
        for rank, able in enumerate(ready):
            chosen = next((each for each in able if state.why_not(each[1]) is None), None) if free[rank] else None
            if chosen is not None:
                n = chosen[1]
                able.remove(chosen)
                state.begin(n)
                free[rank] = False
                heappush(events, (now + seconds[n], False, n))
    return state, now if ended == len(seconds) else None


def search_depth_first(order: Order, priority: Sequence[int]) -> tuple[ScheduleState, bool]:
    """A state in which all actions have run, found without regard to time, or one from which none can continue.

    The flag says whether all possibilities were tried, up to MOST_STATES states.
    """
    everything = (1 << len(order.actions)) - 1
    start = ScheduleState(order)
    stack = [(start, {n for n, count in enumerate(start.waiting) if not count})]
    seen: set[int] = set()
    farthest = start
    while stack and len(seen) < MOST_STATES:
        state, able = stack.pop()
        _run_harmless(state, able)
        if state.done == everything:
            return state, True
        if state.done in seen:
            continue
        seen.add(state.done)
        if state.done.bit_count() > farthest.done.bit_count():
            farthest = state
        choices = sorted((n for n in able if state.why_not(n) is None), key=priority.__getitem__, reverse=True)
        for n in choices:
            other = state.copy()
            other.begin(n)
            stack.append((other, (able - {n}) | set(other.end(n))))
    return farthest, not stack


def _run_harmless(state: ScheduleState, able: set[int]) -> None:
    order = state.order
    going = True
    while going:
        going = False
        for n in sorted(able):
            rank = order.rank[n]
            is_harmless = order.actions[n].op is not Op.F or rank not in order.limits
            if is_harmless and state.why_not(n) is None:
                state.begin(n)
                able.remove(n)
                able.update(state.end(n))
                going = True


def numbered(order: Order, keys: Iterable[Any]) -> list[int]:
    """Priority by number, from a key of each, equal ones in the order of (microbatch, stage)."""
    ties = [(key, a.index, a.stage, n) for n, (a, key) in enumerate(zip(order.actions, keys, strict=True))]
    priority = [0] * len(ties)
    for at, (*_, n) in enumerate(sorted(ties)):
        priority[n] = at
    return priority


def by_kind(order: Order) -> list[int]:
    """Priority of backwards, then forwards, then weight gradients; within each, in the order of microbatches."""
    kinds = {Op.F: 1, Op.W: 2}
    return numbered(order, [kinds.get(action.op, 0) for action in order.actions])


def by_path(order: Order, table: CostTable, *, kinds_first: bool) -> list[int]:
    """Priority of the action with the longest path of work after it; `kinds_first`: within the kinds of `by_kind`."""
    tails = [0.0] * len(order.actions)
    for n in reversed(order.sorted()):
        action = order.actions[n]
        after = max((tails[then] for then in order.successors[n]), default=0.0)
        tails[n] = after + table.of(action.op, action.stage, action.index)
    kinds = {Op.F: 1, Op.W: 2} if kinds_first else {}
    return numbered(order, [(kinds.get(a.op, 0), -tail) for a, tail in zip(order.actions, tails, strict=True)])


class ContradictionError(ScheduleError):
    """Rules that no order keeps; `rules` are their names: without any one of them there is an order."""

    def __init__(self, message: str, rules: Sequence[str]) -> None:
        super().__init__(message)
        self.rules = tuple(rules)


def contradiction(ground: Ground, rules: Sequence[GroundRule]) -> ContradictionError:
    """The error for rules of which no order is known that keeps them all. Filters are ignored, since they are asked
    last."""
    kept = [replace(rule, allows=None) for rule in rules]
    clash = _clash(ground, kept)
    assert clash is not None
    for rule in list(kept):
        without = [each for each in kept if each is not rule]
        found = _clash(ground, without)
        if found is not None:
            kept, clash = without, found
    names = [repr(rule.name) for rule in kept]
    if not clash.proven:
        title = f"no order found that keeps {' and '.join(names)}, after {MOST_STATES:,} tries; it may exist:"
    elif len(kept) == 1:
        title = f"rule {names[0]} cannot be kept:"
    else:
        title = f"{len(kept)} rules contradict each other, and without any one of them there is an order:"
        title = "\n  ".join([title, *names])
    at = "they clash at" if len(kept) > 1 else "it clashes at"
    return ContradictionError("\n  ".join([f"{title}\n{at}", *clash.lines]), [rule.name for rule in kept])


def _clash(ground: Ground, rules: Sequence[GroundRule]) -> ClashError | None:
    try:
        order = Order(ground, rules)
    except ClashError as clash:
        return clash
    priority = by_kind(order)
    _, end = list_schedule(order, UNIT_COSTS.table_for(ground.schedule), priority)
    if end is not None:
        return None
    state, tried_all = search_depth_first(order, priority)
    if state.done.bit_count() == len(order.actions):
        return None
    return ClashError(state.obstacles(), proven=tried_all)

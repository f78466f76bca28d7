"""Order of a problem under some rules: its graph, what follows from actions that stand side by side, and cycles.

Actions that rules put right after one another are a *block*: their rank runs nothing between them. So what must come
before any of them on that rank comes before the first, and what comes behind any of them comes behind the last:

    F3 [right before] B0     and   F2 -> B0 (data)      gives   F2 -> F3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..ir import LAST_USES, Action, Op, Relation
from .ground import Ground, GroundRule

DATA = "the data"


class Fact(NamedTuple):
    """A relation that a rule asks for, or the data."""

    relation: Relation
    rule: str | None  # None: the data

    def __str__(self) -> str:
        why = DATA if self.rule is None else repr(self.rule)
        return f"{self.relation} ({why})"


class ClashError(Exception):
    """No order exists. `lines` say at which actions, `facts` what cannot all hold, where that is known; `proven`:
    whether all ways were tried."""

    def __init__(self, lines: Sequence[str], *, facts: Sequence[Fact] = (), proven: bool = True) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)
        self.facts = tuple(facts)
        self.proven = proven


class _Derived(NamedTuple):
    """Reason of an edge that follows from others: `start` comes before `end`, and nothing stands within `block`."""

    start: int
    end: int
    block: list[int]
    age: int  # edges that were there before


class Order:
    """The graph of all actions, in numbers: those of a rank are consecutive, those of a block too, in its order.

    Attributes:
        actions, rank: by number.
        before, behind: by number, its direct predecessors, with the reasons, and successors.
        block: by number, the numbers of its block.
        limits: by rank, the stage activations at once, with the name of the rule.
        rise, net: by number, stage activations that it adds while it runs, and those that stay behind it.
        climb: by number of the first of a block, the most activations that this adds on its way.
        filters: by name.

    Raises ClashError where the rules exclude each other.
    """

    def __init__(self, ground: Ground, rules: Sequence[GroundRule]) -> None:
        self.ground = ground
        chains = _chains(rules)
        self.actions = [a for program in ground.schedule.programs for a in _with_chains(program, chains)]
        self.number = {action: n for n, action in enumerate(self.actions)}
        self.rank = [ground.rank[action] for action in self.actions]
        self.block = [[self.number[a] for a in chains.get(action, (action,))] for action in self.actions]
        self.before: list[dict[int, Fact | _Derived]] = [{} for _ in self.actions]
        self._age: dict[tuple[int, int], int] = {}
        self.behind: list[list[int]] = [[] for _ in self.actions]
        for action, needs in ground.needs.items():
            for need in needs:
                self._add(Fact(need.before(action), None))
        for rule in rules:
            for relation in rule.relations:
                self._add(Fact(relation, rule.name))
        self.limits: dict[int, tuple[int, str]] = {}
        for rule in rules:
            for rank, limit in rule.limits.items():
                if rank not in self.limits or limit < self.limits[rank][0]:
                    self.limits[rank] = limit, rule.name
        self.filters = {rule.name: rule.allows for rule in rules if rule.allows is not None}
        self.rise = [int(a.op is Op.F) for a in self.actions]
        trains = ground.schedule.trains
        self.net = [int(a.op is Op.F and trains(a.stage)) - int(a.op in LAST_USES) for a in self.actions]
        self.climb = [self._climb(block, n) for n, block in enumerate(self.block)]
        self._close()

    def _climb(self, block: Sequence[int], n: int) -> int:
        held = most = 0
        for member in block if n == block[0] else ():
            most = max(most, held + self.rise[member])
            held += self.net[member]
        return most

    def crosses(self, first: int, then: int) -> bool:
        """Whether a message goes from one action to the other."""
        why = self.before[then][first]
        return self.rank[first] != self.rank[then] and isinstance(why, Fact) and why.rule is None

    def _add(self, fact: Fact) -> None:
        first, then = self.number[fact.relation.first], self.number[fact.relation.then]
        if not self._link(first, then, fact) and fact.relation.adjacent:
            self.before[then][first] = fact  # it says more

    def _link(self, first: int, then: int, why: Fact | _Derived) -> bool:
        if first in self.before[then]:
            return False
        self.before[then][first] = why
        self.behind[first].append(then)
        self._age[first, then] = len(self._age)
        return True

    def _close(self) -> None:
        """Add what follows from blocks until nothing does; ClashError for a cycle."""
        order = self.sorted()
        if all(len(block) == 1 for block in self.block):
            return
        masks: dict[int, int] = {}
        for n, rank in enumerate(self.rank):
            masks[rank] = masks.get(rank, 0) | 1 << n
        not_last = sum(1 << n for n, block in enumerate(self.block) if n != block[-1])
        changed = True
        while changed:
            changed = False
            position = {n: at for at, n in enumerate(order)}
            earlier = earlier_ones(self.before, order)
            for n in order:
                block = self.block[n]
                mine = sum(1 << member for member in block)
                own = earlier[n] & masks[self.rank[n]]
                # Of what a block opens, all must come before; of several that follow each other the last says it.
                open_ends = {self.block[m][-1]: m for m in _bits(((own & not_last) << 1) & ~earlier[n] & ~mine)}
                said = 0
                for last in sorted(open_ends, key=position.__getitem__, reverse=True):
                    if not said >> last & 1:
                        inner = self.block[last]
                        start = inner[inner.index(open_ends[last]) - 1]
                        changed = self._link(last, n, _Derived(start, n, inner, len(self._age))) or changed
                        said |= earlier[last]
                if n == block[0]:
                    continue
                between = own & ~mine & ~earlier[block[0]]
                for other in sorted(_bits(between), key=position.__getitem__, reverse=True):
                    if between >> other & 1:
                        why = _Derived(other, n, block, len(self._age))
                        changed = self._link(other, block[0], why) or changed
                        between &= ~earlier[other]
            order = self.sorted()

    def sorted(self) -> list[int]:
        """A topological order; ClashError with a short cycle where there is none."""
        order = topological(self.before)
        if len(order) < len(self.actions):
            stuck = set(range(len(self.actions))).difference(order)
            facts = self._facts(_shortest_cycle(self.behind, sorted(stuck)))
            raise ClashError(_without_detours(facts), facts=list(dict.fromkeys(facts)))
        return order

    def _facts(self, path: Sequence[int]) -> list[Fact]:
        """Rules and data along a path, and all that its derived edges follow from."""
        facts: list[Fact] = []
        for first, then in pairwise(path):
            why = self.before[then][first]
            if isinstance(why, Fact):
                facts.append(why)
            else:
                facts += self._facts(self._path(why))
                facts += self._facts(why.block)
        return facts

    def _path(self, why: _Derived) -> list[int]:
        """The shortest path behind a derived edge, of edges that are older than it."""
        return _shortest_path(
            why.start, why.end, lambda n: (then for then in self.behind[n] if self._age[n, then] < why.age)
        )


def _without_detours(facts: Sequence[Fact]) -> list[str]:
    """Words on each fact once; what follows from data alone in one step."""
    shown: list[Fact] = []
    for fact in facts:
        last = shown[-1] if shown else None
        if last is not None and last.rule is None and fact.rule is None and last.relation.then == fact.relation.first:
            shown[-1] = Fact(last.relation.first.before(fact.relation.then), None)
        else:
            shown.append(fact)
    return [str(fact) for fact in dict.fromkeys(shown)]


def _chains(rules: Sequence[GroundRule]) -> dict[Action, list[Action]]:
    """Actions that stand side by side, by each of them; ClashError where two are to be next to the same one."""
    next_of: dict[Action, tuple[Action, str]] = {}
    previous_of: dict[Action, tuple[Action, str]] = {}
    for rule in rules:
        for first, then, adjacent in rule.relations:
            if not adjacent:
                continue
            for table, one, other in ((next_of, first, then), (previous_of, then, first)):
                known = table.setdefault(one, (other, rule.name))
                if known[0] != other:
                    ends = [(one, each) if table is next_of else (each, one) for each in (known[0], other)]
                    names = (known[1], rule.name)
                    facts = [Fact(Relation(*pair, True), name) for pair, name in zip(ends, names, strict=True)]
                    raise ClashError([str(fact) for fact in facts], facts=facts)
    chains: dict[Action, list[Action]] = {}
    for action in next_of:
        if action in previous_of:
            continue
        chain = [action]
        while chain[-1] in next_of:
            chain.append(next_of[chain[-1]][0])
        chains.update((member, chain) for member in chain)
    # What is left goes round in circles.
    for action in next_of:
        if action not in chains:
            circle = [action]
            while next_of[circle[-1]][0] != action:
                circle.append(next_of[circle[-1]][0])
            facts = [Fact(Relation(a, next_of[a][0], True), next_of[a][1]) for a in circle]
            raise ClashError([str(fact) for fact in facts], facts=facts)
    return chains


def _with_chains(program: Sequence[Action], chains: dict[Action, list[Action]]) -> Iterator[Action]:
    for action in program:
        chain = chains.get(action)
        if chain is None:
            yield action
        elif chain[0] == action:
            yield from chain


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def _shortest_path(start: int, end: int, behind: Callable[[int], Iterable[int]]) -> list[int]:
    """From start to end, which may be the same, in the fewest steps; empty where no way leads there."""
    came: dict[int, int] = {}
    queue = deque([start])
    while queue:
        n = queue.popleft()
        for then in behind(n):
            if then == end:
                path = [end, n]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if then != start and then not in came:
                came[then] = n
                queue.append(then)
    return []


def _shortest_cycle(behind: Sequence[Sequence[int]], among: Sequence[int]) -> list[int]:
    """A cycle of the fewest actions, its first again at its end, through one of the first 200 of `among`."""
    inside = set(among)
    cycles = (_shortest_path(s, s, lambda n: (then for then in behind[n] if then in inside)) for s in among[:200])
    return min(filter(None, cycles), key=len, default=[])


def topological(before: Sequence[Iterable[int]]) -> list[int]:
    """Numbers, each behind its direct predecessors; those on and behind a cycle are left out."""
    behind: list[list[int]] = [[] for _ in before]
    waiting = [0] * len(before)
    for n, firsts in enumerate(before):
        for first in firsts:
            behind[first].append(n)
            waiting[n] += 1
    order = [n for n, count in enumerate(waiting) if not count]
    for n in order:
        for then in behind[n]:
            waiting[then] -= 1
            if not waiting[then]:
                order.append(then)
    return order


def earlier_ones(before: Sequence[Iterable[int]], order: Sequence[int]) -> list[int]:
    """By number all that come before it, as bits, from its direct predecessors and a topological order."""
    earlier = [0] * len(order)
    for n in order:
        for first in before[n]:
            earlier[n] |= earlier[first] | 1 << first
    return earlier

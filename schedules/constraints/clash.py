"""Rules that contradict each other: as few as there can be, and the actions at which they clash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import ScheduleError
from ..timing.costs import UNIT_COSTS
from .ground import Ground, GroundRule
from .order import ClashError, Fact, Order
from .search import MOST_STATES, by_kind, list_schedule, search


class ContradictionError(ScheduleError):
    """Rules that no order keeps; `rules` are their names: without any one of them there is an order."""

    def __init__(self, message: str, rules: Sequence[str]) -> None:
        super().__init__(message)
        self.rules = tuple(rules)


def contradiction(ground: Ground, rules: Sequence[GroundRule]) -> ContradictionError:
    """The error for rules of which no order is known that keeps them all. Filters are left out: they come last."""
    kept = [replace(rule, allows=None) for rule in rules]
    clash = _clash(ground, kept)
    assert clash is not None
    for rule in list(kept):
        without = [each for each in kept if each is not rule]
        found = _clash(ground, without)
        if found is not None:
            kept, clash = without, found
    if clash.facts:
        kept, clash = _fewest_facts(ground, kept, clash)
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
    state, tried_all = search(order, priority)
    if state.done.bit_count() == len(order.actions):
        return None
    return ClashError(state.still(), proven=tried_all)


def _fewest_facts(
    ground: Ground, rules: Sequence[GroundRule], clash: ClashError
) -> tuple[list[GroundRule], ClashError]:
    """The rules with as few of their relations as contradict each other; of those that showed it."""

    def limited(facts: Sequence[Fact]) -> list[GroundRule]:
        kept = {(fact.first, fact.then) for fact in facts}
        return [
            replace(rule, limits={}, relations=tuple(each for each in rule.relations if each[:2] in kept))
            for rule in rules
        ]

    facts = [fact for fact in clash.facts if fact.rule is not None]
    for fact in list(facts):
        fewer = [each for each in facts if each is not fact]
        found = _clash(ground, limited(fewer))
        if found is not None and found.facts:
            facts, clash = fewer, found
    return list(rules), clash

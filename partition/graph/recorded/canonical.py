"""A record in an order that follows from who needs what, and not from the order in which its calls were made.

for kind in {"a", "b"}:           one process: a, b     another: b, a, since strings hash differently
    made[kind] = self.parts[kind](x)
return made["a"] + made["b"]      both, canonical: a, b

Calls stay behind all that they need: values, what changes in place, what keeps its order with others (`together`),
units that keep state. What one checkpoint runs again stays in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations, count, pairwise

from torch import nn

from .calls import DRAWS, Call, GlueCall, Record, UnitCall
from .templates import Ref, State, renumbered
from .words import Words

_UNIT = (1 << DRAWS) - 1


def in_canonical_order(record: Record, model: nn.Module) -> Record:
    """The same program with its calls and values in canonical order; equal for records of processes that made
    independent calls in other orders."""
    # Other shapes, which are other numbers among the arguments, change no order that follows without them.
    keys = zip(_names(record, Words(model, numbers=False)), _names(record, Words(model)), count(), strict=False)
    return _in_order(record, _arranged(record, _needs(record), list(keys)))


def _takes(call: Call) -> list[int]:
    return [each.number for each in call.templates() if isinstance(each, Ref)]


def _makers(calls: Sequence[Call]) -> dict[int, int]:
    return {number: i for i, call in enumerate(calls) for number in call.made()}


def _needs(record: Record) -> list[set[int]]:
    """By call, earlier ones that must stay in front of it."""
    calls = record.calls
    maker = _makers(calls)
    taken = [frozenset(_takes(call)) for call in calls]
    found = [{maker[n] for n in taken[i] if n in maker} | call.behind for i, call in enumerate(calls)]
    partners: dict[int, set[int]] = {}
    for pair in record.together:
        first, second = sorted(pair[:2])
        partners.setdefault(second, set()).add(first)
        if 0 <= first < second:
            found[second].add(first)
    inputs = {n for each in taken for n in each if n not in maker}
    for i, call in enumerate(calls):
        if call.changed or call.writes:  # behind all that read what was there before
            old = set(call.changed)
            for each in partners.get(i, ()):
                old |= inputs if each < 0 else set(calls[each].made())
            found[i] |= {j for j in range(i) if taken[j] & old}
    users: dict[int, list[int]] = {}
    for i, call in enumerate(calls):
        for number in {each.number for each in call.templates() if isinstance(each, State)}:
            users.setdefault(number, []).append(i)
    for first, second in (pair for each in users.values() for pair in pairwise(each)):
        found[second].add(first)
    units = [(i, call, set(call.module.modules())) for i, call in enumerate(calls) if isinstance(call, UnitCall)]
    for (i, one, parts), (j, other, others) in combinations(units, 2):
        if record.handed_on or ((one.keeps_state or other.keeps_state) and not parts.isdisjoint(others)):
            found[j].add(i)
    return [each - {i} for i, each in enumerate(found)]


def _names(record: Record, words: Words) -> list[str]:
    """By call, a name that no order has a part in: what it is called with, by the names of the calls that made it."""
    names: dict[int, str] = {}

    def name(number: int) -> str:
        return names.get(number, f"input {number}")

    keys = []
    for call in record.calls:
        text = words.call(call, name)
        keys.append(key := blake2b(text.encode(), digest_size=12).hexdigest())
        for before, after in call.changed.items():
            names[after] = f"{key}<{name(before)}"
        names |= {number: f"{key}.{place}" for place, number in call.results.items()}
    return keys


def _arranged(record: Record, before: Sequence[set[int]], keys: Sequence[tuple[str, str, int]]) -> list[int]:
    """The calls behind the results first, each behind what it needs, then the others; regions in one piece."""
    calls = record.calls
    first: dict[object, int] = {}
    group = [i if call.region is None else first.setdefault(call.region, i) for i, call in enumerate(calls)]
    members: dict[int, list[int]] = {}
    for i, each in enumerate(group):
        members.setdefault(each, []).append(i)
    maker = _makers(calls)
    needs = []
    for call, all_of in zip(calls, before, strict=True):  # in the order of the arguments; then what else it needs
        made = [maker[number] for number in _takes(call) if number in maker]
        needs.append(list(dict.fromkeys([*made, *sorted(all_of, key=keys.__getitem__)])))
    for each, own in members.items():
        own.sort(key=keys.__getitem__)
        members[each] = _behind_needs(own, {i: [j for j in needs[i] if group[j] == each] for i in own})
    around = {each: [group[j] for i in own for j in needs[i] if group[j] != each] for each, own in members.items()}
    results = [group[maker[each.number]] for each in record.results if isinstance(each, Ref) and each.number in maker]
    others = sorted(members, key=lambda each: keys[members[each][0]])
    return [i for each in _behind_needs([*results, *others], around) for i in members[each]]


def _behind_needs(wanted: Sequence[int], before: Mapping[int, Sequence[int]]) -> list[int]:
    found: dict[int, None] = {}
    todo = list(reversed(wanted))
    while todo:
        missing = next((each for each in before[todo[-1]] if each not in found), None)
        if missing is None:
            found.setdefault(todo.pop())
        else:
            todo.append(missing)
    return list(found)


def _in_order(record: Record, order: Sequence[int]) -> Record:
    """The record with its calls in this order: they, their values, runs of units and draws are numbered anew."""
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    made = {number for call in record.calls for number in call.made()}
    numbers = {number: number for number in record.bytes_of if number not in made}
    for i in order:
        for number in record.calls[i].made():
            numbers.setdefault(number, len(numbers))
    times: dict[str, int] = {}
    draws: dict[int, int] = {}
    calls: list[UnitCall | GlueCall] = []
    for i in order:
        call = record.calls[i]
        enters = call.enters
        if enters is not None:
            enters = enters & ~_UNIT | draws.setdefault(enters & _UNIT, len(draws))
        new = replace(
            call,
            args=renumbered(call.args, numbers),
            kwargs=renumbered(call.kwargs, numbers),
            results={at: numbers[number] for at, number in call.results.items()},
            changed={numbers[old]: numbers[number] for old, number in call.changed.items()},
            behind=frozenset(place[each] for each in call.behind),
            enters=enters,
        )
        if isinstance(new, UnitCall):
            path = new.name.partition("#")[0]
            times[path] = times.get(path, 0) + 1
            new.name = path if times[path] == 1 else f"{path}#{times[path]}"
        calls.append(new)
    return replace(
        record,
        calls=tuple(calls),
        results=tuple(renumbered(each, numbers) for each in record.results),
        bytes_of={numbers[number]: size for number, size in record.bytes_of.items()},
        together=tuple(sorted((place[a], place[b], why) for a, b, why in record.together)),
        as_run=tuple(place[i] for i in range(len(order))),
    )

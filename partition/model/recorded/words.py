"""A record in words that are the same in every process, and in an order that is.

words   no id, hash or address; sets sorted, modules by their paths
order   follows from who needs what, and not from the order in which its calls were made:

    for kind in {"a", "b"}:           one process: a, b     another: b, a, since strings hash differently
        made[kind] = self.parts[kind](x)
    return made["a"] + made["b"]      both, canonical: a, b

Calls stay after all that they need: values, what changes in place, what keeps its order with others (`together`),
units that keep state. What one checkpoint runs again stays in one piece.
"""

from __future__ import annotations

import enum
import re
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations, count, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..made_up import Shaped
from ..reach import closed_over
from ..units import Step
from .calls import DRAWS, Call, Context, DecisionGuard, GlueCall, Record, Store, UnitCall
from .templates import Constant, MadeObject, Parts, Ref, Slot, Template, renumbered

# Modules of types whose text says all of a value; of other objects the class alone counts.
_TOLD = ("builtins", "functools", "numpy", "torch")


class Words:
    """Texts of values and calls, with modules by their paths; without numbers, which shapes decide on, or with them."""

    def __init__(self, model: nn.Module, *, numbers: bool = True) -> None:
        self._numbers = numbers
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._open: list[object] = []  # being looked into, outermost first
        self._states: dict[int, int] = {}  # in the order in which they are named here

    def call(self, call: Any, value: Callable[[int], str]) -> str:
        """The text of a call, with its modes and arguments; values are named by `value`."""
        if isinstance(call, UnitCall):
            what = f"{call.name.partition('#')[0]} ({type(call.module).__name__})"
        else:
            what = self.value(call.function)
        region = "" if call.region is None else f" in checkpoint({self.value(dict(call.region.options))})"
        arguments = [self._template(each, value) for each in call.args.parts]
        named = zip(call.kwargs.keys, call.kwargs.parts, strict=True)
        arguments += [f"{key}={self._template(each, value)}" for key, each in named]
        grad, autocast, settings = call.context
        around = {each.name: self.value(each.value) for each in settings}
        modes = "" if call.context == Context() else f" under {(grad, autocast)}{around or ''}"
        return f"{what}({', '.join(arguments)}){modes}{region}"

    def record(self, record: Record) -> Iterator[Step]:
        regions: dict[object, int] = {}
        for call in record.calls:
            region = "" if call.region is None else regions.setdefault(call.region, len(regions))
            name = call.name if isinstance(call, UnitCall) else ""
            gives = f"{call.results} {_plain(call.structure)} {call.changed} {call.writes} {call.enters}"
            after = f"{sorted(call.follows)} {name} {region}"
            yield Step(f"{self.call(call, _number)} -> {gives} {after}", call.line)
        results = [self._template(each, _number) for each in record.results]
        # Not what belongs together, which differs where one process has filled a cache of its units.
        yield Step(f"the model returns {results} as {record.output_form}")

    def _template(self, template: Template, value: Callable[[int], str]) -> str:
        if isinstance(template, Ref):
            return value(template.number)
        if isinstance(template, Slot):
            return f"{self.value(template.module)}.{template.key}"
        if isinstance(template, Constant):
            return self.value(template.value)
        if isinstance(template, Parts):
            parts = [self._template(each, value) for each in template.parts]
            if template.kind is not dict:
                return f"{template.kind.__name__ if template.kind else _plain(template.spec)}({', '.join(parts)})"
            return str(dict(zip(map(self.value, template.keys), parts, strict=True)))
        assert isinstance(template, MadeObject)
        number = self._states.setdefault(template.number, len(self._states))
        held = {key: self._template(each, value) for key, each in template.attributes.items()}
        items = None if template.items is None else self._template(template.items, value)
        return f"{template.kind.__qualname__} {number}{held}{items}"

    def value(self, value: Any) -> str:
        """A value; of objects that are no data, their class alone."""
        if isinstance(value, nn.Module):
            path = self._paths.get(id(value))
            return type(value).__qualname__ if path is None else f"module {path!r}"
        if isinstance(value, set | frozenset):
            return f"set{sorted(map(self.value, value))}"
        name, parts = _parts(value)
        if parts is None or any(value is each for each in self._open):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return "number" if is_number and not self._numbers else name
        self._open.append(value)
        text = f"{name}{[*map(self.value, parts)]}"
        self._open.pop()
        return text


def _parts(value: Any) -> tuple[str, Iterable[Any] | None]:
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return _tensor(value) + _content(value), None
    if isinstance(value, np.ndarray):
        return f"array{value.shape} {value.dtype} {'' if value.dtype.hasobject else zlib.crc32(value.tobytes())}", None
    if isinstance(value, Mapping):
        return kind, [*value, *value.values()]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return kind, value
    if isinstance(value, slice):
        return kind, [value.start, value.stop, value.step]
    if isinstance(value, DecisionGuard | Store | Shaped):
        return kind, [getattr(value, key) for key in value.__slots__ if key != "line"]
    if isinstance(value, types.MethodWrapperType):
        return value.__name__, [value.__self__]
    if isinstance(value, types.FunctionType):
        code = zlib.crc32(value.__code__.co_code)
        return f"{value.__module__}.{value.__qualname__} {code}", [*closed_over(value), *(value.__defaults__ or ())]
    if isinstance(value, torch.device):
        return str(value.type), None  # each process has its own
    is_told = type(value).__module__ in _TOLD or isinstance(value, enum.Enum)
    return _plain(value) if is_told else kind, None


def _number(number: int) -> str:
    return f"v{number}"


def _plain(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _tensor(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return type(tensor).__name__
    return f"{tuple(tensor.shape)} {tensor.dtype}{' wants a gradient' if tensor.requires_grad else ''}"


def _content(tensor: torch.Tensor) -> str:
    """The text of a constant's content: each process has made its own."""
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
        return ""
    with torch.no_grad():
        bytes_of = tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return f" {zlib.crc32(bytes_of.numpy().tobytes())}"


def digest(steps: Iterable[Step]) -> str:
    return blake2b("\n".join(step.text for step in steps).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def modules(root: nn.Module) -> list[Step]:
    """Classes of a model's modules, and shapes and types of its tensors, by name."""
    found = [f"module {name!r}: {type(module).__name__}" for name, module in root.named_modules(remove_duplicate=False)]
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return [Step(each) for each in [*found, *(f"{name!r}: {_tensor(x)}" for name, x in tensors)]]


_UNIT = (1 << DRAWS) - 1


def in_canonical_order(record: Record, model: nn.Module) -> Record:
    """The same program with its calls and values in canonical order; equal for records of processes that made
    independent calls in other orders."""
    # Other shapes, which are other numbers among the arguments, change no order that follows without them.
    names = [_names(record, Words(model, numbers=False)), _names(record, Words(model))]
    keys = zip(*names, *(_uses(record, each) for each in names), count(), strict=False)
    return _in_order(record, _arranged(record, _needs(record), list(keys)))


def _takes(call: Call) -> list[int]:
    return [each.number for each in call.templates() if isinstance(each, Ref)]


def _makers(calls: Sequence[Call]) -> dict[int, int]:
    return {number: i for i, call in enumerate(calls) for number in call.made()}


def _needs(record: Record) -> list[set[int]]:
    """By call, earlier ones that must stay before it."""
    calls = record.calls
    maker = _makers(calls)
    taken = [frozenset(_takes(call)) for call in calls]
    found = [{maker[n] for n in taken[i] if n in maker} | call.follows for i, call in enumerate(calls)]
    partners: dict[int, set[int]] = {}
    for pair in record.together:
        first, second = sorted(pair[:2])
        partners.setdefault(second, set()).add(first)
        if 0 <= first < second:
            found[second].add(first)
    inputs = {n for each in taken for n in each if n not in maker}
    for i, call in enumerate(calls):
        if call.changed or call.writes:  # after all that read what was there before
            old = set(call.changed)
            for each in partners.get(i, ()):
                old |= inputs if each < 0 else set(calls[each].made())
            found[i] |= {j for j in range(i) if taken[j] & old}
    users: dict[int, list[int]] = {}
    for i, call in enumerate(calls):
        for number in {each.number for each in call.templates() if isinstance(each, MadeObject)}:
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
        keys.append(key := blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest())
        for before, after in call.changed.items():
            names[after] = f"{key}<{name(before)}"
        names |= {number: f"{key}.{place}" for place, number in call.results.items()}
    return keys


def _uses(record: Record, names: Sequence[str]) -> list[str]:
    """By call, names of those that take what it makes, and of theirs: calls of one name may be made for others."""
    found: list[str] = []
    takers: dict[int, list[str]] = {}
    for call, name in zip(reversed(record.calls), reversed(names), strict=True):
        used = [each for number in call.made() for each in sorted(takers.get(number, ()))]
        found.append(blake2b("\n".join([name, *used]).encode(), digest_size=12).hexdigest())
        for number in {*_takes(call)}:
            takers.setdefault(number, []).append(found[-1])
    return found[::-1]


def _arranged(record: Record, before: Sequence[set[int]], keys: Sequence[tuple[Any, ...]]) -> list[int]:
    """The calls that make the results first, each after what it needs, then the others; regions in one piece."""
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
            follows=frozenset(place[each] for each in call.follows),
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

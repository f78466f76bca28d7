"""Dependences in a record: calls that count, calls that each stage makes for itself, and what a cut would cost.

tokens, positions = arange(T)  | glue that depends on the model's inputs alone: made wherever it is needed
h = embedding(tokens)          | position 0
m = h.mean()                   | never needed: left out
h = blocks.0(h, positions)     | position 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property

from torch import nn

from ..cut import crossing, forbid
from .calls import DRAWS, GlueCall, Record, UnitCall
from .templates import MadeObject, Ref, Slot


class Flow:
    """The calls of a record."""

    def __init__(self, record: Record) -> None:
        self.record = record  # before any cut
        # value number -> call; none for the model's inputs
        self.maker = {number: i for i, call in enumerate(record.calls) for number in call.made()}
        templates = [call.templates() for call in record.calls]
        # call -> numbers of the values that it takes
        self.values = [[each.number for each in found if isinstance(each, Ref)] for found in templates]
        # call -> the parameters and buffers that it takes
        self.slots = [[each for each in found if isinstance(each, Slot)] for found in templates]
        self._states = [any(isinstance(each, MadeObject) for each in found) for found in templates]
        self.results = [each.number for each in record.results if isinstance(each, Ref)]
        live = self._live()
        self.everywhere = self._everywhere(live)
        if not live - self.everywhere:  # the model is a function of its inputs alone
            self.everywhere = frozenset()
        self.order = sorted(live - self.everywhere)  # the calls that are on one stage each, ascending
        self.position = {call: i for i, call in enumerate(self.order)}  # of each of these in `order`

    def unit_calls(self) -> list[tuple[int, UnitCall]]:
        calls = self.record.calls
        return [(i, call) for i, number in enumerate(self.order) if isinstance(call := calls[number], UnitCall)]

    def sources(self, call: int) -> set[int]:
        made = {self.maker[number] for number in self.values[call] if number in self.maker}
        return (made | self.record.calls[call].follows) - {call}

    def _live(self) -> frozenset[int]:
        calls = self.record.calls
        live: set[int] = set()
        todo = [self.maker[number] for number in self.results if number in self.maker]
        todo += [i for i, call in enumerate(calls) if isinstance(call, UnitCall) or call.writes or call.is_effect]
        while todo:
            call = todo.pop()
            if call not in live:
                live.add(call)
                todo += self.sources(call)
        return frozenset(live)

    def _everywhere(self, live: Iterable[int]) -> frozenset[int]:
        """Glue that depends on the model's inputs and on constant buffers, and draws nothing."""
        calls = self.record.calls
        written = {(id(slot.module), slot.key) for i, call in enumerate(calls) if call.writes for slot in self.slots[i]}
        opened = {id(module) for module in self.record.reads.opened.values()}

        def is_still(slot: Slot) -> bool:
            is_buffer = slot.table == "_buffers" and id(slot.module) in opened
            return is_buffer and (id(slot.module), slot.key) not in written

        found: set[int] = set()
        for i in sorted(live):
            call = calls[i]
            if not isinstance(call, GlueCall) or call.is_random or call.is_effect or call.writes or call.region:
                continue
            if not self._states[i] and all(map(is_still, self.slots[i])) and self.sources(i) <= found:
                found.add(i)
        return frozenset(found)

    # Costs

    @cached_property
    def weights(self) -> list[float]:
        """[n] parameter elements first used at each position."""
        seen: set[int] = set()
        found = []
        for call in self.order:
            fresh = {id(p): p for p in self.parameters(call) if id(p) not in seen}
            seen.update(fresh)
            found.append(float(sum(p.numel() for p in fresh.values())))
        return found

    def parameters(self, call: int) -> list[nn.Parameter]:
        each = self.record.calls[call]
        own = list(each.module.parameters()) if isinstance(each, UnitCall) else []
        return own + [p for slot in self.slots[call] if isinstance(p := slot.tensor(), nn.Parameter)]

    @cached_property
    def crossing_bytes(self) -> list[float]:
        """[n] bytes over a cut before each position; infinite where none may be made."""
        count = len(self.order)
        last: dict[int, int] = dict.fromkeys(self.results, count - 1)
        for position, call in enumerate(self.order):
            for number in self.values[call]:
                last[number] = max(last.get(number, 0), position)
        values = [
            (self.position[call], last[number], self.record.bytes_of[number])
            for number, call in self.maker.items()
            if call in self.position and number in last
        ]
        pairs = [(self._at_or_behind(a), self._at_or_behind(b)) for a, b, _ in self.record.together]
        pairs += [(first, last) for first, last, size in values if size == math.inf]
        return forbid(crossing(count, [each for each in values if each[2] < math.inf]), pairs)

    def _at_or_behind(self, call: int) -> int:
        return next((i for i, each in enumerate(self.order) if each >= call), len(self.order) - 1)

    def parted(self, stage_of: Mapping[int, int]) -> str | None:
        """Why these stages separate what belongs together; None if they do not."""
        for first, second, why in self.record.together:
            one, other = (self.order[self._at_or_behind(each)] for each in (first, second))
            if stage_of[one] != stage_of[other]:
                names = " and ".join(repr(self.name_of(each)) for each in (one, other))
                return (
                    f"stages {stage_of[one]} and {stage_of[other]} part {names}{self.record.calls[other].line}: {why}. "
                    f"Expected both in one stage: split elsewhere, or take an operation that is not in-place "
                    f"(inplace=False)"
                )
        for call, stage in stage_of.items():
            for number in self.values[call]:
                if self.record.bytes_of[number] == math.inf and stage_of.get(self.maker[number], stage) != stage:
                    maker = self.maker[number]
                    return (
                        f"stages {stage_of[maker]} and {stage} part {self.name_of(maker)!r} and {self.name_of(call)!r}"
                        f"{self.record.calls[call].line}: what goes from one to the other has a size that follows from "
                        f"values. Expected both in one stage: split elsewhere"
                    )
        return None

    def name_of(self, call: int) -> str:
        each = self.record.calls[call]
        return each.name if isinstance(each, UnitCall) else getattr(each.function, "__name__", str(each.function))

    def numbers(self, stage_of: Mapping[int, int]) -> dict[int, int | None]:
        """Call -> its number for random numbers; None where the call before it in an opened unit continues. So a
        unit draws the same whether it is opened or not: no cut is between two calls in it that draw."""
        found: dict[int, int | None] = {}
        seen: set[tuple[int, int]] = set()
        for i, call in enumerate(self.record.calls):
            if call.enters is None:
                continue
            unit = call.enters % (1 << DRAWS), stage_of.get(i, -1)
            found[i] = None if unit in seen else call.enters
            seen.add(unit)
        return found

    # Stages

    def travelling(self, stage_of: Mapping[int, int], stage: int, num_stages: int) -> list[int]:
        """Numbers of the values that a stage makes and later ones take."""
        taken = {number for call, its_stage in stage_of.items() if its_stage > stage for number in self.values[call]}
        if stage < num_stages - 1:
            taken |= set(self.results)
        return sorted(n for n in taken if n in self.maker and stage_of.get(self.maker[n]) == stage)

    def needed(self, stage_of: Mapping[int, int], stage: int, *, is_last: bool) -> tuple[list[int], list[int]]:
        """Values that come from elsewhere, those of other stages first, and the calls that the stage makes."""
        given: set[int] = set()
        calls: set[int] = set()
        todo = [call for call, its in stage_of.items() if its == stage]

        def want(number: int) -> None:
            maker = self.maker.get(number)
            if maker is not None and (maker in self.everywhere or stage_of[maker] == stage):
                todo.append(maker)
            else:
                given.add(number)

        for number in self.results if is_last else ():
            want(number)
        while todo:
            call = todo.pop()
            if call in calls:
                continue
            calls.add(call)
            todo += [each for each in self.record.calls[call].follows if each in self.everywhere]
            for number in self.values[call]:
                want(number)
        return sorted(given, key=lambda number: (number not in self.maker, number)), sorted(calls)

    @cached_property
    def steps(self) -> list[object]:
        return [
            each.name if isinstance(each, UnitCall) else each.function
            for each in (self.record.calls[call] for call in self.order)
        ]


def stages_like(flow: Flow, stage_of: Mapping[int, int], other: Flow, *, same_modules: bool) -> dict[int, int]:
    """The stage of each call of `other`: by number where the calls are the same, else by the modules between them.
    `same_modules`: whether the same modules have to run, since each is on a rank already. Raises ValueError, by name,
    where other modules run, or what they need would flow back."""
    if flow.steps == other.steps:
        return {call: stage_of[mine] for call, mine in zip(other.order, flow.order, strict=True)}
    units = {call.name: stage_of[flow.order[i]] for i, call in flow.unit_calls()}
    names = [call.name for _, call in other.unit_calls()]
    odd = sorted(set(units) ^ set(names))
    if odd and same_modules:
        how = "runs now and did not" if odd[0] in names else "does not run now and did"
        raise ValueError(
            f"module {odd[0]!r} {how} when the stages were built: the forward runs other modules for inputs "
            f"of other shapes, or since the model was changed. Expected the same modules for every batch, so that each "
            f"has its stage"
        )
    holders = {id(p): stage for call, stage in sorted(stage_of.items(), reverse=True) for p in flow.parameters(call)}
    last = max(stage_of.values())
    found: dict[int, int] = {}
    for i in other.order:
        call = other.record.calls[i]
        least = max((found[source] for source in other.sources(i) if source in found), default=0)
        held = [holders[id(p)] for p in other.parameters(i) if id(p) in holders]
        found[i] = units[call.name] if isinstance(call, UnitCall) and call.name in units else max([least, *held])
        if found[i] < least or found[i] > last:
            raise ValueError(
                f"{other.name_of(i)!r}{call.line} needs what a later stage makes, for inputs of other shapes or in "
                f"evaluation mode: expected values to flow as when the stages were built, or split points elsewhere"
            )
    why = other.parted(found)
    if why is not None:
        raise ValueError(why)
    return found

"""Choices of what the V stages of a rank recompute, in the order in which they are worth trying.

Where there are few, all: those with the least seconds first. Else

    greedy     each stage its option of least seconds; then always the change that frees most bytes for a second
    alike      all stages the same option, the one with the least seconds first

and, of the first choice that fits, `cheaper` names changes back. Bytes are what the stages keep at the rank's fullest,
and the most that one of them makes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

EVERY = 16  # choices up to which all are tried


class Option(NamedTuple):
    """One row of the table of recomputation (`stage_cost`) for one stage: bytes at the rank's fullest, seconds."""

    name: str
    seconds: float
    kept: float
    again: float


Choice = tuple[Option, ...]  # [V]


def in_turn(options: Sequence[Sequence[Option]]) -> Iterator[Choice]:
    """Choices, each at most once; V lists of the same names in the same order.

    >>> stage = [Option("none", 0, 9, 0), Option("full", 2, 1, 3), Option("selective", 1, 6, 1)]
    >>> [[option.name for option in choice] for choice in in_turn([stage])]
    [['none'], ['selective'], ['full']]
    """
    if len(options[0]) ** len(options) <= EVERY:
        yield from sorted(product(*options), key=lambda choice: (sum(each.seconds for each in choice), _bytes(choice)))
        return
    seen: set[Choice] = set()
    alike = sorted(range(len(options[0])), key=lambda i: sum(each[i].seconds for each in options))
    for choice in (*_greedy(options), *(tuple(each[i] for each in options) for i in alike)):
        if choice not in seen:
            seen.add(choice)
            yield choice


def cheaper(options: Sequence[Sequence[Option]], choice: Choice) -> Iterator[tuple[int, Option]]:
    """Changes of one stage to fewer seconds: the stages with most seconds first, of each the least seconds first."""
    if len(options[0]) ** len(options) <= EVERY:
        return  # all with fewer seconds were tried
    for stage in sorted(range(len(choice)), key=lambda v: -choice[v].seconds):
        for option in sorted(options[stage], key=_order):
            if option.seconds < choice[stage].seconds:
                yield stage, option


def _order(option: Option) -> tuple[float, float]:
    return option.seconds, option.kept + option.again


def _bytes(choice: Sequence[Option]) -> float:
    return sum(option.kept for option in choice) + max(option.again for option in choice)


def _greedy(options: Sequence[Sequence[Option]]) -> Iterator[Choice]:
    now = [min(each, key=_order) for each in options]
    while True:
        yield tuple(now)
        best: tuple[float, int, Option] | None = None
        first, second = (*sorted((each.again for each in now), reverse=True), 0.0)[:2]
        for stage, each in enumerate(options):
            old = now[stage]
            others = second if old.again == first else first  # the most that another stage makes again
            for option in each:
                more = option.seconds - old.seconds
                freed = old.kept - option.kept + first - max(others, option.again)
                if more >= 0 and freed > 0 and (best is None or freed / max(more, 1e-12) > best[0]):
                    best = freed / max(more, 1e-12), stage, option
        if best is None:
            return
        now[best[1]] = best[2]

"""Kinds of option values, each with one check and one error message.

>>> option("flush_first", -1, at_least(0, "a number of batches, at least 0"))
Traceback (most recent call last):
ValueError: flush_first=-1: expected a number of batches, at least 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value: `expected` in words, and `read`, which returns the value as it is kept, or None for another
    kind."""

    expected: str
    read: Callable[[Any], T | None]


def option(name: str, value: object, kind: Kind[T]) -> T:
    """The value as it is kept. Raises ValueError that names the option, the value, and what is expected."""
    kept = kind.read(value)
    if kept is None:
        raise ValueError(f"{name}={value!r}: expected {kind.expected}")
    return kept


def at_least(least: int, expected: str = "") -> Kind[int]:
    """Whole numbers from `least`; those of numpy become Python's."""
    return Kind(
        expected or f"a whole number, at least {least}",
        lambda value: int(value) if _is_number(value, Integral) and value >= least else None,
    )


def above_zero(expected: str = "a number above 0") -> Kind[float]:
    return Kind(expected, lambda value: value if _is_number(value, Real) and value > 0 else None)


def one_of(words: Iterable[str]) -> Kind[str]:
    known = tuple(words)
    return Kind(f"one of {', '.join(map(repr, known))}", lambda value: value if value in known else None)


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)

"""Strict reading of JSON records: every mistake names the file, the field and what was expected."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import numpy as np

MOST = 1e100  # of figures: their squares and sums are numbers, too
MOST_COUNT = 10**15  # whole numbers that a float holds exactly
_LONGEST = 80  # characters of a value that errors show
NOTHING: Mapping[str, Any] = MappingProxyType({})
Made = TypeVar("Made")


def read_text(path: str | Path) -> str:
    """All of a file; ValueError names it where it is no UTF-8 text."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # with a byte order mark, as spreadsheets write it, or not
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text at byte {error.start}: expected a JSON file") from None


def parse_object(text: str, *, source: str) -> Fields:
    """The one JSON object in `text`; ValueError names source, line and column where it is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source}, line {error.lineno}, column {error.colno}: {error.msg}: expected one JSON object"
        ) from None
    except (ValueError, RecursionError) as error:  # such as a number of more digits than Python reads
        raise ValueError(f"{source}: {error}: expected one JSON object") from None
    return Fields(value, where=source)


def fail(where: str, value: object, expected: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}... ({len(shown)} characters)"
    raise ValueError(f"{where}: {shown}: expected {expected}")


def number(where: str, value: object, *, positive: bool = False) -> float:
    """A finite number of at least 0 (above 0 where `positive`)."""
    expected = f"a finite number {'above' if positive else 'of at least'} 0"
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        fail(where, value, expected)
    try:
        found = float(value)
    except OverflowError:  # an integer beyond all floats
        fail(where, value, expected)
    if not math.isfinite(found) or found < 0 or (positive and found == 0):
        fail(where, value, expected)
    if found > MOST:
        fail(where, value, f"{expected} and at most {MOST}")
    return found


def check_figures(record: object, where: str = "", *, positive: Collection[str] = ()) -> None:
    """Fields of a dataclass that its annotations call numbers become finite floats of at least 0, or `positive`
    ones."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if type(value) is float and (0 < value <= MOST or (value == 0 and field.name not in positive)):
            continue  # nearly all are: as they should be
        if field.type == "float" or (field.type == "float | None" and value is not None):
            name = f"{where}: {field.name}" if where else field.name
            object.__setattr__(record, field.name, number(name, value, positive=field.name in positive))


def made_of(kind: Callable[..., Made], options: Mapping[str, Any], call: str) -> Made:
    """The record of a call's options; TypeError that names one which it does not have."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"{call}() got an unexpected option {unknown[0]!r}: expected one of {', '.join(known)}")
    return kind(**options)


def count(where: str, value: object) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        fail(where, value, "a whole number of at least 1")
    if value > MOST_COUNT:
        fail(where, value, f"a whole number of at least 1 and at most {MOST_COUNT}")
    return int(value)


def printable(where: str, value: object) -> str:
    """Returns text that has no line breaks or other control characters; raises ValueError for anything else."""
    if not isinstance(value, str) or not value.isprintable():
        fail(where, value, "printable text in one line")
    return value


class Fields:
    """A JSON object whose fields are taken one by one; `done` raises ValueError for the rest."""

    def __init__(self, value: object, *, where: str) -> None:
        if not isinstance(value, Mapping):
            fail(where, value, "a JSON object")
        self.where = where
        self._values = dict(value)
        self._known: list[str] = []

    def at(self, key: str) -> str:
        return f"{self.where}: {key}"

    def take(self, key: str, expected: str, **default: object) -> object:
        """The value of a field, or `default=`; ValueError where it is missing."""
        self._known.append(key)
        if key in self._values:
            return self._values.pop(key)
        if "default" in default:
            return default["default"]
        raise ValueError(f"{self.at(key)}: missing: expected {expected}")

    def number(self, key: str, *, positive: bool = False, **default: float) -> float:
        """A finite number of at least 0."""
        value = self.take(key, "a finite number", **default)
        return number(self.at(key), value, positive=positive)

    def optional_number(self, key: str, *, positive: bool = False) -> float | None:
        """A finite number of at least 0, or null; null where it is missing."""
        value = self.take(key, "a finite number or null", default=None)
        return None if value is None else number(self.at(key), value, positive=positive)

    def count(self, key: str, **default: int) -> int:
        """A whole number of at least 1."""
        return count(self.at(key), self.take(key, "a whole number of at least 1", **default))

    def whole(self, key: str, **default: int) -> int:
        """A whole number of at least 0."""
        value = self.take(key, "a whole number of at least 0", **default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
            fail(self.at(key), value, "a whole number of at least 0")
        return value

    def optional_count(self, key: str) -> int | None:
        """A whole number of at least 1, or null; null where it is missing."""
        value = self.take(key, "a whole number or null", default=None)
        return None if value is None else count(self.at(key), value)

    def optional_text(self, key: str) -> str | None:
        value = self.take(key, "text or null", default=None)
        if value is not None and not isinstance(value, str):
            fail(self.at(key), value, "text or null")
        return value

    def optional_object(self, key: str) -> Fields | None:
        """A JSON object or null; null where it is missing."""
        value = self.take(key, "an object or null", default=None)
        return None if value is None else Fields(value, where=self.at(key))

    def text(self, key: str, *, choices: Collection[str] = (), **default: str) -> str:
        expected = f"one of {', '.join(choices)}" if choices else "text"
        value = self.take(key, expected, **default)
        if not isinstance(value, str) or (choices and value not in choices):
            fail(self.at(key), value, expected)
        return value

    def truth(self, key: str, **default: bool) -> bool:
        value = self.take(key, "true or false", **default)
        if not isinstance(value, bool):
            fail(self.at(key), value, "true or false")
        return value

    def items(self, key: str, **default: list[object]) -> list[object]:
        value = self.take(key, "a list", **default)
        if not isinstance(value, list):
            fail(self.at(key), value, "a list")
        return value

    def whole_numbers(self, key: str, *, least: int, length: int | None = None) -> tuple[int, ...]:
        values = self.items(key)
        if length is not None and len(values) != length:
            fail(self.at(key), values, f"{length} whole numbers")
        for i, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{self.at(key)}[{i}]: {value!r}: expected a whole number of at least {least}")
        return tuple(int(str(value)) for value in values)

    def objects(self, key: str, **default: list[object]) -> list[Fields]:
        return [Fields(value, where=f"{self.at(key)}[{i}]") for i, value in enumerate(self.items(key, **default))]

    def made(
        self,
        kind: type[Made],
        given: Mapping[str, object] = NOTHING,
        *,
        positive: Collection[str] = (),
        needed: Collection[str] = (),
        choices: Mapping[str, Collection[str]] = NOTHING,
    ) -> Made:
        """A dataclass of the fields that are left, read by their annotations; those with a default may be missing.

        Arguments:
            given: values of fields that were read before.
            needed: may not be missing though they have a default.
            choices: of texts.

        ValueError, with the place, for what the class refuses too.
        """
        found = dict(given)
        for field in (each for each in fields(kind) if each.name not in given):  # type: ignore[arg-type]
            name = field.name
            default: dict[str, Any] = {"default": field.default}
            if field.default is MISSING or name in needed:
                default = {}
            match field.type:
                case "float":
                    found[name] = self.number(name, positive=name in positive, **default)
                case "float | None":
                    found[name] = self.optional_number(name, positive=name in positive)
                case "int":
                    found[name] = self.count(name, **default)
                case "int | None":
                    found[name] = self.optional_count(name)
                case "bool":
                    found[name] = self.truth(name, **default)
                case "str | None":
                    found[name] = self.optional_text(name)
                case "tuple[str, ...]":
                    found[name] = tuple(map(str, self.items(name, **{key: [] for key in default})))
                case "tuple[int, ...]":
                    found[name] = self.whole_numbers(name, least=int(name in positive))
                case _:
                    found[name] = self.text(name, choices=choices.get(name, ()), **default)
        self.done()
        try:
            return kind(**found)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None

    def version(self, *known: int) -> int:
        expected = " or ".join(map(str, known))
        found = self.take("version", expected)
        for number in known:
            if found == number:
                return number
        which = "the only one" if len(known) == 1 else "those"
        fail(self.at("version"), found, f"{expected}, {which} that this version of stagewright reads")

    def done(self) -> None:
        """ValueError for fields that were not taken."""
        if self._values:
            unknown, known = ", ".join(sorted(self._values)), ", ".join(self._known)
            raise ValueError(f"{self.where}: unknown field {unknown}: expected only {known}")

"""A figure: one number that an experiment found, and how it was got."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ...partition.strict import parse_object
from .case import Case


class How(StrEnum):
    """How a figure was got."""

    MEASURED = "measured"  # real work on real links
    EMULATED = "emulated"  # real processes and messages; stages that sleep, or links that are shaped
    SIMULATED = "simulated"
    CLOSED_FORM = "closed form"
    PUBLISHED = "published"  # by others


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number.

    Arguments:
        case: what it holds for; the job's case, or `case.also(...)`.
        name: such as "bubble"; the same in each way of getting it, so that they can stand side by side.
        value: finite. On a machine where other things run, too, a ratio of what ran in turn within one repetition.
        unit: such as "s", "ratio", "fraction", "bytes"; tells how it is shown.
        how: it was got.
        repetition: 0, 1, ...; 0 for what can only come out one way.
        note: for people, such as the plan that was chosen.

    Raises ValueError for a value that is no finite number.
    """

    case: Case
    name: str
    value: float
    unit: str
    how: How
    repetition: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"figure {self.name!r} for {self.case}: {self.value}: expected a finite number")

    def to_json(self) -> str:
        """One line of JSON."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in self.case.items}
        record: dict[str, object] = {
            "case": values,
            "name": self.name,
            "value": float(f"{self.value:.9g}"),  # what is beyond is rounding, and another on each machine
            "unit": self.unit,
            "how": self.how.value,
            "repetition": self.repetition,
        }
        return json.dumps({**record, "note": self.note} if self.note else record)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Figure:
        """Read `to_json`'s form; ValueError names `source`, the field and what was expected."""
        record = parse_object(text, source=source)
        case = record.take("case", "an object")
        if not isinstance(case, dict):
            raise ValueError(f"{record.at('case')}: {case!r}: expected an object")
        value = record.take("value", "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{record.at('value')}: {value!r}: expected a number")
        repetition = record.take("repetition", "a whole number", default=0)
        if type(repetition) is not int or repetition < 0:
            raise ValueError(f"{record.at('repetition')}: {repetition!r}: expected a whole number of at least 0")
        figure = cls(
            case=Case.of(case),
            name=record.text("name"),
            value=value,
            unit=record.text("unit"),
            how=How(record.text("how", choices=list(How))),
            repetition=repetition,
            note=record.text("note", default=""),
        )
        record.done()
        return figure


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
    """A line each."""
    path.write_text("".join(f"{figure.to_json()}\n" for figure in figures), encoding="utf-8")


def read_figures(path: Path) -> list[Figure]:
    """Figures of a file; ValueError names file and line of what cannot be read."""
    lines = _read(path).splitlines()
    return [Figure.from_json(line, source=f"{path}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}: expected a file of figures") from None


def ways(figures: Iterable[Figure]) -> str:
    """How they were got, for people: "simulated, emulated"."""
    found = {figure.how for figure in figures}
    return ", ".join(how.value for how in How if how in found)

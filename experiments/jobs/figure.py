"""A figure: one number that an experiment found, how it was got, and the limit that it should keep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from ...partition.strict import Fields, parse_object
from .case import Case


class How(StrEnum):
    MEASURED = "measured"  # real work on real links
    EMULATED = "emulated"  # real processes and messages; stages that sleep, or links that are shaped
    SIMULATED = "simulated"
    CLOSED_FORM = "closed form"
    PUBLISHED = "published"  # by others


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of some samples, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(median=median(samples), low=min(samples), high=max(samples))

    @classmethod
    def of_errors(cls, samples: Sequence[float]) -> Spread:
        """How far they are from 0: of the median sample, and of the nearest and the farthest one.

        >>> Spread.of_errors([-0.1, 0.01, 0.3])
        Spread(median=0.01, low=0.01, high=0.3)
        """
        far = [abs(sample) for sample in samples]
        return cls(median=abs(median(samples)), low=min(far), high=max(far))


class Judged(StrEnum):
    """The sample that a target looks at."""

    MEDIAN = "median"
    BEST = "best"  # a limit within the samples' range is met, since no difference is then seen
    WORST = "worst"  # a difference counts only where every sample shows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Limit that a figure should keep.

    Arguments:
        limit: for the sample that is judged.
        at_least: it must not be below the limit (else: not above).
    """

    limit: float
    at_least: bool = False
    judged: Judged = Judged.MEDIAN

    def met(self, spread: Spread) -> bool:
        if self.judged is Judged.MEDIAN:
            value = spread.median
        else:
            value = spread.high if (self.judged is Judged.BEST) == self.at_least else spread.low
        return value >= self.limit if self.at_least else value <= self.limit

    @classmethod
    def of(cls, record: Fields) -> Target:
        """From the fields of `asdict`."""
        judged = Judged(record.text("judged", choices=list(Judged)))
        return record.made(cls, {"judged": judged}, needed=("at_least",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number.

    Arguments:
        case: what it holds for; the job's case, or `case.also(...)`.
        name: such as "bubble"; the same in each way of getting it, so that they can stand side by side.
        value: finite. On a machine where other things run, too, a ratio of what ran in turn within one repetition.
        unit: such as "s", "ratio", "fraction", "bytes", "error" (of a prediction: its part of the measured value that
            is too much); tells how it is shown.
        how: it was got.
        repetition: 0, 1, ...; 0 for what can only come out one way.
        note: for people, such as the plan that was chosen.
        target: None for what is only reported.

    Raises ValueError for a value that is no finite number.
    """

    case: Case
    name: str
    value: float
    unit: str
    how: How
    repetition: int = 0
    note: str = ""
    target: Target | None = None

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
        further = {"note": self.note, "target": asdict(self.target) if self.target else None}
        return json.dumps({**record, **{key: value for key, value in further.items() if value}})

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
        target = record.optional_object("target")
        figure = cls(
            case=Case.of(case),
            name=record.text("name"),
            value=value,
            unit=record.text("unit"),
            how=How(record.text("how", choices=list(How))),
            repetition=repetition,
            note=record.text("note", default=""),
            target=None if target is None else Target.of(target),
        )
        record.done()
        return figure


def repeated(values: Iterable[float], **figure: Any) -> Iterator[Figure]:
    """A figure for each value, one a repetition; `figure`: all else of them."""
    for repetition, value in enumerate(values):
        yield Figure(value=value, repetition=repetition, **figure)


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
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

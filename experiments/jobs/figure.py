"""A figure: one number of an experiment, its origin, and its target."""

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
        """Absolute values: of the median sample, and of the nearest to and the farthest from 0.

        >>> Spread.of_errors([-0.1, 0.01, 0.3])
        Spread(median=0.01, low=0.01, high=0.3)
        """
        far = [abs(sample) for sample in samples]
        return cls(median=abs(median(samples)), low=min(far), high=max(far))


class Judged(StrEnum):
    """The sample that a target is compared with."""

    MEDIAN = "median"
    BEST = "best"  # a limit within the samples' range is met, since they show no difference
    WORST = "worst"  # a difference counts only if every sample shows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Limit of a figure's judged sample: an upper one, or with `at_least` a lower one."""

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
        """Make it from the fields of `asdict`."""
        judged = Judged(record.text("judged", choices=list(Judged)))
        return record.made(cls, {"judged": judged}, needed=("at_least",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number.

    Raises ValueError for a value that is not a finite number.
    """

    case: Case  # the job's case, or `case.also(...)`
    name: str  # such as "bubble"; the same for each origin, so that a table shows them together
    value: float  # finite. On a machine with other work, a ratio of sides that ran in turn within one repetition.
    # such as "s", "ratio", "fraction", "bytes", "error" (of a prediction, as a share of the measured value); determines
    # its format
    unit: str
    how: How
    repetition: int = 0  # 0, 1, ...; 0 for deterministic figures
    note: str = ""  # such as the chosen plan
    target: Target | None = None  # None for a figure that is only reported

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"figure {self.name!r} for {self.case}: {self.value}: expected a finite number")

    def to_json(self) -> str:
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in self.case.items}
        record: dict[str, object] = {
            "case": values,
            "name": self.name,
            "value": float(f"{self.value:.9g}"),  # further digits are rounding, different on each machine
            "unit": self.unit,
            "how": self.how.value,
            "repetition": self.repetition,
        }
        further = {"note": self.note, "target": asdict(self.target) if self.target else None}
        return json.dumps({**record, **{key: value for key, value in further.items() if value}})

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Figure:
        """Read `to_json`'s form. Raises ValueError that names `source`, the field and the expectation."""
        record = parse_object(text, source=source)
        case = record.take("case", "an object")
        if not isinstance(case, dict):
            raise ValueError(f"{record.at('case')}: {case!r}: expected an object")
        value = record.take("value", "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{record.at('value')}: {value!r}: expected a number")
        target = record.optional_object("target")
        given = {
            "case": Case.of(case),
            "value": value,
            "how": How(record.text("how", choices=list(How))),
            "repetition": record.whole("repetition", default=0),
            "target": None if target is None else Target.of(target),
        }
        return record.made(cls, given)


def repeated(values: Iterable[float], **figure: Any) -> Iterator[Figure]:
    """A figure per value, as repetitions; `figure`: their other fields."""
    for repetition, value in enumerate(values):
        yield Figure(value=value, repetition=repetition, **figure)


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
    path.write_text("".join(f"{figure.to_json()}\n" for figure in figures), encoding="utf-8")


def read_figures(path: Path) -> list[Figure]:
    """Figures of a file. Raises ValueError that names the file and an unreadable line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}: expected a file of figures") from None
    return [Figure.from_json(line, source=f"{path}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]


def how_made(figures: Iterable[Figure]) -> str:
    """Origins of the figures as text: "simulated, emulated"."""
    found = {figure.how for figure in figures}
    return ", ".join(how.value for how in How if how in found)

"""A figure: a value beside its target, and whether it was met."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .records import Spread

GIGABYTE = 1e9


class Origin(StrEnum):
    """Origin of a figure."""

    MEASURED = "measured"  # real work in real processes
    EMULATED = "emulated"  # real processes and messages, stages that sleep
    SIMULATED_OVER_MEASURED = "simulated / measured"
    SIMULATED_OVER_EMULATED = "simulated / emulated"
    PLANNED_OVER_MEASURED = "planned / measured"
    PLANNED_OVER_EMULATED = "planned / emulated"


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
        """Whether the samples meet it."""
        if self.judged is Judged.MEDIAN:
            value = spread.median
        else:
            value = spread.high if (self.judged is Judged.BEST) == self.at_least else spread.low
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the report.

    Arguments:
        workload: what was run, for people.
        what: what the value is.
        unit: "ratio", "error" (a fraction) or a unit of measurement.
        target: None for what is only reported.
        note: the times behind a ratio.
    """

    case: str
    workload: str
    what: str
    unit: str
    value: Spread
    target: Target | None
    origin: Origin
    note: str = ""

    @property
    def verdict(self) -> str:
        """ok, missed, or nothing where nothing was asked."""
        if self.target is None:
            return ""
        return "ok" if self.target.met(self.value) else "missed"


def error_of(predicted: float, measured: list[float]) -> Spread:
    """|predicted / measured - 1|, of the median measurement and of the nearest and the farthest one.

    A target is on the median; the range says what single steps did.

    >>> error_of(1.0, [0.5, 1.0, 2.0])
    Spread(median=0.0, low=0.0, high=1.0)
    """
    errors = [abs(predicted / each - 1) for each in measured]
    median = abs(predicted / Spread.of(measured).median - 1)
    return Spread(median=median, low=min(errors), high=max(errors))


def milliseconds(spread: Spread) -> str:
    """A median in milliseconds.

    >>> milliseconds(Spread(median=0.0123, low=0.0, high=1.0))
    '12.30 ms'
    """
    return f"{spread.median * 1e3:.2f} ms"

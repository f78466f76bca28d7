"""The best answer so far, of one search or of several, and the remaining budget for a better one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Generic, Literal, TypeVar

from ..kinds import above_zero, at_least, option

Stopped = Literal["optimal", "seconds", "evaluations", "tried"]
Answer = TypeVar("Answer")

_CLOSE = 1e-9  # relative distance to the bound that meets it; memory limits have the same margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A point of a search: the best value so far [s], its gap, and the effort.

    Arguments:
        seconds: since the search began.
        evaluations: orders that were tried.
        value: of the objective [s].
        gap: (value - lower bound) / lower bound.
        source: the finder: a family, "given", "policy", "weights", "slides".
    """

    seconds: float
    evaluations: int
    value: float
    gap: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Seconds and evaluations that a search may spend (None: any number), and the seed of its random choices."""

    seconds: float = math.inf
    evaluations: int | None = None
    seed: int = 0

    @classmethod
    def read(cls, *, seconds: float, evaluations: int | None, seed: object) -> Budget:
        """The budget that a user gives; ValueError for invalid numbers."""
        option("seconds", seconds, above_zero("a time budget above 0"))
        if evaluations is not None:
            option("evaluations", evaluations, at_least(1, "a whole number above 0, or None"))
        if not isinstance(seed, Integral):  # Random(None) would be another search each time
            raise ValueError(f"seed={seed!r}: expected a whole number")
        return cls(seconds=seconds, evaluations=evaluations, seed=int(seed))

    def after(self, evaluations: int) -> Budget:
        """The same number of evaluations again, after the given number."""
        return self if self.evaluations is None else replace(self, evaluations=evaluations + self.evaluations)


class Incumbent(Generic[Answer]):
    """The best answer so far, and the remaining budget. No answer can be below the bound [s] (0: not known). `history`:
    each improvement. Seconds are of CPU time of this thread, so that other processes take nothing from a search."""

    def __init__(
        self,
        budget: Budget,
        *,
        bound: float,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.budget, self.bound, self.on_progress = budget, bound, on_progress
        self.began = time.thread_time()
        self.evaluations = 0
        self.value = math.inf
        self.answer: Answer | None = None
        self.history: list[Progress] = []

    @property
    def elapsed(self) -> float:
        return time.thread_time() - self.began

    @property
    def spent(self) -> float:
        """Part of the budget that is spent: evaluations where their number is given, else seconds."""
        most = self.budget.evaluations
        return self.elapsed / self.budget.seconds if most is None else self.evaluations / most

    @property
    def is_over(self) -> bool:
        """Whether the bound is reached, or the budget spent once there is an answer."""
        return self.stopped != "tried" and (self.value < math.inf or self.stopped == "optimal")

    @property
    def stopped(self) -> Stopped:
        """Why it would end now; "tried": there is nothing left to try."""
        if self.promises_nothing(self.bound):
            return "optimal"
        most = self.budget.evaluations
        if most is not None and self.evaluations >= most:
            return "evaluations"
        return "seconds" if self.elapsed >= self.budget.seconds else "tried"

    def promises_nothing(self, bound: float) -> bool:
        """Whether nothing above this bound can be better than the best value."""
        return self.value <= bound * (1 + _CLOSE)

    def share(self, searches: int) -> Budget:
        """The budget of the next of `searches` remaining searches."""
        most = self.budget.evaluations
        return replace(
            self.budget,
            seconds=max(0.0, (self.budget.seconds - self.elapsed) / searches),
            evaluations=None if most is None else max(1, (most - self.evaluations) // searches),
        )

    def note(self, value: float, source: str, *, spent: int = 0) -> None:
        """A search has found a value that may be an improvement, after so many evaluations that are not counted yet."""
        if self.history and value >= self.history[-1].value:
            return
        point = Progress(
            seconds=self.elapsed,
            evaluations=self.evaluations + spent,
            value=value,
            gap=max(0.0, value - self.bound) / self.bound if self.bound > 0 else math.inf,
            source=source,
        )
        self.history.append(point)
        if self.on_progress is not None:
            self.on_progress(point)

    def offer(self, value: float, answer: Answer, source: str, *, spent: int = 0) -> None:
        self.note(value, source, spent=spent)
        if value < self.value:
            self.value, self.answer = value, answer

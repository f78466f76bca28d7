"""Several searches for one answer: what each may spend, the best so far, and how it came about."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .search import CLOSE, Progress, Stopped

Answer = TypeVar("Answer")


class Contest(Generic[Answer]):
    """The record of searches that come one after the other.

    Arguments:
        bound: that no answer can be below [s].
        seconds, evaluations: that all of them together may spend; None: any number.
        on_progress: is told each improvement.

    Attributes: `value` and `answer`, the best so far; `history`, each improvement; `evaluations`, spent.
    """

    def __init__(
        self,
        *,
        bound: float,
        seconds: float,
        evaluations: int | None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.bound, self.seconds, self.most, self.on_progress = bound, seconds, evaluations, on_progress
        self.began = time.monotonic()
        self.evaluations = 0
        self.value = math.inf
        self.answer: Answer | None = None
        self.history: list[Progress] = []

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        """Whether the bound is met, or the budget spent once there is an answer."""
        return self.stopped != "tried" and (self.value < math.inf or self.stopped == "optimal")

    @property
    def stopped(self) -> Stopped:
        """Why it would end now; "tried": for want of something to try."""
        if self.promises_nothing(self.bound):
            return "optimal"
        if self.most is not None and self.evaluations >= self.most:
            return "evaluations"
        return "seconds" if self.elapsed >= self.seconds else "tried"

    def promises_nothing(self, bound: float) -> bool:
        """Whether what cannot be below a bound cannot be better than what there is."""
        return self.value <= bound * (1 + CLOSE)

    def share(self, searches: int) -> tuple[float, int | None]:
        """Seconds and evaluations of the next search, of so many that are to come."""
        evaluations = None if self.most is None else max(1, (self.most - self.evaluations) // searches)
        return max(0.0, (self.seconds - self.elapsed) / searches), evaluations

    def more(self, *, seconds: float, evaluations: int | None) -> None:
        """Let searches go on until so many seconds, with so many evaluations from now on."""
        self.seconds = seconds
        self.most = None if evaluations is None else self.evaluations + evaluations

    def tell(self, value: float, source: str, *, spent: int) -> None:
        """A search has found a value that may be an improvement, after so many evaluations of its own."""
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

    def offer(self, value: float, answer: Answer, source: str) -> None:
        """Keep an answer if it is the best so far."""
        self.tell(value, source, spent=0)
        if value < self.value:
            self.value, self.answer = value, answer

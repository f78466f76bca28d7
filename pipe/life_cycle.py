"""The life-cycle of a run: how its collective calls are made. Each of them once, unless `reroute` makes them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from ..comm import Guard, World
from .build import Pipeline
from .context import Layout
from .results import StepResult
from .run.training import Training
from .settings.given import Given
from .settings.options import Options

T = TypeVar("T")


class Running(Protocol):
    """The parts of a run that a life-cycle sees and may replace."""

    options: Options
    layout: Layout | None
    world: World
    guard: Guard
    pipeline: Pipeline | None

    @property
    def num_steps(self) -> int: ...

    def built(self, what: str) -> Pipeline: ...


class LifeCycle:
    """Each call is made once.

    Attributes:
        joins: whether this process was started again to join others that continued: its weights come from them.
        step: the first step of the pipeline.
    """

    joins = False
    step = 0

    def step_of(self, training: Training) -> Callable[[Given], StepResult]:
        """A step's run."""
        return training.step

    def outlasting(self, call: Callable[[], T]) -> T:
        """The answer of a collective call that trains nothing."""
        return call()

    def enter(self) -> None:
        """Before the number of the next step is read."""

    def refuse(self, what: str, *, instead: str) -> None:
        """ValueError for what this life-cycle ends."""

"""How the collective calls of a run are made: each once; under `reroute`, again after a process died."""

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
    options: Options
    layout: Layout | None
    world: World
    guard: Guard
    pipeline: Pipeline | None

    @property
    def num_steps(self) -> int: ...

    def built(self, what: str) -> Pipeline: ...


class LifeCycle:
    """Makes each call once; `joins` is whether this process is a restarted one, `step` the number of its first step."""

    joins = False
    step = 0

    def step_of(self, training: Training) -> Callable[[Given], StepResult]:
        """Function that runs a training step."""
        return training.step

    def outlasting(self, call: Callable[[], T]) -> T:
        """Result of a collective call that does not train."""
        return call()

    def enter(self) -> None:
        """Called before the number of the next step is read."""

    def refuse(self, what: str, *, instead: str) -> None:
        """Raises ValueError for a feature that does not work with this life-cycle."""

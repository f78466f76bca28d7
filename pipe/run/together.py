"""A worker that runs a forward and the backward after it together where the schedule says so, see `shards.exchanges`.

    engine    F(s, k) ─────────────────────────> sends of F ──> B(t, j) ──> sends of B
    worker    F with B in its exchanges ──> |                   the rest of B

The program is the same as without: the forward waits for the inputs of both, and what it makes leaves as soon as it
ends. Only experts' exchanges give way, on the CPU, and not under recomputation, which changes settings of the process
meanwhile: there the two run one after the other.
"""

from __future__ import annotations

from typing import Any

from ...schedules import Action, Schedule
from ..context import Run
from .worker import TrainingWorker


def overlaps(run: Run) -> bool:
    """Whether forwards and backwards of a run overlap."""
    layout = run.layout
    has_experts = layout.schedule.overlapped and layout.place.mesh.expert > 1
    return bool(has_experts and run.options.device.type == "cpu" and not layout.recompute.runs_again)


class OverlappingWorker(TrainingWorker):
    overlaps = True

    def __init__(self, run: Run, *args: Any, **kwargs: Any) -> None:
        super().__init__(run, *args, **kwargs)
        self._exchanges = run.exchanges
        self._together = run.layout.schedule.together
        self._begun: Action | None = None  # a backward

    def follow(self, schedule: Schedule) -> None:
        super().follow(schedule)
        self._together = schedule.together

    def run(self, action: Action) -> None:
        backward = self._together.get(action)
        if backward is not None:
            run = super().run
            self._exchanges.forward(lambda: run(action), lambda: run(backward))
            self._begun = backward
        elif action == self._begun:
            self._begun = None
            self._exchanges.rest_of_backward()
        else:
            super().run(action)

    def drop(self) -> None:
        self._begun = None
        self._exchanges.drop()
        super().drop()

"""replan="batch": the schedule of each batch, searched by one process and run by all.

every process    sizes of the batch's microbatches ---------------+
process 0        a search, from earlier batches' best orders -----+-> compared, passed on -> one order everywhere

One process searches: floating point need not agree to the last bit on different machines, and ranks with two orders
would wait for each other for ever. Known sizes have their order already.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...partition.plans.replan import Replanner
from ...partition.plans.sizes import Size
from ...schedules import Action, Schedule
from ..addition import Addition
from ..context import Run
from ..stage.shapes import size_of
from .batches import Batch

_KEPT = 256  # orders that are kept for sizes that come again
_SHOWN = 6  # sizes in an error


class Replanning(Addition):
    """Gives each batch its own order of the plan's actions, the same in every process. `parameters`: see `size_of`.
    `replanner`: of process 0 alone."""

    may_split = True

    def __init__(self, parameters: Sequence[str], replanner: Replanner | None, run: Run) -> None:
        self._parameters, self._replanner, self._run = parameters, replanner, run
        self._known: dict[tuple[Size, ...], Schedule] = {}

    def connected(self, pipeline: Any, links: Any) -> None:
        training, update = pipeline.training, pipeline.state.update
        planned = update.schedule

        def follow(batch: Batch) -> None:
            begun = time.perf_counter()
            schedule = self._schedule_of(batch, planned)
            update.follow(schedule)
            for local in pipeline.engine.ranks:
                local.worker.follow(schedule)
            training.replan_seconds = time.perf_counter() - begun

        training.on_batch.append(follow)

    def _schedule_of(self, batch: Batch, planned: Schedule) -> Schedule:
        """The schedule of a batch. Collective over the processes. Raises ValueError, on every rank alike, where ranks
        passed other sizes, and for a microbatch that fits no device."""
        sizes, collectives = tuple(size_of(each, self._parameters) for each in batch.signatures), self._run.collectives
        with self._run.guard.together():
            answers = collectives.gather((sizes, *self._find(sizes)), what="agreeing on the schedule of a batch")
        first, order, story = answers[0]
        for process, (its, *_) in enumerate(answers):
            if its != first:
                raise ValueError(
                    f"{collectives.name_of(process)} passed microbatches of {_shown(its)} to step {batch.step}, and "
                    f"{collectives.name_of(0)} {_shown(first)}: expected the same batch on every rank; "
                    f"pipe.loader(dataset, batch_size=...) draws it"
                )
        if story:
            raise ValueError(f"no schedule for the batch of step {batch.step}: {story}")
        if sizes not in self._known:
            programs = tuple(tuple(map(Action.parse, text.split())) for text in order)
            if len(self._known) == _KEPT:
                del self._known[next(iter(self._known))]
            self._known[sizes] = replace(planned, name="auto", programs=programs, overlapped=())
        return self._known[sizes]

    def _find(self, sizes: tuple[Size, ...]) -> tuple[tuple[str, ...], str]:
        """(order, why there is none), from process 0 for unknown sizes."""
        if self._replanner is None or sizes in self._known:
            return (), ""
        try:
            programs = self._replanner.find(sizes).schedule.programs
        except ValueError as error:
            return (), str(error)
        return tuple(" ".join(map(str, program)) for program in programs), ""


def _shown(sizes: Sequence[Size]) -> str:
    some = ", ".join(f"{size.samples} x {size.length}" for size in sizes[:_SHOWN])
    return f"{some}{', ...' if len(sizes) > _SHOWN else ''} elements"

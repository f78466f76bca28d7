"""replan="batch": the schedule of each batch, searched by one process and run by all.

every process    sizes of the batch's microbatches ---------------+
process 0        a search, from what did well on batches before --+-> compared, handed on -> one order everywhere

One process searches: floating point need not agree to the last bit on different machines, and ranks with two orders
would wait for each other for ever. Sizes that came before have their order already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from ...comm import Collectives, Guard
from ...partition.model.forms import argument_name
from ...partition.plans.replan import Replanner
from ...partition.plans.sizes import Size
from ...schedules import Action, Schedule
from ..stage.shapes import Signature
from .batches import Batch

_KEPT = 256  # orders that are kept for sizes that come again
_SHOWN = 6  # sizes in an error


def size_of(microbatch: Signature, parameters: Sequence[str]) -> Size:
    """Samples, and elements of one of them in the model's first argument that has the batch in it.

    Arguments:
        parameters: names in the model's signature.
    """

    def place(slot: int) -> int:
        name = argument_name(microbatch.form.paths[slot])
        if (position := re.match(r"input (\d+)", name)) is not None:
            return int(position[1])
        first = re.split(r"[\[.]", name)[0]
        return parameters.index(first) if first in parameters else len(parameters)

    dims = [(slot, dim) for slot, dim in enumerate(microbatch.dims) if dim is not None]
    slot, dim = min(dims, key=lambda each: (place(each[0]), each[0]))
    shape, _ = microbatch.tensors[slot]
    return Size(shape[dim], math.prod((*shape[:dim], *shape[dim + 1 :])))


class BatchSchedules:
    """The schedule of each batch, the same in every process: another order of the actions of the plan's.

    Arguments:
        parameters: see `size_of`.
        replanner: of process 0 alone.
    """

    def __init__(
        self,
        parameters: Sequence[str],
        replanner: Replanner | None,
        schedule: Schedule,
        collectives: Collectives,
        guard: Guard,
    ) -> None:
        self._parameters = parameters
        self._replanner = replanner
        self._schedule = schedule
        self._collectives = collectives
        self._guard = guard
        self._known: dict[tuple[Size, ...], Schedule] = {}

    def of(self, batch: Batch) -> Schedule:
        """The schedule of a batch. Collective over the processes.

        Raises ValueError, on every rank alike, where ranks passed other sizes, and for a microbatch that no device has
        room for.
        """
        sizes = tuple(size_of(each, self._parameters) for each in batch.signatures)
        with self._guard.together():
            told = self._collectives.gather((sizes, *self._find(sizes)), what="agreeing on the schedule of a batch")
        first, order, story = told[0]
        for process, (its, *_) in enumerate(told):
            if its != first:
                raise ValueError(
                    f"{self._collectives.name_of(process)} passed microbatches of {_shown(its)} to step {batch.step}, "
                    f"and {self._collectives.name_of(0)} {_shown(first)}: expected the same batch on every rank; "
                    f"pipe.loader(dataset, batch_size=...) draws it"
                )
        if story:
            raise ValueError(f"no schedule for the batch of step {batch.step}: {story}")
        if sizes not in self._known:
            programs = tuple(tuple(map(Action.parse, text.split())) for text in order)
            if len(self._known) == _KEPT:
                del self._known[next(iter(self._known))]
            self._known[sizes] = replace(self._schedule, name="auto", programs=programs)
        return self._known[sizes]

    def _find(self, sizes: tuple[Size, ...]) -> tuple[tuple[str, ...], str]:
        """(order, why there is none), from process 0 for sizes that it has not met."""
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

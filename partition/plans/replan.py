"""An order for each batch of a plan's work, where microbatches differ in size: same stages, same ranks, same memory.

No rank holds more bytes of activations than the plan says, or than the plan's own order would hold for that batch; and
never more than its device has left besides the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...schedules.liveness import peak_held
from ...schedules.search.request import Request
from ...schedules.search.search import BatchOrders, FoundOrder
from .as_schedule import one_pipeline, schedule_of
from .record import PlanRecord, PlanStage, order_of
from .reorder import costs_of_orders
from .sizes import Profiles, Size, ascending, stage_laws


class Replanner:
    """Finds the order of each batch.

    Arguments:
        plan: of a flush schedule without replicas, made with `sizes.planned_for(profiles)`.
        profiles: of microbatches of some sizes.
        cold: see `BatchOrders`.
    """

    def __init__(self, plan: PlanRecord, profiles: Profiles, *, cold: int | None = None) -> None:
        assert plan.num_microbatches is not None
        assert max(plan.replicas) == 1
        self._plan = plan
        self._laws = stage_laws(plan, profiles)
        self._own = one_pipeline(plan, num_microbatches=plan.num_microbatches)
        self._orders = BatchOrders(self._own, cold=cold)
        self._links = plan.links if self._own.num_ranks > 1 else None
        largest = ascending(profiles)[-1]
        self._planned = self._peaks([largest] * plan.num_microbatches)
        rooms = [_room(plan, [plan.stages[s] for s in own]) for own in self._own.placement]
        self._room = list(map(max, rooms, self._planned))  # the plan fits its devices

    def held(self, sizes: Sequence[Size]) -> list[list[float]]:
        """[S][M] bytes of a microbatch of each size, from F to W."""
        return self._by_law("held", sizes)

    def _by_law(self, name: str, sizes: Sequence[Size]) -> list[list[float]]:
        return [[laws[name](size) for size in sizes] for laws in self._laws]

    def limits(self, sizes: Sequence[Size]) -> list[float]:
        """[P] bytes that activations of such a batch may take on each rank of the pipeline."""
        own = self._peaks(sizes)
        return [min(room, max(pair)) for room, *pair in zip(self._room, self._planned, own, strict=True)]

    def _peaks(self, sizes: Sequence[Size]) -> list[float]:
        """[P] bytes that each rank holds at once, at the most, in the plan's own order."""
        held = self.held(sizes)
        return [peak_held(program, held) for program in self._own.programs]

    def find(self, sizes: Sequence[Size]) -> FoundOrder:
        """The order for microbatches of these sizes, as a schedule on the plan's ranks. Raises MemoryLimitError (a
        ValueError) for a microbatch that no device has room for."""
        costs = costs_of_orders(
            self._plan,
            forward=self._by_law("forward", sizes),
            input_grad=self._by_law("input_grad", sizes),
            weight_grad=self._by_law("weight_grad", sizes),
        )
        request = Request(
            placement=self._own.placement,
            num_microbatches=len(sizes),
            costs=costs,
            memory_limit=self.limits(sizes),
            activations=self.held(sizes),
            links=self._links,
        )
        found = self._orders.find(request.problem())
        return replace(found, schedule=schedule_of(replace(self._plan, order=order_of(found.schedule))))


def _room(plan: PlanRecord, stages: Sequence[PlanStage]) -> float:
    """Bytes that a rank's device has for activations between F and W, besides all else that the plan says it holds."""
    first = stages[0]
    memory = plan.memory.get(first.ranks[0])
    if memory is None or first.memory_limit is None:
        return math.inf
    again = max((stage.held.again for stage in stages if stage.held is not None), default=0.0)
    return first.memory_limit - (memory.total - memory.activations) - again

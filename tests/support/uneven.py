"""Plans of `tensor_models` whose stages have tensor groups of different sizes."""

from typing import Any

from stagewright.partition import Plan, PlanStage
from stagewright.schedules import Costs

NODES = {2: ("embed blocks.0", "blocks.1 norm head"), 3: ("embed blocks.0", "blocks.1", "norm head")}


def stage(nodes: str, *ranks: int, tensor: int | None = None, **fields: Any) -> PlanStage:
    """A stage of one replica, unless its tensor size says otherwise."""
    size = len(ranks) if tensor is None else tensor
    return PlanStage(nodes=tuple(nodes.split()), ranks=ranks, tensor=size, step_seconds=3.0, **fields)


def plan_of(*stages: PlanStage, **fields: Any) -> Plan:
    ranks = {rank for each in stages for rank in each.ranks}
    settings: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "num_devices": max(ranks) + 1}
    return Plan(
        stages=stages,
        costs=Costs(forward=1.0, backward=2.0),
        cost_model="default",
        bottleneck=3,
        bound=3,
        **(settings | fields),
    )


def in_a_row(
    *sizes: int, nodes: tuple[str, ...] = (), num_bytes: tuple[float | None, ...] = (None,) * 3, **fields: Any
) -> Plan:
    """A stage for each size of tensor group, on ranks in a row, with so many bytes of parameters on one of them."""
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    ranks = [range(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    each = zip(nodes or NODES[len(sizes)], ranks, num_bytes, strict=False)
    return plan_of(*(stage(names, *own, parameter_bytes=size) for names, own, size in each), **fields)

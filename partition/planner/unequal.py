"""Unequal replicas for the planner: the exact dynamic program's candidates, on their ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ..cluster import Cluster
from ..solver.dynamic import MAX_STEPS, num_steps, piece_ranks, solve
from ..solver.orders import node_orders
from ..solver.stage_costs import SCHEDULES, Memory, StageCosts
from .evaluate import Ends
from .model import Model
from .space import Configuration

MAX_DEVICES = 32
_CANDIDATES = 4  # by each way


def takes_replicas(schedule: str) -> bool:
    """Whether the schedule knows stages of unequal replicas, and the dynamic program the schedule."""
    return schedule in SCHEDULES


def unequal_replicas(
    model: Model,
    cluster: Cluster,
    *,
    schedule: str,
    microbatch_size: int,
    num_microbatches: int,
    memory_limit: float | None,
) -> Iterator[tuple[Configuration, Ends]]:
    """Stages with replicas of any number, for one microbatch size; none where that would take too long.

    With the memory limit and without it, since recomputation may make room; and with M left out, so that no replica has
    a microbatch more than another. Orders of unequal nodes as in `node_orders`. What has equal replicas with equal
    shares on a uniform cluster is left to the enumeration.
    """
    seen: set[object] = set()
    if cluster.num_devices > MAX_DEVICES:
        return
    for order in node_orders(cluster)[0]:
        for limit in (memory_limit, float("inf")):
            costs = StageCosts(
                model.cuts,
                cluster.reordered(order),
                schedule=schedule,
                num_microbatches=num_microbatches,
                memory=Memory(limit=limit, optimizer=model.optimizer_ratio),
            )
            if num_steps(costs, straight=False) > MAX_STEPS:
                return
            for each in (costs, costs.per_replica()):
                for solution in solve(each, num_candidates=_CANDIDATES):
                    ranks = piece_ranks(costs, solution, order, cluster)
                    counts = {len(own) for own in ranks}
                    if max(counts) > num_microbatches:
                        continue  # a replica without work
                    if len(counts) == 1 and num_microbatches % max(counts) == 0 and costs.is_uniform:
                        continue
                    ends = (0, *(piece.last for piece in solution.pieces))
                    if (ranks, ends) in seen:
                        continue
                    seen.add((ranks, ends))
                    configuration = Configuration(
                        pipeline=len(ranks),
                        data=len(ranks[0]),
                        tensor=1,
                        schedule=schedule,
                        num_chunks=1,
                        microbatch_size=microbatch_size,
                        num_microbatches=num_microbatches,
                        ranks=ranks,
                    )
                    yield configuration, ends

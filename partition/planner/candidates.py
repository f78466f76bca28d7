"""Solutions of the dynamic program as configurations with their cuts: stages with replicas of any number."""

from __future__ import annotations

from dataclasses import dataclass

from ..allocator import certain
from ..cluster import Cluster
from ..solver.dynamic import Grain, Solution, grain_of, solve, stage_ranks
from ..solver.orders import node_orders
from ..solver.ranges import RangeCosts
from .evaluated import Ends
from .model import Model
from .space import Configuration


class TooLargeError(ValueError):
    """Too many cuts and devices for the dynamic program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Configurations with their cuts, those with the least bottleneck first, for each order of unequal nodes.

    Arguments:
        bound: no plan has a smaller bottleneck [s a microbatch].
    """

    found: tuple[tuple[Configuration, Ends], ...]
    bound: float
    notes: tuple[str, ...]


def candidates(
    model: Model,
    cluster: Cluster,
    *,
    schedule: str,
    microbatch_size: int,
    num_microbatches: int | None,
    memory_limit: float | None,
    straight: bool = False,
    wanted: int,
) -> Candidates:
    """Solutions, `wanted` at most by each way: for M microbatches, and without M, so that replicas have equal shares.

    Raises TooLargeError where unequal devices are too many; of too many equal ones some are looked at (`grain_of`).
    """
    found: dict[tuple[Configuration, Ends], None] = {}
    bounds, notes, every = [], [], Grain(cuts=len(model.cuts))
    orders, note = node_orders(cluster)
    for order in orders:
        costs = RangeCosts(
            model.cuts,
            cluster.reordered(order),
            schedule=schedule,
            num_microbatches=num_microbatches,
            memory_limit=memory_limit,
            beside=certain(model.profile.device),
            optimizer_ratio=model.optimizer_ratio,
            action_seconds=model.profile.action_seconds,
        )
        grain = grain_of(costs, straight=straight)
        if grain != every and not costs.is_uniform:
            raise TooLargeError(
                f"{len(costs.cuts)} cuts on {costs.num_devices} devices of several kinds: too large for unequal "
                f"devices; expected one kind, fewer devices, or a smaller max_cuts"
            )
        solutions = _solutions(costs, straight=straight, wanted=wanted)
        bounds += [solution.bound for solution in solutions[:1]]
        for solution in solutions:
            if num_microbatches is not None and max(solution.replicas) > num_microbatches:
                continue  # a replica without work
            configuration = Configuration(
                pipeline=len(solution.stages),
                data=solution.replicas[0],
                tensor=1,
                schedule=schedule,
                num_chunks=1,
                microbatch_size=microbatch_size,
                num_microbatches=num_microbatches,
                ranks=stage_ranks(costs, solution, order, cluster),
            )
            found[configuration, (0, *(stage.last for stage in solution.stages))] = None
    if grain != every:
        bounds = [float(costs.work[-1]) / costs.num_devices]
        notes.append(
            f"too large for the exact dynamic program: {grain.cuts} of {every.cuts} cuts were looked at, and replicas "
            f"in multiples of {grain.unit}"
        )
    if note is not None:
        notes.append(note)
    return Candidates(found=tuple(found), bound=min(bounds, default=0.0), notes=tuple(notes))


def _solutions(costs: RangeCosts, *, straight: bool, wanted: int) -> list[Solution]:
    """The best first."""
    best = solve(costs, straight=straight, num_candidates=wanted)
    if costs.num_microbatches is not None:
        best += solve(costs.per_replica(), straight=straight, num_candidates=wanted)
    return best

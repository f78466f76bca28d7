"""Candidates of the dynamic program, simulated: the bottleneck says nothing of warm-up, drain and late messages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schedules.ir import Schedule
from ...schedules.registry import build, family
from ...schedules.timing.costs import Costs
from ...schedules.timing.simulate import simulate
from ..cluster import Cluster
from ..profile import Profile
from .dynamic import Solution
from .stage_costs import StageCosts

MAX_ACTIONS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Seconds from batch to batch, the bubble, and the bytes on the fullest device, by what the schedule holds."""

    seconds: float
    bubble: float
    memory_bytes: float


def simulate_solution(solution: Solution, costs: StageCosts, cluster: Cluster, profile: Profile) -> Simulated | str:
    """One batch of M under the schedule (of a steady state, where it does not flush), or why there is none.

    A message takes the latency and the bytes of the wider of its stage's two cuts. The gradients of replicas are added
    up behind a flushed batch; without a flush that overlaps with compute. Optimizer steps take what the profile says.
    No batch is faster than M bottlenecks.
    """
    num_microbatches = costs.num_microbatches
    if num_microbatches is None:
        return "not simulated: num_microbatches is not given"
    pieces = solution.pieces
    if 2 * len(pieces) * num_microbatches > MAX_ACTIONS:
        return f"not simulated: more than {MAX_ACTIONS:,} actions a batch"
    try:
        schedule = _schedule(costs.schedule, [piece.replicas for piece in pieces], num_microbatches)
    except ValueError as error:
        return f"not simulated: {error}"
    steps = np.array([node.update_seconds for node in profile.nodes])
    forward: list[float] = []
    backward: list[float] = []
    latency: list[float] = []
    update: list[float] = []
    for piece in pieces:
        shape = costs.shape(piece.replicas, piece.devices)
        first, last, r, e = piece.first, piece.last, piece.replicas, piece.devices
        speed = costs.fastest / costs.slowness(r, e)
        for found, column in ((forward, costs.cuts.forward), (backward, costs.cuts.backward)):
            found.append(max(0.0, float(column[last] - column[first])) / speed)
        levels = [int(costs.levels(e - r, min(e, costs.num_devices - 1))), int(costs.levels(max(e - r - 1, 0), e - 1))]
        crossing = (float(costs.crossing[first] * shape.inward) * r, float(costs.crossing[last] * shape.outward) * r)
        waits = [cluster.levels[level].latency + each for level, each in zip(levels, crossing, strict=True)]
        latency.append(max(waits) if len(pieces) > 1 else 0.0)
        weights = float(costs.cuts.parameters[last] - costs.cuts.parameters[first])
        sync = weights * float(shape.sync) * num_microbatches
        own = costs.cuts.members[last] & ~costs.cuts.members[first]
        update.append((0.0 if schedule.is_asynchronous else sync) + float(steps[own].sum()) / speed)
    timeline = simulate(schedule, Costs(forward=forward, backward=backward, latency=latency, update=update))
    # The simulator does not queue messages that share a link; the bottleneck counts them.
    least = max(timeline.batch_seconds, solution.seconds * num_microbatches)
    busy = (1 - timeline.bubble) * timeline.batch_seconds
    peaks = timeline.peak_activations
    held = [max(peaks[rank] for rank in ranks) for ranks in schedule.owners]
    memory = max(costs.memory_use(p.first, p.last, peak).total for p, peak in zip(pieces, held, strict=True))
    return Simulated(seconds=least, bubble=1 - busy / least if least > 0 else 0.0, memory_bytes=memory)


def _schedule(name: str, replicas: list[int], num_microbatches: int) -> Schedule:
    """ValueError where the schedule can't have these replicas (yet)."""
    if max(replicas) == 1:
        return build(name, num_ranks=len(replicas), num_microbatches=num_microbatches)
    if not family(name).takes_replicas:
        raise ValueError(f"schedule {name!r} takes no replicas yet")
    return build(name, num_ranks=sum(replicas), num_microbatches=num_microbatches, replicas=tuple(replicas))

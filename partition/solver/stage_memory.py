"""Memory by data structure, for each stage of a profiled model at the peak of a schedule; without torch.

Parameters, gradients, optimizer state and buffers lie there all the time; activations are those of the microbatches
between F and B, workspace that of one node at a time. Messages are counted along the lowered program: receives that are
posted and not yet consumed, sends that are not yet known to be received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...schedules import build, family
from ...schedules.alive import messages_held
from ...schedules.lowering.lower import lower
from ..cluster import Cluster
from ..profile import Profile
from .solve import partition

_FREE = 1e15  # [bytes/s]: the cut follows compute alone


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a stage holds at the peak of its schedule [bytes].

    Arguments:
        parameters: all versions.
        activations: of `in_flight` microbatches.
        communication: the most at once of receives posted ahead and of sends not yet known to be received.
    """

    stage: int
    nodes: str
    in_flight: int
    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    workspace: float
    communication: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it [bytes]."""
        kept = self.parameters + self.gradients + self.optimizer_state + self.buffers
        return kept + self.activations + self.workspace + self.communication


def stage_memory(
    profile: Profile, *, num_stages: int, schedule: str, num_microbatches: int, receives_ahead: int
) -> list[StageMemory]:
    """Cut the profile for equal devices and free links, one rank a stage, and count what each holds.

    Arguments:
        num_stages: at most; fewer where more would not be faster.
        schedule: "1f1b", "2bw" or "pipedream".
        receives_ahead: receives of a link that are posted and not yet consumed, at most.
    """
    plan = partition(
        profile,
        Cluster.from_levels([(num_stages, _FREE)]),
        schedule=schedule,
        num_microbatches=num_microbatches,
        straight=True,
        optimizer_bytes=profile.optimizer_ratio or 0.0,
    )
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.nodes}
    cuts = crossing(profile, stage_of, len(plan.stages))
    travel = communication_peaks(
        cuts, schedule=schedule, num_microbatches=num_microbatches, receives_ahead=receives_ahead
    )
    found = []
    for s, stage in enumerate(plan.stages):
        in_flight = stage.in_flight or 1
        held = profile.holdings(stage.nodes, in_flight=in_flight)
        found.append(
            StageMemory(
                stage=s,
                nodes=stage.nodes[0] if len(stage.nodes) == 1 else f"{stage.nodes[0]} .. {stage.nodes[-1]}",
                in_flight=in_flight,
                parameters=held.parameters * family(schedule).rule.versions_kept(in_flight),
                gradients=held.gradients,
                optimizer_state=held.optimizer_state,
                activations=held.activations,
                workspace=held.workspace,
                communication=travel[s],
                buffers=held.buffers,
            )
        )
    return found


def crossing(profile: Profile, stage_of: Mapping[str, int], num_stages: int) -> list[float]:
    """[S - 1] bytes over the cut behind each stage but the last; a skip connection counts on each cut that it spans."""
    last = {node.name: stage_of[node.name] for node in profile.nodes}
    for src, dst in profile.edges or ():
        last[src] = max(last[src], stage_of[dst])
    return [
        sum(node.activation_bytes for node in profile.nodes if stage_of[node.name] <= s < last[node.name])
        for s in range(num_stages - 1)
    ]


def communication_peaks(
    cuts: Sequence[float], *, schedule: str, num_microbatches: int, receives_ahead: int
) -> list[float]:
    """[S] the most bytes of messages that each stage holds at once, by walking through its lowered program."""
    if not cuts:
        return [0.0]
    whole = build(schedule, num_ranks=len(cuts) + 1, num_microbatches=num_microbatches)
    peaks = []
    for program in lower(whole, receives_ahead=receives_ahead).programs:
        moments = (held for _, held in messages_held(program))
        peaks.append(max(sum(cuts[min(each.src, each.dst)] for each in held) for held in moments))
    return peaks

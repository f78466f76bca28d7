"""From an asynchronous schedule to the update of a stream: weight versions, what travels, who adds up what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...comm import Collectives
from ...schedules import Schedule, check
from ...schedules.lowering.course import Course, make_course
from ...schedules.messages import Sharing
from ...schedules.program import RankProgram
from ...schedules.transform import defer_updates
from ..parallel.sharding import Sharding
from ..stages.ownership import Ownership
from ..stages.weights import WeightVersions
from .gradients import refuse_sparse_modules
from .interface import UpdateParts
from .shards import Shards, shard_stages
from .stream import StreamUpdate
from .stream_rank import ParameterPlace, SharedGradient, StreamRank


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamExecution:
    """Batch after batch, call by call."""

    course: Course

    @property
    def programs(self) -> Sequence[RankProgram]:
        """One call and the drain, of all ranks."""
        return tuple(self.course.programs)

    def make_update(self, parts: UpdateParts) -> StreamUpdate:
        """With weight versions and optimizers of each local rank."""
        schedule = self.course.schedule
        refuse_sparse_modules(parts.model.root, {name for name, _ in parts.ownership.tied()})
        peaks = check(schedule).peak_versions
        taken: set[str] = set()  # parameters that another rank of this process has already
        ranks: dict[int, StreamRank] = {}
        delays = [self.course.stream.delay(stage) for stage in range(schedule.num_stages)]
        for rank in parts.recorders:
            count = schedule.rule.versions_kept(peaks[rank])
            weights = _weights_of(rank, schedule, parts, taken=taken, count=count)
            taken.update(name for one in weights.values() for name in one.names)
            optimizers = {
                stage: parts.make_optimizers(
                    stage, list(zip(one.names, one.own, strict=True)), may_hold_others=False, delays=delays
                )
                for stage, one in weights.items()
            }
            shards = shard_stages(
                rank,
                list(optimizers.values()),
                schedule=schedule,
                sharding=parts.sharding,
                ownership=parts.ownership,
                collectives=parts.collectives,
                recorder=parts.recorders[rank],
            )
            for one in weights.values():
                one.divide(shards.parts)
            shared, counted = _shared_and_counted(rank, parts.ownership, weights, shards)
            ranks[rank] = StreamRank(
                rank,
                course=self.course,
                weights=weights,
                optimizers=optimizers,
                shards=shards,
                shared=shared,
                counted=counted,
                max_grad_norm=parts.max_grad_norm,
                group=parts.ownership.group,
                device=parts.device,
            )
        return StreamUpdate(self.course, ranks, parts.collectives)


def make_stream_execution(
    schedule: Schedule,
    ownership: Ownership,
    collectives: Collectives,
    *,
    sharding: Sharding,
    max_grad_norm: float | None,
    flush_first: int,
) -> StreamExecution:
    """Calls of an asynchronous schedule, behind so many batches with a flush. Collective over the processes.

    Raises ValueError for what a weight rule cannot have, and ScheduleError for a schedule that does not repeat.
    """
    sharing = _sharing_of(schedule, ownership, sharding, max_grad_norm=max_grad_norm)
    for ranks in sharing.parts:
        collectives.subgroup(ranks)  # for what is done with an empty pipeline
    late = _with_late_updates(schedule, sharing)
    return StreamExecution(course=make_course(schedule, sharing=sharing, flush_first=flush_first, late=late))


def _sharing_of(
    schedule: Schedule, ownership: Ownership, sharding: Sharding, *, max_grad_norm: float | None
) -> Sharing:
    """Messages that the updates need, besides activations and gradients.

    Raises ValueError for what a rule cannot have: a global norm, or weights tied over ranks, where each stage updates
    by itself.
    """
    sums = sorted({ranks for _, ranks in ownership.tied()})
    stage_groups = {tuple(sorted(ranks)) for ranks in schedule.owners}
    ties = [(name, ranks) for name, ranks in ownership.tied() if ranks not in stage_groups]
    rule = schedule.rule
    if max_grad_norm is not None and rule.why_no_norm:
        raise ValueError(f"max_grad_norm={max_grad_norm} under schedule {schedule.name!r}: {rule.why_no_norm}")
    if ties and rule.why_no_ties:
        name, ranks = ties[0]
        raise ValueError(
            f"parameter {name!r} is tied over the ranks {ranks} under schedule {schedule.name!r}: {rule.why_no_ties}"
        )
    trained = {stage for name, _ in ownership.tied() for stage in ownership.stages[name]}
    parts = {tuple(sorted(schedule.owners[s])) for s in trained if sharding.shards[s] > 1}
    return Sharing(loss=True, norm=max_grad_norm is not None, sums=tuple(sums), parts=tuple(sorted(parts)))


def _with_late_updates(schedule: Schedule, sharing: Sharing) -> Schedule:
    """The schedule with updates that wait for other ranks as late as they may be."""
    if not schedule.rule.updates_may_wait or not (sharing.norm or sharing.sums):
        return schedule
    late = defer_updates(schedule)
    check(late)
    return late


def _weights_of(
    rank: int, schedule: Schedule, parts: UpdateParts, *, taken: Collection[str], count: int
) -> dict[int, WeightVersions]:
    """The weight versions of the stages of a rank, `count` of each."""
    weights: dict[int, WeightVersions] = {}
    for stage in schedule.placement[rank]:
        held = parts.ownership.held_parameters(stage)
        twice = next((n for n, _ in held for other in weights.values() if n in other.names), None)
        if twice is not None:
            raise ValueError(
                f"parameter {twice!r} stands in several stages of rank {rank} under schedule {schedule.name!r}: "
                f"expected one stage a rank, or a flush schedule such as schedule='interleaved'"
            )
        weights[stage] = WeightVersions(
            name=f"stage {stage} ({parts.model.names[stage]})",
            module=parts.model.train.stages[stage].module,
            parameters=held,
            rule=schedule.rule,
            count=count,
            copied={name for name, _ in held if name in taken},
        )
    return weights


def _shared_and_counted(
    rank: int, ownership: Ownership, weights: Mapping[int, WeightVersions], shards: Shards
) -> tuple[Sequence[SharedGradient], Sequence[ParameterPlace]]:
    """Gradients that this rank adds up with others, by name in one order everywhere; those that its norm counts."""
    ranks_of = dict(ownership.tied())
    places = {name: ParameterPlace(stage, i) for stage, one in weights.items() for i, name in enumerate(one.names)}
    shared = [SharedGradient(places[name], ranks) for name, ranks in ranks_of.items() if name in places]
    parts = {part.name for part in shards.counted(ownership)}
    counted = [
        place
        for name, place in places.items()
        if (name in parts if name in shards.parts else rank == min(ranks_of.get(name, (rank,))))
        and ownership.group.counts(name)
    ]
    return shared, counted

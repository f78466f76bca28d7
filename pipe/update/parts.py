"""The optimizers of this process's stages: made, and divided among the ranks that hold a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ...schedules import Schedule
from ..shards.split import ParameterSplit, ShardedParameter, split_parameters
from ..stage.ownership import BETWEEN_BATCHES, Ownership
from ..stage.weights import WeightVersions
from ..trace.recorder import RankRecorder
from .delay_correction import Feedback
from .optimizers import StageOptimizers
from .shards import Shards


def stage_optimizers(
    ownership: Ownership,
    stage: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    delays: Sequence[float],
    versions: WeightVersions | None = None,
) -> StageOptimizers:
    """The optimizers of a stage's parameters; see StageOptimizers.

    Arguments:
        delays: [S] of each stage's gradients [updates].
    """
    options, model = ownership.run.options, ownership.model
    assert options.optimizer is not None
    feedback = None
    if (correction := options.delay_correction) is not None:
        factors = correction.factors({name: ownership.stages[name] for name, _ in parameters}, delays)
        feedback = Feedback(factors, fresh=correction.fresh)
    made = StageOptimizers(
        stage,
        parameters,
        options.optimizer,
        options.lr_scheduler,
        where=f"stage {stage} ({model.names[stage]})",
        model={id(parameter) for parameter in model.root.parameters()},
        versions=versions,
        feedback=feedback,
    )
    made.refuse_to_divide([name for name, _ in parameters if ownership.group.is_divided(name)])
    return made


def shard(
    ownership: Ownership, rank: int, stages: Sequence[StageOptimizers], schedule: Schedule, recorder: RankRecorder
) -> Shards:
    """Give the optimizers of a rank's stages parts of their parameters. Collective over the processes.

    Raises ValueError for an optimizer that cannot be given parts.
    """
    sharding, collectives = ownership.run.layout.sharding, ownership.run.collectives
    if not sharding.is_any:
        return Shards({}, collectives, recorder)
    proposed: dict[str, ParameterSplit] = {}
    stage_of: dict[str, int] = {}
    parameters: dict[str, nn.Parameter] = {}
    for one in stages:
        count = sharding.shards[one.stage]
        if count > 1:
            own = dict(ownership.stage_parameters(one.stage, frozen=sharding.weights))
            ranks = sorted(schedule.owners[one.stage])
            proposed |= split_parameters(own, ranks=ranks, count=count, whole=one.whole_names())
            parameters |= own
            stage_of |= dict.fromkeys(own, one.stage)
    parts = {
        name: ShardedParameter(name, parameters[name], split, rank, apart=sharding.weights)
        for name, split in _agreed(ownership, proposed).items()
    }
    if sharding.weights:
        ownership.refuse_plain_state([part.whole for part in parts.values()], BETWEEN_BATCHES)
    by_stage: dict[int, list[ShardedParameter]] = {}
    for one in stages:
        own_parts = {name: part for name, part in parts.items() if stage_of[name] == one.stage}
        if own_parts:
            one.divide({name: part for name, part in own_parts.items() if part.whole.requires_grad})
            by_stage[one.stage] = list(own_parts.values())
    several = [name for name in parts if len({*ownership.stages[name]} & {*schedule.placement[rank]}) > 1]
    return Shards(by_stage, collectives, recorder, several=several, apart=sharding.weights)


def _agreed(ownership: Ownership, mine: Mapping[str, ParameterSplit]) -> dict[str, ParameterSplit]:
    """The splits that all holders agree on: a parameter that one has to keep whole (tied weights), all keep whole.

    Raises ValueError, on every rank alike, where replicas would divide a parameter in different ways.
    """
    proposed = ownership.run.collectives.by_rank(dict(mine), what="agreeing on the parts of optimizers")
    found = {}
    for name in dict.fromkeys(name for own in proposed.values() for name in own):
        by_rank = {holder: proposed[holder].get(name) for holder in ownership.holders(name)}
        if _is_agreed(name, by_rank) and name in mine:
            shards = {holder: split.shards[holder] for holder, split in by_rank.items() if split is not None}
            found[name] = ParameterSplit(ranks=mine[name].ranks, shards=shards)
    return {name: found[name] for name in mine if name in found}


def _is_agreed(name: str, found: Mapping[int, ParameterSplit | None]) -> bool:
    """Whether every holder of a parameter divides it, with those that hold the same stage."""
    for rank, split in found.items():
        others = () if split is None else split.ranks
        if split is None or any((each := found[other]) is None or each.ranks != others for other in others):
            return False
        differing = next((other for other in others if found[other] != split), None)
        if differing is not None:
            raise ValueError(
                f"the optimizers of ranks {rank} and {differing} would divide parameter {name!r} in different ways: "
                f"expected an optimizer= that returns the same on all replicas of a stage"
            )
    return True

"""Dividing the parameters of this process's stages: agreed between all ranks that hold one of them.

stage's parameters -> a proposal a rank -> kept where every holder of a parameter divides it -> parts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...comm import Collectives
from ...schedules import Schedule
from ..parallel.division import Division, divide
from ..parallel.part import Part
from ..stages.elsewhere import BETWEEN_BATCHES
from ..stages.ownership import Ownership
from .interface import UpdateParts
from .optimizers import StageOptimizers
from .parts import DividedSum, StageParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """Parameters that this process's rank has parts of.

    Arguments:
        stages: the parts of each stage that has any, in order.
        parts: all of them, by name.
        divisions: by rank and name, of all ranks.
    """

    stages: Sequence[StageParts]
    parts: Mapping[str, Part]
    divisions: Mapping[int, Mapping[str, Division]]

    def sum_of(self, rank: int, ranks: Sequence[int], names: Sequence[str], collectives: Collectives) -> DividedSum:
        """The sums over `ranks` of the gradients of these parameters."""
        return DividedSum(ranks, rank, self.divisions, [self.parts[name] for name in names], collectives)

    def counted(self, ownership: Ownership) -> list[Part]:
        """Parts that count in the gradient norm here: each element on one rank, with the first stage that holds it."""
        return [
            part
            for name, part in self.parts.items()
            if ownership.group.counts(name) and ownership.holders(name)[0] in part.division.ranks
        ]

    def whole(
        self, gradients: Mapping[str, torch.Tensor | None], collectives: Collectives
    ) -> dict[str, torch.Tensor | None]:
        """Gradients by name, those of divided parameters made whole from the parts. Collective over the processes."""
        mine = [name for name, gradient in gradients.items() if name in self.parts and gradient is not None]
        told = collectives.gather(mine, what="telling which parameters have gradients")
        present = {name for names in told for name in names}
        found = dict(gradients)
        for name, part in self.parts.items():
            part.parameter.grad = gradients.get(name)
        for stage in self.stages:
            stage.gather_gradients(present)
        for name, part in self.parts.items():
            found[name], part.whole.grad = part.whole.grad, None
        return found


NOTHING_DIVIDED = Divided(stages=(), parts={}, divisions={})


def divide_stages(rank: int, schedule: Schedule, parts: UpdateParts, stages: Sequence[StageOptimizers]) -> Divided:
    """Parts for the optimizers of a rank's stages. Collective over the processes.

    Raises ValueError for an optimizer that cannot be given parts.
    """
    proposed: dict[str, Division] = {}
    stage_of: dict[str, int] = {}
    parameters: dict[str, nn.Parameter] = {}
    for one in stages:
        count = parts.sharding.shards[one.stage]
        if count > 1:
            own = dict(parts.ownership.stage_parameters(one.stage, frozen=parts.sharding.weights))
            proposed |= divide(own, ranks=sorted(schedule.owners[one.stage]), count=count, whole=one.whole_names())
            parameters |= own
            stage_of |= dict.fromkeys(own, one.stage)
    divisions = _agreed(proposed, parts.ownership, parts.collectives)
    mine = {
        name: Part(name, parameters[name], division, rank, apart=parts.sharding.weights)
        for name, division in divisions[rank].items()
    }
    if parts.sharding.weights:
        parts.ownership.refuse_plain_state([part.whole for part in mine.values()], BETWEEN_BATCHES)
    by_stage: list[StageParts] = []
    for one in stages:
        own_parts = {name: part for name, part in mine.items() if stage_of[name] == one.stage}
        if own_parts:
            one.divide({name: part for name, part in own_parts.items() if part.whole.requires_grad})
            several = [n for n in own_parts if len({*parts.ownership.stages[n]} & {*schedule.placement[rank]}) > 1]
            by_stage.append(StageParts(one.stage, rank, own_parts, parts.collectives, several=several))
            by_stage[-1].let_go(all_of_them=True)
    return Divided(stages=by_stage, parts=mine, divisions=divisions)


def _agreed(
    mine: Mapping[str, Division], ownership: Ownership, collectives: Collectives
) -> dict[int, dict[str, Division]]:
    """By rank, what it divides: a parameter that some holder has to keep whole (tied weights), all keep whole.

    Raises ValueError, on every rank alike, where replicas would divide a parameter in different ways.
    """
    proposed = collectives.by_rank(dict(mine), what="agreeing on the parts of optimizers")
    names = dict.fromkeys(name for own in proposed.values() for name in own)
    kept = {name for name in names if _is_agreed(name, {r: proposed[r].get(name) for r in ownership.holders(name)})}
    return {rank: {name: d for name, d in own.items() if name in kept} for rank, own in proposed.items()}


def _is_agreed(name: str, found: Mapping[int, Division | None]) -> bool:
    """Whether every holder of a parameter divides it, with those that hold the same stage."""
    for rank, division in found.items():
        others = () if division is None else division.ranks
        if division is None or any((each := found[other]) is None or each.ranks != others for other in others):
            return False
        differing = next((other for other in others if found[other] != division), None)
        if differing is not None:
            raise ValueError(
                f"the optimizers of ranks {rank} and {differing} would divide parameter {name!r} in different ways: "
                f"expected an optimizer= that returns the same on all replicas of a stage"
            )
    return True

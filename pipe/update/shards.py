"""What this process's rank has of the parameters that it divides with others.

stage's parameters -> a split a rank proposes -> kept where every holder of a parameter divides it -> parts

Weights of which each rank keeps a part alone are gathered for a program, and let go as soon as it needs them no more:

worker meets UNSHARD    -> begin: the parts leave
a forward of the stage  -> whole: wait for those of the others
worker meets RESHARD    -> let go
program is through      -> settle: let go of what several stages of the rank use, too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ...comm import Collectives
from ...partition.profiler.clock import Stamp
from ...schedules import Collective, Op, Schedule
from ..measure.recorder import Recorder
from ..parallel.sharding import Sharding
from ..parallel.split import ShardedParameter, Split, split_parameters
from ..stages.elsewhere import BETWEEN_BATCHES
from ..stages.ownership import Ownership
from .optimizers import StageOptimizers
from .stage_shards import StageShards, together


class Shards:
    """Parameters that a rank has parts of; none by default.

    Arguments:
        stages: the parts of each stage that has any, in order.
        parts: all of them, by name.
        recorder: of the rank.
        apart: whether weights are let go between two batches.

    Attributes:
        awaited: by stage, weights that are on their way.
    """

    def __init__(
        self,
        stages: Sequence[StageShards] = (),
        parts: Mapping[str, ShardedParameter] | None = None,
        recorder: Recorder | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.stages = {stage.stage: stage for stage in stages}
        self.parts: Mapping[str, ShardedParameter] = parts or {}
        self.apart = apart
        self.awaited: dict[int, Callable[[], None]] = {}
        self._recorder = recorder

    def counted(self, ownership: Ownership) -> list[ShardedParameter]:
        """Parts that count in the gradient norm here: each element on one rank, with the first stage that holds it."""
        return [
            part
            for name, part in self.parts.items()
            if ownership.group.counts(name) and ownership.holders(name)[0] in part.split.ranks
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Parts, and gradients of them."""
        parts = [part.parameter for part in self.parts.values()]
        return [*parts, *(part.grad for part in parts if part.grad is not None)]

    def gather(self) -> None:
        """The whole parameters get the parts of all ranks. Collective over the processes."""
        together([stage.begin_gather() for stage in self.stages.values()])()

    def whole_gradients(
        self, gradients: Mapping[str, torch.Tensor | None], collectives: Collectives
    ) -> dict[str, torch.Tensor | None]:
        """Gradients by name, those of divided parameters made whole from the parts. Collective over the processes."""
        mine = [name for name, gradient in gradients.items() if name in self.parts and gradient is not None]
        told = collectives.gather(mine, what="telling which parameters have gradients")
        present = {name for names in told for name in names}
        found = dict(gradients)
        for name, part in self.parts.items():
            part.parameter.grad = gradients.get(name)
        for stage in self.stages.values():
            stage.gather_gradients(present)
        for name, part in self.parts.items():
            found[name], part.whole.grad = part.whole.grad, None
        return found

    # Weights that are let go

    def begin(self, collective: Collective) -> None:
        """UNSHARD or RESHARD."""
        stage, recorder = self.stages.get(collective.stages[0]), self._recorder
        if stage is None or recorder is None:  # nothing of it could be divided
            return
        stamp = recorder.clock.stamp
        stamps: list[Stamp] = [stamp()]
        if collective.op is Op.RESHARD:
            if stage.stage not in self.awaited:  # else this program does not use it, and they go when it is through
                stage.let_go()
            recorder.collective(collective, stamps[0], stamp())
            return
        gathered = stage.begin_gather(on_through=lambda: stamps.append(stamp()))

        def wait() -> None:
            gathered()
            recorder.collective(collective, stamps[0], stamps[-1] if len(stamps) > 1 else stamp())

        self.awaited[stage.stage] = wait

    def whole(self, stage: int) -> None:
        """Wait for the weights of a stage, also among the parts of another. Raises PipelineTimeout or PeerLost."""
        for each in [each for each in self.awaited if each == stage or self.stages[each].are_shared]:
            self.awaited.pop(each)()

    def settle(self) -> None:
        """The program is through."""
        for stage in list(self.awaited):
            self.whole(stage)
        self.drop()

    def drop(self) -> None:
        """Keep the parts alone."""
        self.awaited.clear()
        for stage in self.stages.values():
            stage.let_go(all_of_them=True)


def shard_stages(
    rank: int,
    optimizers: Sequence[StageOptimizers],
    *,
    schedule: Schedule,
    sharding: Sharding,
    ownership: Ownership,
    collectives: Collectives,
    recorder: Recorder,
) -> Shards:
    """Give the optimizers of a rank's stages parts of their parameters. Collective over the processes.

    Raises ValueError for an optimizer that cannot be given parts.
    """
    if not sharding.is_any:
        return Shards()
    proposed: dict[str, Split] = {}
    stage_of: dict[str, int] = {}
    parameters: dict[str, nn.Parameter] = {}
    for one in optimizers:
        count = sharding.shards[one.stage]
        if count > 1:
            own = dict(ownership.stage_parameters(one.stage, frozen=sharding.weights))
            ranks = sorted(schedule.owners[one.stage])
            proposed |= split_parameters(own, ranks=ranks, count=count, whole=one.whole_names())
            parameters |= own
            stage_of |= dict.fromkeys(own, one.stage)
    parts = {
        name: ShardedParameter(name, parameters[name], split, rank, apart=sharding.weights)
        for name, split in _agreed(rank, proposed, ownership, collectives).items()
    }
    if sharding.weights:
        ownership.refuse_plain_state([part.whole for part in parts.values()], BETWEEN_BATCHES)
    stages: list[StageShards] = []
    for one in optimizers:
        own_parts = {name: part for name, part in parts.items() if stage_of[name] == one.stage}
        if own_parts:
            one.divide({name: part for name, part in own_parts.items() if part.whole.requires_grad})
            several = [n for n in own_parts if len({*ownership.stages[n]} & {*schedule.placement[rank]}) > 1]
            stages.append(StageShards(one.stage, rank, own_parts, collectives, several=several))
            stages[-1].let_go(all_of_them=True)
    return Shards(stages, parts, recorder, apart=sharding.weights)


def _agreed(rank: int, mine: Mapping[str, Split], ownership: Ownership, collectives: Collectives) -> dict[str, Split]:
    """What this rank divides: a parameter that some holder has to keep whole (tied weights), all keep whole.

    Raises ValueError, on every rank alike, where replicas would divide a parameter in different ways.
    """
    proposed = collectives.by_rank(dict(mine), what="agreeing on the parts of optimizers")
    found = {}
    for name in dict.fromkeys(name for own in proposed.values() for name in own):
        by_rank = {holder: proposed[holder].get(name) for holder in ownership.holders(name)}
        if _is_agreed(name, by_rank) and name in mine:
            shards = {holder: split.shards[holder] for holder, split in by_rank.items() if split is not None}
            found[name] = Split(ranks=mine[name].ranks, shards=shards)
    return {name: found[name] for name in mine if name in found}


def _is_agreed(name: str, found: Mapping[int, Split | None]) -> bool:
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

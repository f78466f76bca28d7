"""Parameters that the ranks of a stage divide among themselves, and this process's parts of them.

gradients   [all of them] --reduce-scatter--> sum of this part
optimizer   steps the part
weights     the part --all-gather--> [all of them] on every rank

Weights of which each rank keeps only a part are gathered for a program, and freed as soon as it needs them no more:

worker runs UNSHARD     -> begin: the parts are sent
a forward of the stage  -> whole: wait for those of the others
worker runs RESHARD     -> free
program has ended       -> settle: free weights that several stages of the rank use, too
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ...comm import Collectives
from ...comm.buckets import buckets_of, unflatten
from ...partition.profiler.clock import Stamp
from ...schedules import Collective, Op, Schedule
from ..settings.delay_correction import Feedback
from ..shards.shard import ParameterSplit, ShardedParameter, split_parameters
from ..stage.ownership import BETWEEN_BATCHES, Ownership
from ..stage.weights import WeightVersions
from ..trace.recorder import RankRecorder
from .optimizers import StageOptimizers

Wait = Callable[[], None]


def _begin_gather(
    parts: Sequence[ShardedParameter],
    wholes: Sequence[torch.Tensor],
    collectives: Collectives,
    *,
    what: str,
    on_through: Wait | None = None,
) -> Wait:
    """Begin an all-gather of these parts into the whole tensors; the returned function waits."""

    def begin(bucket: Sequence[int], on_through: Wait | None) -> Wait:
        own, ranks = parts[bucket[0]].rank, parts[bucket[0]].split.ranks
        views = {rank: [parts[i].of(wholes[i], rank=rank) for i in bucket] for rank in ranks}
        sizes = [sum(view.numel() for view in there) for there in views.values()]
        wait = collectives.begin_all_gather(views[own], sizes, what=what, ranks=ranks, on_through=on_through)

        def finish() -> None:
            for (rank, there), received in zip(views.items(), wait(), strict=True):
                if rank != own:
                    torch._foreach_copy_(there, unflatten(received, there))

        return finish

    return _by_bucket(parts, begin, on_through)


def begin_sum(
    parts: Sequence[ShardedParameter], ranks: Sequence[int], collectives: Collectives, *, what: str, on_through: Wait
) -> Wait:
    """Begin a reduce-scatter of gradients; the returned function waits, and sets the parts' gradients to the sums. A
    rank without a gradient adds zeros.

    Arguments:
        parts: in the same order on all ranks.
        ranks: ascending.
        on_through: as of `Collectives.begin_all_reduce`, for the last bucket.
    """

    def begin(bucket: Sequence[int], on_through: Wait | None) -> Wait:
        some = [parts[i] for i in bucket]
        for part in some:
            part.refuse_other_type()
        grads = [torch.zeros_like(p.whole) if p.whole.grad is None else p.whole.grad for p in some]
        for part in some:
            part.whole.grad = None
        own = [part.of(grad).to("meta") for part, grad in zip(some, grads, strict=True)]  # shapes: `grads` are freed
        sent = [[part.of(grad, rank=rank) for part, grad in zip(some, grads, strict=True)] for rank in ranks]
        wait = collectives.begin_reduce_scatter(sent, what=what, ranks=ranks, on_through=on_through)

        def finish() -> None:
            total = wait()
            for part, gradient in zip(some, unflatten(total, own), strict=True):
                part.parameter.grad = None if part.is_empty else gradient

        return finish

    return _by_bucket(parts, begin, on_through)


def _by_bucket(
    parts: Sequence[ShardedParameter], begin: Callable[[Sequence[int], Wait | None], Wait], on_through: Wait | None
) -> Wait:
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, part in enumerate(parts):
        groups.setdefault(part.split.ranks, []).append(i)
    found = [(some, buckets_of([parts[i].whole for i in some])) for some in groups.values()]
    buckets = [[some[i] for i in bucket] for some, own in found for bucket in own]
    return together([begin(bucket, on_through if bucket is buckets[-1] else None) for bucket in buckets])


def together(waits: list[Callable[[], None]]) -> Callable[[], None]:
    def wait() -> None:
        while waits:
            waits.pop(0)()  # freeing what it holds

    return wait


class Shards:
    """Parameters of which this rank has parts."""

    def __init__(
        self,
        # The parts of each stage that has any, in the same order on all ranks of the stage.
        stages: Mapping[int, Sequence[ShardedParameter]],
        collectives: Collectives,
        recorder: RankRecorder,
        *,
        several: Collection[str] = (),  # names of those that several stages of the rank use
        apart: bool = False,  # whether weights are freed between two batches
    ) -> None:
        self.parts = {part.name: part for parts in stages.values() for part in parts}  # all of them, by name
        self.apart = apart
        self.awaited: dict[int, Wait] = {}  # by stage, weights that are being gathered
        self._stages = stages
        self._several = frozenset(several)
        self.collectives = collectives
        self.recorder = recorder
        self._let_go()

    def counted(self, ownership: Ownership) -> list[ShardedParameter]:
        """Parts that count in the gradient norm here, so that each element counts on one rank."""
        counted = [(name, part) for name, part in self.parts.items() if ownership.group.counts(name)]
        return [part for name, part in counted if ownership.holders(name)[0] in part.split.ranks]

    def tensors(self) -> list[torch.Tensor]:
        parts = [part.parameter for part in self.parts.values()]
        return [*parts, *(part.grad for part in parts if part.grad is not None)]

    def gather(self) -> None:
        together([self._begin_gather(stage) for stage in self._stages])()

    def gather_gradients(self, names: Collection[str]) -> None:
        """Gather the whole gradients of these parameters. Collective over the processes."""
        for stage in self._stages.values():
            parts = [part for part in stage if part.name in names]
            wholes = [torch.zeros_like(part.whole) for part in parts]
            for part, whole in zip(parts, wholes, strict=True):
                if part.parameter.grad is not None:
                    part.of(whole).copy_(part.parameter.grad)
            _begin_gather(parts, wholes, self.collectives, what="gathering gradients")()
            for part, whole in zip(parts, wholes, strict=True):
                part.whole.grad, part.parameter.grad = whole, None

    def whole_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Gradients by name, with whole ones of divided parameters. Collective over the processes."""
        mine = [name for name, gradient in gradients.items() if name in self.parts and gradient is not None]
        present = self.collectives.gather(mine, what="telling which parameters have gradients")
        found = dict(gradients)
        for name, part in self.parts.items():
            part.parameter.grad = gradients.get(name)
        self.gather_gradients({name for names in present for name in names})
        for name, part in self.parts.items():
            found[name], part.whole.grad = part.whole.grad, None
        return found

    # Weights that are freed

    @contextmanager
    def whole_weights(self, *, replaced: bool = False) -> Iterator[None]:
        """Context with whole weights where each rank keeps a part. Collective over the processes. `replaced`: whether
        all of them get new values within, which are kept; then the old ones are not gathered, and nothing is
        collective."""
        parts = tuple(self.parts.values()) if self.apart else ()
        try:
            if replaced:
                for part in parts:
                    part.make_room()
            elif parts:
                self.gather()
            yield
            for part in parts if replaced else ():
                part.take()
        finally:
            for part in parts:
                part.let_go()

    def begin(self, collective: Collective) -> None:
        stage, recorder = collective.stages[0], self.recorder
        if stage not in self._stages:  # none of its parameters could be divided
            return
        stamp = recorder.clock.stamp
        stamps: list[Stamp] = [stamp()]
        if collective.op is Op.RESHARD:
            if stage not in self.awaited:  # else this program does not use it, and `settle` frees its weights
                for part in self._stages[stage]:
                    if part.name not in self._several:  # which `settle` frees
                        part.let_go()
            recorder.collective(collective, stamps[0], stamp())
            return
        gathered = self._begin_gather(stage, on_through=lambda: stamps.append(stamp()))

        def wait() -> None:
            gathered()
            recorder.collective(collective, stamps[0], stamps[-1] if len(stamps) > 1 else stamp())

        self.awaited[stage] = wait

    def whole(self, stage: int) -> None:
        """Wait for the weights of a stage, also those among another's parts. Raises PipelineTimeout or PeerLost."""
        for other in list(self.awaited):
            if other == stage or any(part.name in self._several for part in self._stages[other]):
                self.awaited.pop(other)()

    def settle(self) -> None:
        for stage in list(self.awaited):
            self.whole(stage)
        self.drop()

    def drop(self) -> None:
        self.awaited.clear()
        self._let_go()

    def _begin_gather(self, stage: int, *, on_through: Wait | None = None) -> Wait:
        parts, what = self._stages[stage], f"gathering weights of stage {stage}"
        for part in parts:
            part.make_room()
        wholes = [part.whole.data for part in parts]
        return _begin_gather(parts, wholes, self.collectives, what=what, on_through=on_through)

    def _let_go(self) -> None:
        for part in self.parts.values():
            part.let_go()


def stage_optimizers(
    ownership: Ownership,
    stage: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    delays: Sequence[float],
    versions: WeightVersions | None = None,
) -> StageOptimizers:
    """The optimizers of a stage's parameters; see StageOptimizers. `delays`: [S] of each stage's gradients
    [updates]."""
    options, model = ownership.run.options, ownership.model
    assert options.optimizer is not None
    feedback = None
    if (correction := options.correction) is not None:
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
    shards = {name: ownership.shard(name) for name, _ in parameters}  # a whole expert, or none, is not divided
    made.refuse_to_divide([name for name, shard in shards.items() if shard.numel and not shard.is_whole])
    return made


def shard(
    ownership: Ownership, rank: int, stages: Sequence[StageOptimizers], schedule: Schedule, recorder: RankRecorder
) -> Shards:
    """Give the optimizers of a rank's stages parts of their parameters. Collective over the processes. Raises
    ValueError for an optimizer that does not support parts."""
    sharding, collectives = ownership.run.layout.sharding, ownership.run.collectives
    if not sharding.is_any:
        return Shards({}, collectives, recorder)
    proposed: dict[str, ParameterSplit] = {}
    stage_of: dict[str, int] = {}
    parameters: dict[str, nn.Parameter] = {}
    for one in stages:
        count = sharding.shards[one.stage]
        if count > 1:
            everyone = schedule.owners[one.stage]
            by_ranks: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
            for name, parameter in ownership.stage_parameters(one.stage, frozen=sharding.weights):
                holders = tuple(sorted({*everyone}.intersection(ownership.holders(name))))
                by_ranks.setdefault(holders, {})[name] = parameter
            for ranks, own in by_ranks.items():
                if (of_these := count * len(ranks) // len(everyone)) > 1:  # 1: a weight of experts, on one rank
                    proposed |= split_parameters(own, ranks=ranks, count=of_these, whole=one.whole_names())
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
    """The splits that all holders agree on; a parameter that one must keep whole (tied weights) stays whole on all.
    Raises ValueError, on every rank alike, where replicas would divide a parameter in different ways."""
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

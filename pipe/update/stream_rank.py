"""Update groups on one rank of a stream: losses, shared gradients, the global norm, optimizer steps.

last F of the group (last stage)   -> LOSS to every rank
REDUCE_GRAD: LOSS has arrived      -> scale the gradients, SUM to the ranks that share some
GRAD_NORM: SUM has arrived         -> own squared norm to rank 0; there: TOTAL to every rank
U: SUM, TOTAL have arrived         -> clip, update the versions of the stage
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...comm import TensorSpec
from ...comm.buckets import Flat
from ...partition.model.forms import Tensors
from ...schedules import Message, MessageKind, Op
from ...schedules.lowering.calls import RunCalls
from ...schedules.program import GroupStep
from ..batch.batches import LOWER_OR_CLIP, NO_UPDATE, Batch, GroupLoss, NonFiniteLossError
from ..results import Known
from ..stage.ownership import Ownership
from .gradients import (
    clip_gradients,
    gradient_specs,
    norm_of,
    norm_part,
    pack_gradients,
    scale_gradients,
    unpack_gradients,
)
from .optimizers import SameOptions, StageOptimizers
from .rank_update import RankUpdate, UpdateGate
from .shards import Shards


@dataclass(slots=True)
class _UpdateGroup:
    sums: dict[int, Tensors] = field(default_factory=dict)  # by rank
    added: set[str] = field(default_factory=set)  # shared gradients that are complete
    notes: set[int] = field(default_factory=set)  # ranks whose note is read
    norms: dict[int, torch.Tensor] = field(default_factory=dict)  # parts of the norm, by rank
    norm: float | None = None
    updates: int = 0


class StreamRank(RankUpdate):
    def __init__(
        self, rank: int, *, calls: RunCalls, stages: Mapping[int, StageOptimizers], shards: Shards, ownership: Ownership
    ) -> None:
        schedule = calls.schedule
        run = ownership.run
        super().__init__(rank, schedule, shards, are_mixed=run.layout.place.mesh.expert > 1 and run.num_replicas > 1)
        self.stages = stages
        self.weights = {stage: one.versions for stage, one in stages.items() if one.versions is not None}
        self.known: deque[Known] = deque()  # of batches whose results were not returned
        self.gate = UpdateGate()  # replaced by that of the process, once it has all its ranks
        self.failure: Exception | None = None  # of a batch alone in the pipeline, which ends without updates
        self.has_updated = False  # whether an update of the newest batch has begun
        self._course = calls
        self._num_ranks = schedule.num_ranks
        self._per_batch = schedule.groups_per_batch
        self._max_grad_norm = ownership.run.options.max_grad_norm
        self._tensor_group = ownership.group
        self._device = ownership.run.options.device
        self._first_batch = 0
        self._groups: dict[int, _UpdateGroup] = {}
        self._known_losses: dict[int, list[GroupLoss]] = {}  # by batch
        self._same_options = SameOptions(rank, num_stages=len(stages))
        # By parameter, its stage and its number among that stage's.
        self._versions_at = {
            name: (stage, i) for stage, one in self.weights.items() for i, name in enumerate(one.names)
        }
        tied, counted_parts = dict(ownership.tied()), {part.name for part in shards.counted(ownership)}
        # All ranks that hold a parameter, in the same order on each: its gradient is their sum.
        self._shared = {name: ranks for name, ranks in tied.items() if name in self._versions_at}
        self._counted = [  # in this rank's part of the global norm; of a divided one, the part
            name
            for name in self._versions_at
            if (name in counted_parts if name in shards.parts else rank == min(tied.get(name, (rank,))))
            and ownership.group.counts(name)
        ]
        peers = {other for ranks in self._shared.values() for other in ranks} - {rank}
        self._with = {peer: [name for name, ranks in self._shared.items() if peer in ranks] for peer in peers}
        # By peer, the parts of shared gradients that are sent there, and received from there.
        self._to = {peer: self._flat(names, of=peer) for peer, names in self._with.items()}
        self._from = {peer: self._flat(names, of=rank) for peer, names in self._with.items()}
        others, parts = [peer for peer in range(self._num_ranks) if peer != rank], list(shards.parts.values())
        self._parts = {peer: [part for part in parts if peer in part.split.ranks] for peer in others}
        self._updated: dict[int, dict[int, Tensors]] = {}  # by update group and rank: parts that the rank has updated
        self._made: dict[tuple[int, int], int] = {}  # (stage, update group) -> the version that its update made

    def enter(self, batch: Batch, *, first_batch: int = 0) -> None:
        self.batches[batch.step] = batch
        self._first_batch = first_batch

    def version(self, stage: int, index: int) -> int:
        return self._course.version(stage, index, first_batch=self._first_batch)

    # Messages

    def specs(self, message: Message) -> list[TensorSpec]:
        match message.kind:
            case MessageKind.LOSS:
                return super().specs(message)
            case MessageKind.SUM:
                comes = message.dst == self._rank
                return gradient_specs(self._from[message.src] if comes else self._to[message.dst])
            case MessageKind.WEIGHTS:
                peer = message.src if message.dst == self._rank else message.dst
                return self._flat_parts(peer, of=message.src).specs()
            case _:
                return [TensorSpec((2,), (1,), torch.float64, False)]

    def put(self, message: Message, tensors: Tensors) -> None:
        if message.kind is MessageKind.WEIGHTS:
            self._updated.setdefault(message.index, {})[message.src] = tensors
            return
        group = self._group(message.index)
        match message.kind:
            case MessageKind.LOSS:
                super().put(message, tensors)
            case MessageKind.SUM:
                group.sums[message.src] = tensors
            case MessageKind.NORM:
                group.norms[message.src] = tensors[0]
            case _:
                group.norm = norm_of(tensors[0])

    def take(self, message: Message) -> Tensors:
        if message.kind is MessageKind.WEIGHTS:
            parts = self._parts[message.dst]
            return self._flat_parts(message.dst, of=self._rank).pack([part.parameter.data for part in parts])
        group = self._group(message.index)
        match message.kind:
            case MessageKind.LOSS:
                return super().take(message)
            case MessageKind.SUM:
                names, peer = self._with[message.dst], message.dst
                own = ((name, self._gradient(name, message.index)) for name in names)
                gradients = [None if grad is None else self._part(name, peer, grad) for name, grad in own]
                return pack_gradients(self._to[message.dst], names, gradients, self._same_options.note(names))
            case MessageKind.NORM:
                return (group.norms[self._rank],)
            case _:
                return (self._whole_norm(group),)

    # Work

    def finish(self, step: GroupStep) -> None:
        """Scale the gradients of a group, before other ranks' are added; or find their norm, or gather parts."""
        if step.op is Op.GRAD_NORM:
            self._find_norm(step.index)
            return
        if step.op is Op.UNSHARD:
            self._take_parts(step.index)
            return
        try:
            if self.are_mixed and len({float(each[6]) for each in self._summaries[step.index].values()}) > 1:
                raise ValueError(
                    "the members of an expert group passed other numbers of samples, which an asynchronous schedule "
                    "weighs too late: expected as many on each, or a flush schedule such as '1f1b'"
                )
            loss, scale = self.total(step.index)
        except (NonFiniteLossError, ValueError) as error:  # on every rank alike
            if not self._course.is_alone(step.index // self._per_batch):
                raise
            self.failure = self.failure or error
        self.forget(step.index)
        if self.failure is not None:
            return
        self._known_losses.setdefault(step.index // self._per_batch, []).append(loss)
        gradients = self._gradients(step.index)
        scale_gradients(gradients, scale)
        self._tensor_group.compare_gradients(dict(zip(self._versions_at, gradients, strict=True)))

    def step(self, stage: int, index: int) -> None:
        if self.failure is not None:
            self.weights[stage].skip(index)
            return
        self.has_updated = True
        group = self._group(index)
        self._add_shared(index)
        if self._max_grad_norm is not None and not group.updates:
            assert group.norm is not None
            clip_gradients(self._gradients(index), norm=group.norm, max_norm=self._max_grad_norm)
        optimizers = self.stages[stage]
        batch = index // self._per_batch
        is_batchs_last = (index + 1) % self._per_batch == 0
        loss = self._batch_loss(batch) if is_batchs_last else None
        is_fresh = self._course.is_alone(batch)
        self.gate.enter()
        with optimizers.options.of(batch):
            if self._shared:
                self._same_options.used(index, self._option_numbers(stage))
            self.weights[stage].update(index, lambda: optimizers.step(loss, is_fresh=is_fresh))
        if self.shards.parts:
            self._made[stage, index] = self.weights[stage].newest
        group.updates += 1
        if group.updates == len(self.weights):
            del self._groups[index]
            if loss is not None:
                self._known_losses.pop(batch)
                norm = None if self._max_grad_norm is None else group.norm
                self.known.append(Known(self.batches.pop(batch).step, loss, norm))

    def drop(self) -> None:
        super().drop()
        self.failure = None
        self._groups.clear()
        self._known_losses.clear()
        self._same_options.drop()
        self._updated.clear()
        self._made.clear()
        for weights in self.weights.values():
            weights.drop_gradients()

    def _after_bad_loss(self, group: int) -> tuple[str, str]:
        """See RankUpdate: a batch alone in the pipeline makes the updates before the bad one, on every stage."""
        batch, within = divmod(group, self._per_batch)
        first = within * self._group_size
        lower = "lower the learning rate" if self._course.schedule.rule.why_no_norm else LOWER_OR_CLIP
        if self._course.is_alone(batch):
            made = f"{NO_UPDATE} from microbatch {first} on; those before it were made on every stage, and stay"
            return (made if within else NO_UPDATE), lower
        last = first + self._group_size - 1
        of = "this step" if self._per_batch == 1 else f"microbatch {last}"
        if first < last and self._per_batch > 1:
            of = f"microbatches {first} to {last}"
        outcome = (
            f"the update of {of} was not made; each stage has the weights of its last update, and the batches in the "
            f"pipeline are lost"
        )
        return outcome, f"{lower}; to continue, load(folder) of a checkpoint, in a new PipelineModule over processes"

    def _find_norm(self, index: int) -> None:
        group = self._group(index)
        self._add_shared(index)
        counted = [self._gradient(name, index) for name in self._counted]
        own = group.norms[self._rank] = norm_part(counted, device=self._device)
        self._tensor_group.add_up(own)
        if self._rank == 0:
            group.norm = norm_of(self._whole_norm(group))

    def _whole_norm(self, group: _UpdateGroup) -> torch.Tensor:
        return torch.stack([group.norms[rank] for rank in range(self._num_ranks)]).sum(0)

    def _take_parts(self, index: int) -> None:
        """Complete the weights of an update with other ranks' parts, where they are still kept."""
        versions = {stage: self._made.pop((stage, index), 0) for stage in self.weights}
        updated = self._updated.pop(index, {})
        if self.failure is not None:  # no rank has updated
            return
        for peer, message in updated.items():
            parts = self._parts[peer]
            for part, value in zip(parts, self._flat_parts(peer, of=peer).unpack(message), strict=True):
                stage, _ = self._versions_at[part.name]
                whole = self.weights[stage].kept(versions[stage], part.name)
                if whole is not None and value.numel():
                    part.of(whole, rank=peer).copy_(value)
        for weights in self.weights.values():
            weights.note()

    def _flat(self, names: Sequence[str], *, of: int) -> Flat:
        return Flat([self._part(name, of, _like(self._parameter(name))) for name in names])

    def _flat_parts(self, peer: int, *, of: int) -> Flat:
        return Flat([part.of(_like(part.whole), rank=of) for part in self._parts[peer]])

    def _part(self, name: str, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        part = self.shards.parts.get(name)
        return tensor if part is None else part.of(tensor, rank=rank)

    def _batch_loss(self, batch: int) -> float:
        parts = self._known_losses[batch]
        if len(parts) == 1:
            return parts[0].mean
        shards = [part.num_samples if part.counts is None else part.counts for part in parts]
        return sum(shard * part.mean for shard, part in zip(shards, parts, strict=True)) / sum(shards)

    def _add_shared(self, index: int) -> None:
        group = self._group(index)
        if not group.sums:
            return
        parts: dict[str, dict[int, torch.Tensor | None]] = {}  # parameter -> rank -> gradient
        for peer, message in group.sums.items():
            gradients, note = unpack_gradients(self._from[peer], message)
            if peer not in group.notes:
                group.notes.add(peer)
                self._same_options.received(peer, self._with[peer], note)
            for name, gradient in zip(self._with[peer], gradients, strict=True):
                parts.setdefault(name, {})[peer] = gradient
        for name, by_rank in parts.items():
            (stage, number), ranks = self._versions_at[name], self._shared[name]
            if name in group.added or len(by_rank) < len(ranks) - 1:
                continue
            group.added.add(name)
            own = self.weights[stage].gradients(index)
            mine = own[number]
            whole = by_rank | {self._rank: None if mine is None else self._part(name, self._rank, mine)}
            present = [gradient for rank in ranks if (gradient := whole[rank]) is not None]
            own[number] = None  # freed as soon as its sum is made
            if present and present[0].numel():
                total = present[0].clone()
                for gradient in present[1:]:
                    total += gradient
                own[number] = total

    def _gradients(self, index: int) -> list[torch.Tensor | None]:
        return [gradient for weights in self.weights.values() for gradient in weights.gradients(index)]

    def _option_numbers(self, stage: int) -> dict[str, int]:
        numbers = self.stages[stage].option_numbers()
        names = [name for name in self._shared if self._versions_at[name][0] == stage]
        return {name: numbers.get(id(self._parameter(name)), 0) for name in names}

    def _parameter(self, name: str) -> torch.nn.Parameter:
        stage, number = self._versions_at[name]
        return self.weights[stage].own[number]

    def _gradient(self, name: str, index: int) -> torch.Tensor | None:
        stage, number = self._versions_at[name]
        return self.weights[stage].gradients(index)[number]

    def _group(self, index: int) -> _UpdateGroup:
        return self._groups.setdefault(index, _UpdateGroup())


def _like(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.new_empty(()).expand(parameter.shape)

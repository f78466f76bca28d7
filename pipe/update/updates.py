"""What belongs to update groups on one rank of a stream: losses, shared gradients, the global norm, optimizer steps.

last F of the group (last stage)   -> LOSS to every rank
REDUCE_GRAD: LOSS is here    -> scale the gradients, SUM to the ranks that share some
GRAD_NORM:                         -> own squared norm to rank 0; there: TOTAL to every rank
U: SUM, TOTAL are here             -> clip, update the versions of the stage
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...comm import TensorSpec
from ...partition.graph.units import Tensors
from ...schedules import Message, MessageKind, Schedule
from ...schedules.ir import Op
from ...schedules.program import GroupStep
from ..batch.batches import SUMMARY_SIZE, Batch, GroupLoss, combine_summaries, read_loss_summary
from ..stages.weights import WeightVersions
from .optimizers import StageOptimizer, clip_factor, squared_norm


class SharedGradient(NamedTuple):
    """Parameter `number` of the versions of `stage`, whose gradient is the sum over `ranks` (ascending)."""

    stage: int
    number: int
    ranks: tuple[int, ...]


class Known(NamedTuple):
    """What a rank knows of a batch after its last update."""

    step: int
    loss: float
    grad_norm: float | None


@dataclass(slots=True)
class _Group:
    """One update group under way."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)  # by rank of the last stage
    sums: dict[int, Tensors] = field(default_factory=dict)  # by rank
    added: set[int] = field(default_factory=set)  # positions of shared gradients that are whole
    norms: dict[int, torch.Tensor] = field(default_factory=dict)  # squared, by rank
    norm: float | None = None
    clipped: bool = False
    updates: int = 0


class Updates:
    """The update groups of one rank.

    Arguments:
        weights: of its stages.
        optimizers: of its stages.
        shared: the gradients that it adds up with other ranks.
        counted: (stage, number) of the parameters that count in this rank's part of the global norm.
        max_grad_norm: None: no clipping.
        batches: those under way, by number; one is taken out when its last update is done.
    """

    def __init__(
        self,
        *,
        rank: int,
        schedule: Schedule,
        weights: Mapping[int, WeightVersions],
        optimizers: Mapping[int, StageOptimizer],
        shared: Sequence[SharedGradient],
        counted: Sequence[tuple[int, int]],
        max_grad_norm: float | None,
        batches: dict[int, Batch],
        device: torch.device,
    ) -> None:
        self.weights = weights
        self.optimizers = optimizers
        self.known: deque[Known] = deque()  # of batches that nobody has asked for
        self._rank = rank
        self._num_ranks = schedule.num_ranks
        self._per_batch = schedule.groups_per_batch
        self._shared = tuple(shared)
        self._counted = tuple(counted)
        self._max_grad_norm = max_grad_norm
        self._batches = batches
        self._device = device
        self._groups: dict[int, _Group] = {}
        self._losses: dict[int, list[GroupLoss]] = {}  # by batch
        self._with = {
            peer: [position for position, one in enumerate(self._shared) if peer in one.ranks]
            for peer in {rank for one in self._shared for rank in one.ranks} - {rank}
        }

    # Messages

    def specs(self, message: Message) -> list[TensorSpec]:
        """What to expect of a message."""
        match message.kind:
            case MessageKind.LOSS:
                return [TensorSpec((SUMMARY_SIZE,), (1,), torch.float64, False)]
            case MessageKind.SUM:
                peer = message.src if message.dst == self._rank else message.dst
                return [TensorSpec((size,), (1,), dtype, False) for dtype, size in self._flat_sizes(peer).items()]
            case _:
                return [TensorSpec((), (), torch.float64, False)]

    def put(self, message: Message, tensors: Tensors) -> None:
        """A message arrived."""
        group = self._group(message.index)
        match message.kind:
            case MessageKind.LOSS:
                group.losses[message.src] = tensors[0]
            case MessageKind.SUM:
                group.sums[message.src] = tensors
            case MessageKind.NORM:
                group.norms[message.src] = tensors[0]
            case _:
                group.norm = float(tensors[0].sqrt())

    def put_loss(self, index: int, summary: torch.Tensor) -> None:
        """The losses of a group that this rank computed itself."""
        self._group(index).losses[self._rank] = summary

    def take(self, message: Message) -> Tensors:
        """A message to send."""
        group = self._group(message.index)
        match message.kind:
            case MessageKind.LOSS:
                return (group.losses[self._rank],)
            case MessageKind.SUM:
                return self._flat(message.index, message.dst)
            case MessageKind.NORM:
                return (group.norms[self._rank],)
            case _:
                return (torch.stack([group.norms[rank] for rank in range(self._num_ranks)]).sum(),)

    # Work

    def finish(self, step: GroupStep) -> None:
        """The gradients of a group are whole up to what other ranks add; or their norm is next."""
        group = self._group(step.index)
        if step.op is Op.GRAD_NORM:
            self._add_shared(step.index)
            counted = [self._gradient(stage, number, step.index) for stage, number in self._counted]
            group.norms[self._rank] = squared_norm(counted, device=self._device)
            if self._rank == 0:
                group.norm = float(torch.stack([group.norms[rank] for rank in range(self._num_ranks)]).sum().sqrt())
            return
        batch, within = divmod(step.index, self._per_batch)
        samples = self._batches[batch].group_samples(within)
        summary = combine_summaries([group.losses[rank] for rank in sorted(group.losses)])
        loss = read_loss_summary(summary, step=self._batches[batch].step)
        self._losses.setdefault(batch, []).append(loss)
        if loss.scale(samples) != 1.0:
            for weights in self.weights.values():
                own = [g for g in weights.gradients(step.index) if g is not None]
                if own:
                    torch._foreach_mul_(own, loss.scale(samples))

    def update(self, stage: int, index: int) -> None:
        """The optimizer step of a stage: it makes the stage's next weight version."""
        group = self._group(index)
        self._add_shared(index)
        if self._max_grad_norm is not None and not group.clipped:
            assert group.norm is not None
            factor = clip_factor(group.norm, self._max_grad_norm)
            for weights in self.weights.values():
                own = [g for g in weights.gradients(index) if g is not None]
                if own and factor < 1.0:
                    torch._foreach_mul_(own, factor)
            group.clipped = True
        self.weights[stage].update(index, self.optimizers[stage].step)
        group.updates += 1
        if group.updates == len(self.weights):
            del self._groups[index]
            if (index + 1) % self._per_batch == 0:
                self._complete(index // self._per_batch, group.norm)

    def drop(self) -> None:
        """Forget all groups under way (after an error)."""
        self._groups.clear()
        self._losses.clear()
        for weights in self.weights.values():
            weights.drop_gradients()

    def _complete(self, batch: int, grad_norm: float | None) -> None:
        step = self._batches.pop(batch).step
        parts = self._losses.pop(batch)
        shares = [part.num_samples if part.counts is None else part.counts for part in parts]
        loss = sum(share * part.mean for share, part in zip(shares, parts, strict=True)) / sum(shares)
        self.known.append(Known(step, parts[0].mean if len(parts) == 1 else loss, grad_norm))

    # Shared gradients

    def _add_shared(self, index: int) -> None:
        """Sum what has come of the gradients shared with other ranks, in the order of the ranks."""
        group = self._group(index)
        if not group.sums:
            return
        parts: dict[int, dict[int, torch.Tensor | None]] = {}  # position -> rank -> gradient
        for peer, flats in group.sums.items():
            for position, gradient in self._unflat(peer, flats).items():
                parts.setdefault(position, {})[peer] = gradient
        for position, by_rank in parts.items():
            stage, number, ranks = self._shared[position]
            if position in group.added or len(by_rank) < len(ranks) - 1:
                continue
            group.added.add(position)
            gradients = self.weights[stage].gradients(index)
            by_rank[self._rank] = gradients[number]
            present = [gradient for rank in ranks if (gradient := by_rank[rank]) is not None]
            if present:
                total = present[0].clone()
                for gradient in present[1:]:
                    total += gradient
                gradients[number] = total

    def _flat_sizes(self, peer: int) -> dict[torch.dtype, int]:
        sizes: dict[torch.dtype, int] = {}
        for position in self._with[peer]:
            parameter = self._parameter(position)
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel() + 1
        return sizes

    def _flat(self, index: int, peer: int) -> Tensors:
        """Own gradients that `peer` needs, one flat tensor a type; zeros where nothing came.

        Behind each of them 1, or 0 where nothing came: a parameter without a gradient anywhere is not to be trained.
        """
        parts: dict[torch.dtype, list[torch.Tensor]] = {}
        for position in self._with[peer]:
            stage, number, _ = self._shared[position]
            parameter = self._parameter(position)
            gradient = self._gradient(stage, number, index)
            flat = torch.zeros_like(parameter).reshape(-1) if gradient is None else gradient.reshape(-1)
            parts.setdefault(parameter.dtype, []).extend((flat.detach(), flat.new_full((1,), gradient is not None)))
        return tuple(torch.cat(flats) for flats in parts.values())

    def _unflat(self, peer: int, flats: Tensors) -> dict[int, torch.Tensor | None]:
        by_type = dict(zip(self._flat_sizes(peer), flats, strict=True))
        at = dict.fromkeys(by_type, 0)
        found: dict[int, torch.Tensor | None] = {}
        for position in self._with[peer]:
            parameter = self._parameter(position)
            flat, begin = by_type[parameter.dtype], at[parameter.dtype]
            end = begin + parameter.numel()
            at[parameter.dtype] = end + 1
            found[position] = flat[begin:end].view(parameter.shape) if flat[end] else None
        return found

    def _parameter(self, position: int) -> torch.Tensor:
        stage, number, _ = self._shared[position]
        return self.weights[stage].own[number]

    def _gradient(self, stage: int, number: int, index: int) -> torch.Tensor | None:
        return self.weights[stage].gradients(index)[number]

    def _group(self, index: int) -> _Group:
        return self._groups.setdefault(index, _Group())

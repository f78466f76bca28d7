"""The update behind a flush: a batch is through on all ranks, then its gradients are summed, clipped and applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...comm import Collectives
from ...schedules import Action, Op, Schedule, Timeline, check_lowered, lower
from ...schedules.messages import Sharing
from ...schedules.program import RankProgram
from ..batch.batches import Batch
from ..measure.recorder import RankRecord, assemble_timeline
from ..stages.ownership import Ownership
from .gradients import (
    FlatGradients,
    clip_gradients,
    flatten,
    norm_of,
    norm_part,
    refuse_sparse_modules,
    scale_gradients,
    unflatten,
)
from .interface import Known, Programs, StageState, Update, UpdateParts
from .optimizers import differing_options
from .rank_update import RankUpdate

_SUMMING = "summing shared gradients (replicas, tied weights)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushExecution:
    """One batch at a time, by `programs` of all ranks."""

    schedule: Schedule
    programs: Sequence[RankProgram]

    def make_update(self, parts: UpdateParts) -> FlushUpdate:
        """With an optimizer for each local stage."""
        return FlushUpdate(self, parts)


def make_flush_execution(
    schedule: Schedule, ownership: Ownership, collectives: Collectives, *, has_loss: bool
) -> FlushExecution:
    """The programs of a batch, at whose end every rank has the losses, if any. Collective over the processes."""
    for _, holders in ownership.tied():
        collectives.subgroup(holders)
    return FlushExecution(schedule=schedule, programs=batch_programs(schedule, has_loss=has_loss))


def batch_programs(schedule: Schedule, *, has_loss: bool) -> Sequence[RankProgram]:
    """One batch by rank, with its messages."""
    lowered = lower(schedule, sharing=Sharing(loss=has_loss))
    check_lowered(lowered)
    return lowered.programs


class _Shared(NamedTuple):
    """Gradients that are summed over ranks."""

    ranks: tuple[int, ...]
    gradients: FlatGradients


class FlushUpdate(Update):
    """The `.grad`s of this process's parameters, and what becomes of them behind each batch.

    What a batch adds is kept apart from what was there before, since it must be changed by itself: scaled (losses
    given as sum and count) or summed over the ranks that hold a parameter (replicas, tied weights). Where all that
    hold a parameter are in this process, its gradients add up by themselves.

    """

    def __init__(self, execution: FlushExecution, parts: UpdateParts) -> None:
        schedule, ownership, local = execution.schedule, parts.ownership, tuple(parts.recorders)
        refuse_sparse_modules(
            parts.model.root, {name for name, holders in ownership.tied() if not set(holders) <= set(local)}
        )
        # Replicas in one process have one optimizer: the first of them steps it.
        first = {stage: rank for rank in reversed(local) for stage in schedule.placement[rank]}
        optimizers = [
            parts.make_optimizers(s, ownership.stage_parameters(s), may_hold_others=True)
            for s in sorted(first)
            if parts.optimizer is not None
        ]
        super().__init__(
            schedule,
            {rank: RankUpdate(rank, schedule) for rank in local},
            [StageState(one.stage, one, None) for one in optimizers],
        )
        self._steppers = [(rank, [one for one in optimizers if first[one.stage] == rank]) for rank in local]
        self._programs = execution.programs
        self._collectives = parts.collectives
        self._recorders = parts.recorders
        self._max_grad_norm = parts.max_grad_norm
        self._device = parts.device
        self._parameters = [p for _, p in ownership.named_parameters() if p.requires_grad]
        counts = parts.collectives.is_first_member  # what a tensor group holds in common
        self._counted = [p for p in ownership.counted_parameters(local) if counts and p.requires_grad]
        self._before: list[torch.Tensor | None] = []
        self._known: Known | None = None  # of the batch that ran last
        self._scale = 1.0
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        by_holders: dict[tuple[int, ...], list[str]] = {}
        named = dict(ownership.named_parameters())
        for name, holders in ownership.tied():
            if not set(holders).isdisjoint(local) and not set(holders) <= set(local):
                by_holders.setdefault(holders, []).append(name)
        self._shared = [
            _Shared(holders, FlatGradients([(name, named[name]) for name in names]))
            for holders, names in by_holders.items()
        ]

    def begin(self, batch: Batch) -> Programs:
        """Put aside the gradients that are there."""
        for rank in self.ranks.values():
            rank.enter(batch)
        self._before = [p.grad for p in self._parameters]
        if any(grad is not None for grad in self._before):
            for parameter in self._parameters:
                parameter.grad = None
        return {rank: self._programs[rank] for rank in self.ranks}

    def losses_known(self) -> None:
        """Every rank has all of them."""
        rank = next(iter(self.ranks.values()))
        loss, self._scale = rank.total(0)
        self._known = Known(rank.batches[0].step, loss.mean, None)

    def gradients_ready(self) -> None:
        """Scale the batch's gradients, sum what several ranks hold, and add what was there before."""
        scale_gradients([p.grad for p in self._parameters], self._scale)
        numbers = self._option_numbers() if self._shared else {}
        for shared in self._shared:
            self._sum(shared, numbers)
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            if grad is None:
                continue
            if parameter.grad is not None:
                grad += parameter.grad
            parameter.grad = grad
        self._before = []

    def step(self) -> Known:
        """Clip, and step every optimizer."""
        known, norm = self.accumulated(), None
        if self._max_grad_norm is not None:
            recorder = next(iter(self._recorders.values()))
            start = recorder.clock.stamp()
            norm = self.clip(self._max_grad_norm)
            recorder.norm(start, recorder.clock.stamp())
        for rank, optimizers in self._steppers:
            recorder = self._recorders[rank]
            for optimizer in optimizers:
                start = recorder.clock.stamp()
                optimizer.step(known.loss)
                recorder.action(Action(optimizer.stage, Op.U, 0), start, recorder.clock.stamp())
        return known._replace(grad_norm=norm)

    def abandon(self, error: BaseException) -> None:
        """The gradients that were there before are there again."""
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            parameter.grad = grad
        self._before = []

    def accumulated(self) -> Known:
        """The batch that ran last."""
        assert self._known is not None
        return self._known

    def clip(self, max_norm: float, *, norm_type: float = 2.0, only_finite: bool = False) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; see Update.clip."""
        part = norm_part([p.grad for p in self._counted], norm_type=norm_type, device=self._device)
        largest = math.isinf(norm_type)
        self._collectives.all_reduce(part, what="summing the gradient norm", largest=largest)
        norm = norm_of(part, norm_type=norm_type)
        if math.isfinite(norm) or not only_finite:
            clip_gradients([p.grad for p in self._parameters], norm=norm, max_norm=max_norm)
        return norm

    def timeline(self, records: Sequence[RankRecord]) -> Timeline:
        """One batch."""
        return assemble_timeline(self.schedule, records)

    def _sum(self, shared: _Shared, options: Mapping[int, int]) -> None:
        """All-reduce bucket by bucket; a rank to which nothing came gives zeros."""
        ranks, flat = shared
        parameters = flat.parameters
        numbers = torch.tensor([options.get(id(p), 0) for p in parameters], dtype=torch.float64, device=self._device)
        flags = torch.cat([flat.flags([p.grad for p in parameters]), numbers, numbers.square()])
        self._collectives.all_reduce(flags, what=_SUMMING, ranks=ranks)
        present, totals, squares = flags.view(3, -1)
        differing = (len(ranks) * squares != totals.square()).nonzero().flatten().tolist()
        if differing:  # the same on all ranks, so that none goes on alone
            raise ValueError(differing_options([flat.names[position] for position in differing], ranks))
        present = present.tolist()
        for bucket in flat.buckets:
            gradients = []
            for parameter in (parameters[i] for i in bucket if present[i]):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
            if len(gradients) == 1 and gradients[0].is_contiguous():
                self._collectives.all_reduce(gradients[0], what=_SUMMING, ranks=ranks)
            elif gradients:
                size = sum(gradient.numel() for gradient in gradients)
                buffer = flatten(gradients, out=self._buffer(gradients[0].dtype, size))
                self._collectives.all_reduce(buffer, what=_SUMMING, ranks=ranks)
                torch._foreach_copy_(gradients, unflatten(buffer, gradients))

    def _option_numbers(self) -> dict[int, int]:
        """Gradients for all parameters of this process."""
        numbers: dict[int, int] = {}
        for one in self.stages:
            numbers.update(one.optimizers.option_numbers())
        return numbers

    def _buffer(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Kept from batch to batch: on a CPU fresh memory costs more than the copy into it."""
        known = self._buffers.get(dtype)
        if known is None or known.numel() < size:
            known = self._buffers[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return known[:size]

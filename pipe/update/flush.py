"""The update behind a flush: a batch is through on all ranks, then its gradients are summed, clipped and applied."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...comm import Collectives
from ...schedules import Action, Collective, Op, Schedule, Timeline, check_lowered, lower
from ...schedules.messages import Sharing
from ...schedules.program import RankProgram
from ...schedules.timing.records import RankRecord, assemble_timeline
from ..batch.batches import Batch, NonFiniteLossError
from ..parallel.sharding import Sharding
from ..stages.ownership import Ownership
from .gradients import clip_gradients, norm_of, norm_part, refuse_sparse_modules, scale_gradients
from .interface import Known, Programs, StageState, Update, UpdateParts
from .loss_scale import LossScale, unscale
from .shards import Shards, shard_stages
from .shared_sums import FlushRank, SharedSum

_ORDERS = 32  # of batches, whose programs are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushExecution:
    """One batch at a time, by `programs` of all ranks.

    Arguments:
        data_groups: by rank, the ranks that run the same on batches of their own, itself among them; none where all
            ranks pass the same batch.
        sharing: messages of losses, and what processes do together.
    """

    schedule: Schedule
    programs: Sequence[RankProgram]
    data_groups: Sequence[Sequence[int]]
    sharing: Sharing

    def ordered(self, schedule: Schedule) -> FlushExecution:
        """The same work in the order of another schedule."""
        return replace(self, schedule=schedule, programs=batch_programs(schedule, self.sharing))

    def make_update(self, parts: UpdateParts) -> FlushUpdate:
        """With an optimizer for each local stage."""
        return FlushUpdate(self, parts)


def make_flush_execution(
    schedule: Schedule,
    ownership: Ownership,
    collectives: Collectives,
    *,
    sharding: Sharding,
    has_loss: bool,
    num_replicas: int,
) -> FlushExecution:
    """The programs of a batch, at whose end every rank has the losses, if any. Collective over the processes.

    Arguments:
        num_replicas: of the data axis, D, each with a batch of its own.
    """
    # Replicas of a position along the pipeline stand in a row (see `Mesh`). A stage may have several positions.
    rows = [range(first, first + num_replicas) for first in range(0, schedule.num_ranks, num_replicas)]
    data_groups = [tuple(row) for row in rows for _ in row] if num_replicas > 1 else [()] * schedule.num_ranks
    sums = () if collectives.alone else tuple(Collective(each, Op.REDUCE_GRAD, 0) for each in ownership.shared())
    for each in sums:
        collectives.subgroup(each.ranks(schedule.owners))
    for ranks, count in zip(schedule.owners, sharding.shards, strict=True):
        if count > 1:
            collectives.subgroup(ranks)
    for group in dict.fromkeys(data_groups):
        if group:
            collectives.subgroup(group)
    shared = Sharing(loss=has_loss, collectives=(*sums, *sharding.collectives()))
    return FlushExecution(
        schedule=schedule, programs=batch_programs(schedule, shared), data_groups=data_groups, sharing=shared
    )


def batch_programs(schedule: Schedule, sharing: Sharing) -> Sequence[RankProgram]:
    """One batch by rank, with its messages, and what processes do together."""
    lowered = lower(schedule, sharing=sharing)
    check_lowered(lowered)
    return lowered.programs


class FlushUpdate(Update):
    """What becomes of a batch's gradients behind it (`_LocalGradients`), and of the weights.

    Those that several ranks hold (replicas, tied weights) are summed beside the backwards that follow (`shared_sums`).
    """

    def __init__(self, execution: FlushExecution, parts: UpdateParts) -> None:
        schedule, ownership, local = execution.schedule, parts.ownership, tuple(parts.recorders)
        refuse_sparse_modules(
            parts.model.root, {name for name, holders in ownership.tied() if not set(holders) <= set(local)}
        )
        # Replicas in one process have one optimizer: the first of them steps it.
        first = {stage: rank for rank in reversed(local) for stage in schedule.placement[rank]}
        no_delay = [0.0] * schedule.num_stages
        optimizers = [
            parts.make_optimizers(s, ownership.stage_parameters(s), may_hold_others=True, delays=no_delay)
            for s in sorted(first)
            if parts.optimizer is not None
        ]
        self.shards = shard_stages(
            local[0],
            optimizers,
            schedule=schedule,
            sharding=parts.sharding,
            ownership=ownership,
            collectives=parts.collectives,
            recorder=parts.recorders[local[0]],
        )
        scale = None if parts.grad_scaler is None else LossScale(parts.grad_scaler)
        self._flush_ranks = {rank: self._make_rank(rank, execution, parts, scale) for rank in local}
        super().__init__(
            schedule,
            self._flush_ranks,
            [StageState(one.stage, one, None) for one in optimizers],
            scale,
            self.shards,
        )
        self._steppers = [(rank, [one for one in optimizers if first[one.stage] == rank]) for rank in local]
        self._execution = execution
        self._orders: dict[int, FlushExecution] = {}  # by id of their schedules, which they keep alive
        self._recorders = parts.recorders
        self._max_grad_norm = parts.max_grad_norm
        self._gradients = _LocalGradients(ownership, local, self.shards, parts.collectives, device=parts.device)
        self._present: set[str] = set()  # divided parameters of which the last batch made a gradient
        self._known: Known | None = None  # of the batch that ran last

    def begin(self, batch: Batch) -> Programs:
        self._require_whole()
        for rank in self.ranks.values():
            rank.enter(batch)
        if self.loss_scale is not None and self.loss_scale.changed_outside():
            self.loss_scale.adopt()
        self._gradients.put_aside()
        return {rank: self._execution.programs[rank] for rank in self.ranks}

    def follow(self, schedule: Schedule) -> None:
        """Lowered once for each of the newest orders."""
        if id(schedule) not in self._orders:
            if len(self._orders) == _ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[id(schedule)] = self._execution.ordered(schedule)
        self._execution = self._orders[id(schedule)]
        self.schedule = schedule

    def losses_known(self) -> None:
        rank = next(iter(self.ranks.values()))
        loss, _ = rank.total(0)
        self.scale = loss.scale(loss.num_samples)  # samples of other replicas count in what was summed already
        self._known = Known(rank.batches[0].step, loss.mean, None)

    def gradients_ready(self) -> None:
        """Take what several ranks hold as summed, scale the batch's gradients, and add what was there before."""
        self._present = {name for rank in self._flush_ranks.values() for name in rank.finish_sums()}
        self._gradients.summed(scale=self.scale)

    def lose(self, error: BaseException) -> None:
        """Gradients are dropped; a loss scale that has shrunk to 0 says so before any update."""
        if isinstance(error, NonFiniteLossError):
            return
        super().lose(error)
        self._gradients.drop()

    def step(self) -> Known:
        """Clip, and step every optimizer; with a loss scale divide by it first, and step none where one overflowed."""
        assert self._known is not None
        known, norm = self._known, None
        self._gradients.add_before_to_parts()
        skipped = self._unscale()
        if self._max_grad_norm is not None:
            recorder = next(iter(self._recorders.values()))
            start = recorder.clock.stamp()
            norm = self._gradients.clip(self._max_grad_norm, of_parts=True)
            recorder.norm(start, recorder.clock.stamp())
        self.gate.enter()
        for part in self.shards.parts.values():
            part.follow()
        self._step_optimizers(known.loss, skipped)
        if not self.shards.apart:
            self.shards.gather()
        return known._replace(grad_norm=norm, skipped=skipped)

    def _step_optimizers(self, loss: float | None, skipped: bool) -> None:
        for rank, optimizers in self._steppers:
            recorder = self._recorders[rank]
            for optimizer in optimizers:
                start = recorder.clock.stamp()
                optimizer.step(loss, skipped=skipped)
                recorder.action(Action(optimizer.stage, Op.U, 0), start, recorder.clock.stamp())

    def _unscale(self) -> bool:
        """Whether a gradient of any stage or replica overflowed, the same on all ranks."""
        scale = self.loss_scale
        if scale is None:
            return False
        overflowed = self._gradients.unscale(scale.value)
        scale.update(overflowed=overflowed)
        scale.publish()
        return overflowed

    def abandon(self, error: BaseException) -> None:
        if not self.is_lost:
            self._gradients.put_back()
        if self.shards.apart:
            self.shards.drop()

    def accumulated(self) -> Known:
        """The batch that ran last; its gradients are whole on every rank, those of divided parameters too."""
        assert self._known is not None
        self._gradients.gather(self._present)
        return self._known

    def clip(self, max_norm: float, *, norm_type: float = 2.0, only_finite: bool = False) -> float:
        return self._gradients.clip(max_norm, norm_type=norm_type, only_finite=only_finite)

    def timeline(self, records: Sequence[RankRecord], *, schedule: Schedule) -> Timeline:
        return assemble_timeline(schedule, records)

    def _make_rank(
        self, rank: int, execution: FlushExecution, parts: UpdateParts, loss_scale: LossScale | None
    ) -> FlushRank:
        schedule, ownership = execution.schedule, parts.ownership
        named, held = dict(ownership.named_parameters()), ownership.shared()

        def sums(collective: Collective) -> list[SharedSum]:
            """Sums of divided parameters, and of the others."""
            names, ranks = held[collective.stages], collective.ranks(schedule.owners)
            own = [name for name in names if name in self.shards.parts]
            others = [name for name in names if name not in self.shards.parts]
            return [
                SharedSum(
                    collective,
                    ranks=ranks,
                    parameters=[(name, named[name]) for name in some],
                    parts=[self.shards.parts[name] for name in some] if some is own else (),
                    collectives=parts.collectives,
                    device=parts.device,
                )
                for some in (own, others)
                if some
            ]

        return FlushRank(
            rank,
            schedule,
            loss_scale,
            sums={
                each: sums(each)
                for each in execution.programs[rank].steps
                if isinstance(each, Collective) and each.op is Op.REDUCE_GRAD
            },
            option_numbers=self._option_numbers,
            replicas=execution.data_groups[rank],
            parts=parts,
            shards=self.shards,
        )

    def _option_numbers(self) -> dict[int, int]:
        """Option numbers of all parameters of this process."""
        numbers: dict[int, int] = {}
        for one in self.stages:
            numbers.update(one.optimizers.option_numbers())
        return numbers


class _LocalGradients:
    """The `.grad`s of this process's parameters.

    What a batch adds is kept apart from what was there before, since it must be changed by itself: scaled (losses
    given as sum and count), or summed over the ranks that hold a parameter. Where all that hold a parameter are in this
    process, its gradients add up by themselves.

    Arguments:
        local: ranks of this process.
        shards: parameters whose updates several ranks divide among themselves: each has the gradients of its part.
    """

    def __init__(
        self,
        ownership: Ownership,
        local: Sequence[int],
        shards: Shards,
        collectives: Collectives,
        *,
        device: torch.device,
    ) -> None:
        self._named = {name: p for name, p in ownership.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        self.counted = [p for p in ownership.counted_parameters(local) if p.requires_grad]
        self._shards, self._collectives, self._device = shards, collectives, device
        self._tensor_group = ownership.group
        self._wholes = {id(part.whole) for part in shards.parts.values()}
        self._counted_parts = shards.counted(ownership)
        self._before: list[torch.Tensor | None] = []

    def name_of(self, parameter: object) -> str | None:
        """Name of a parameter; None of another's."""
        return next((name for name, each in self._named.items() if each is parameter), None)

    def put_aside(self) -> None:
        """A batch begins: those that are there wait for its end."""
        self._before = [p.grad for p in self.parameters]
        if any(grad is not None for grad in self._before):
            for parameter in self.parameters:
                parameter.grad = None

    def put_back(self) -> None:
        """The batch failed: those that were there are there again."""
        for parameter, grad in zip(self.parameters, self._before, strict=True):
            parameter.grad = grad
        for part in self._shards.parts.values():
            part.parameter.grad = None
        self._before = []

    def drop(self) -> None:
        """Forget all of them (after an error)."""
        for parameter in [*self.parameters, *(part.parameter for part in self._shards.parts.values())]:
            parameter.grad = None
        self._before = []

    def summed(self, *, scale: float) -> None:
        """The batch's are summed over all ranks: scale them, and add what was there before, but for divided ones."""
        self._tensor_group.compare_gradients({name: p.grad for name, p in self._named.items()})
        scale_gradients([p.grad for p in self._updated()], scale)
        self._add_before(divided=False)

    def add_before_to_parts(self) -> None:
        """Add to the parts of divided parameters the gradients that were there before the batch."""
        before = {id(p): grad for p, grad in zip(self.parameters, self._before, strict=True) if grad is not None}
        for part in self._shards.parts.values():
            grad = before.get(id(part.whole))
            if grad is not None and not part.is_empty:
                part.parameter.grad = _sum(part.of(grad), part.parameter.grad)
        self._before = []

    def gather(self, present: Collection[str]) -> None:
        """All of each divided parameter's gradient, with what was there before, in place of this rank's part.

        Arguments:
            present: divided parameters of which the batch made a gradient.
        """
        for stage in self._shards.stages.values():
            stage.gather_gradients(present)
        self._add_before(divided=True)
        self._before = []

    def unscale(self, factor: float) -> bool:
        """Divide by a loss scale; whether one of any stage or replica overflowed, the same on all ranks."""
        found = unscale([p.grad for p in self._updated()], factor, device=self._device)
        self._collectives.all_reduce(found, what="looking for gradients that overflowed")
        return bool(found > 0)

    def clip(
        self, max_norm: float, *, norm_type: float = 2.0, only_finite: bool = False, of_parts: bool = False
    ) -> float:
        """Scale all so that their global norm is at most `max_norm`; see Update.clip.

        Arguments:
            of_parts: in front of the updates, where of divided parameters each rank has the gradients of its parts.
        """
        counted, changed = self.counted, self.parameters
        if of_parts:
            counted = [p for p in counted if id(p) not in self._wholes]
            counted += [part.parameter for part in self._counted_parts]
            changed = self._updated()
        part = norm_part([p.grad for p in counted], norm_type=norm_type, device=self._device)
        self._collectives.all_reduce(part, what="summing the gradient norm", largest=math.isinf(norm_type))
        norm = norm_of(part, norm_type=norm_type)
        if math.isfinite(norm) or not only_finite:
            clip_gradients([p.grad for p in changed], norm=norm, max_norm=max_norm)
        return norm

    def _updated(self) -> list[nn.Parameter]:
        """The parameters with the gradients that updates are made of: of divided ones the parts."""
        whole = [p for p in self.parameters if id(p) not in self._wholes]
        return whole + [part.parameter for part in self._shards.parts.values()]

    def _add_before(self, *, divided: bool) -> None:
        for parameter, grad in zip(self.parameters, self._before, strict=True):
            if grad is not None and (id(parameter) in self._wholes) == divided:
                parameter.grad = _sum(grad, parameter.grad)


def _sum(before: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    """Gradients that were there, in place, with what was added."""
    return before if added is None else before.add_(added)

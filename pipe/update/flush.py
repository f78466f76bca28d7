"""The update after a flush: once a batch has run on all ranks, its gradients are summed, clipped and applied.

A batch's gradients are kept apart from earlier ones in the `.grad`s of this process's parameters, since they must be
scaled (losses given as sum and count), or summed over the ranks that hold a parameter. If all of these are in this
process, autograd adds their gradients up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from ...schedules import Action, Collective, Op, Schedule, Timeline, check_lowered, lower
from ...schedules.messages import Sharing
from ...schedules.program import RankProgram
from ...schedules.timing.records import RankRecord, assemble_timeline
from ..batch.batches import Batch, NonFiniteLossError
from ..context import Run
from ..results import Known
from ..stage.ownership import Ownership
from ..stage.wiring import Mode
from ..trace.recorder import RankRecorder
from .gradients import LossScale, clip_gradients, norm_of, norm_part, refuse_sparse_modules, scale_gradients, unscale
from .interface import Programs, Update
from .optimizers import StageOptimizers
from .rank_update import RankUpdate
from .shards import Shards, shard, stage_optimizers
from .shared_sums import SharedSum

_ORDERS = 32  # orders of batches whose programs are kept


@dataclass(frozen=True, kw_only=True)
class FlushPrograms:
    """One batch at a time, by `programs` of all ranks."""

    schedule: Schedule
    sharing: Sharing  # messages of losses, and collectives
    # By rank, the ranks that run the same on other batches, itself among them; none where all ranks pass the same batch
    data_groups: Sequence[Sequence[int]]

    @cached_property
    def programs(self) -> Sequence[RankProgram]:
        return batch_programs(self.schedule, self.sharing)

    @cached_property
    def last_backwards(self) -> Sequence[Mapping[Action, Collective]]:
        return [program.last_backwards() for program in self.programs]


def flush_programs(run: Run, mode: Mode, ownership: Ownership) -> FlushPrograms:
    """The programs of a batch, after which every rank has the losses, if any. Collective over the processes."""
    schedule, sharding, num_replicas = mode.schedule, run.layout.sharding, run.num_replicas
    # Replicas of a position along the pipeline have successive ranks (see `ProcessMesh`). A stage may have several
    # positions.
    rows = [range(first, first + num_replicas) for first in range(0, schedule.num_ranks, num_replicas)]
    data_groups = [tuple(row) for row in rows for _ in row] if num_replicas > 1 else [()] * schedule.num_ranks
    sums = () if run.collectives.alone else tuple(Collective(each, Op.REDUCE_GRAD, 0) for each in ownership.shared())
    for each in sums:
        run.collectives.subgroup(each.ranks(schedule.owners))
    for ranks, count in zip(schedule.owners, sharding.shards, strict=True):
        if count > 1:
            run.collectives.subgroup(ranks)
    for group in (*dict.fromkeys(data_groups), *sorted(ownership.all_holders())):
        if group:
            run.collectives.subgroup(group)
    together = (*sums, *sharding.collectives())
    sharing = Sharing(loss=run.has_loss, collectives=together, receives_ahead=mode.receives_ahead)
    return FlushPrograms(schedule=schedule, sharing=sharing, data_groups=data_groups)


def batch_programs(schedule: Schedule, sharing: Sharing) -> Sequence[RankProgram]:
    lowered = lower(schedule, sharing=sharing)
    check_lowered(lowered)
    return lowered.programs


class FlushUpdate(Update):
    """Sums, scales and clips a batch's gradients after it, and steps the optimizers. Sums of gradients that several
    ranks hold (replicas, tied weights) overlap with later backwards (`shared_sums`)."""

    def __init__(
        self,
        programs: FlushPrograms,
        ownership: Ownership,
        recorders: Mapping[int, RankRecorder],
        made: Sequence[StageOptimizers] = (),
    ) -> None:
        schedule, options, local = programs.schedule, ownership.run.options, tuple(recorders)
        refuse_sparse_modules(
            ownership.model.root, {name for name, holders in ownership.tied() if not set(holders) <= set(local)}
        )
        # Replicas in one process have one optimizer: the first of them steps it.
        first = {stage: rank for rank in reversed(local) for stage in schedule.placement[rank]}
        own = sorted(first) if options.optimizer is not None else []
        make_stage = partial(stage_optimizers, ownership, delays=[0.0] * schedule.num_stages)
        stages = made or [make_stage(s, ownership.stage_parameters(s)) for s in own]
        shards = shard(ownership, local[0], stages, schedule, recorders[local[0]])
        scale = None if options.grad_scaler is None else LossScale(options.grad_scaler)

        def make(rank: int) -> RankUpdate:
            collectives = [each for each in programs.programs[rank].steps if isinstance(each, Collective)]
            summed = [each for each in collectives if each.op is Op.REDUCE_GRAD]
            return RankUpdate(
                rank,
                schedule,
                shards,
                scale,
                sums={each: shared_sums(ownership, shards, each, each.ranks(schedule.owners)) for each in summed},
                option_numbers=lambda: {key: n for one in stages for key, n in one.option_numbers().items()},
                replicas=programs.data_groups[rank],
                are_mixed=ownership.run.layout.place.mesh.expert > 1,
            )

        ranks = {rank: make(rank) for rank in local}
        super().__init__(schedule, ranks, stages, shards, ownership=ownership, recorders=recorders, loss_scale=scale)
        # In the order of the stages, in which one process draws random numbers.
        self._steppers = [(self.recorders[first[one.stage]], one) for one in stages]
        self._programs = programs
        self._orders: dict[int, FlushPrograms] = {}  # by id of their schedules, which they keep alive
        self._max_grad_norm = options.max_grad_norm
        self._present: set[str] = set()  # divided parameters with a gradient of the last batch
        self._known: Known | None = None  # of the batch that ran last
        self._prepared: tuple[float | None, bool] | None = None  # its norm, and whether its update is skipped
        self._named = {name: p for name, p in ownership.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        everyone = range(schedule.num_ranks)
        self._counted = [p for p in ownership.counted_parameters(local, among=everyone) if p.requires_grad]
        self._counted_parts = shards.counted(ownership)
        self._divided = {id(part.whole) for part in shards.parts.values()}
        self._before: list[torch.Tensor | None] = []  # gradients that were there when the batch began

    def begin(self, batch: Batch) -> Programs:
        self._require_whole()
        for number, rank in self.ranks.items():
            rank.enter(batch)
            rank.sum_after = self._programs.last_backwards[number]
        if self.loss_scale is not None and self.loss_scale.changed_outside():
            self.loss_scale.adopt()
        self._before = [p.grad for p in self._parameters]
        if any(grad is not None for grad in self._before):
            for parameter in self._parameters:
                parameter.grad = None
        return {rank: self._programs.programs[rank] for rank in self.ranks}

    def follow(self, schedule: Schedule) -> None:
        if id(schedule) not in self._orders:
            if len(self._orders) == _ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[id(schedule)] = replace(self._programs, schedule=schedule)
        self._programs = self._orders[id(schedule)]
        self.schedule = schedule

    def losses_known(self) -> None:
        rank = next(iter(self.ranks.values()))
        loss, _ = rank.total(0)
        self.scale = loss.scale(loss.num_samples)  # sums already count samples of other replicas
        self._known = Known(rank.batches[0].step, loss.mean, None)

    def gradients_ready(self) -> None:
        """Take the sums over ranks, scale the batch's gradients, and add earlier ones, but to divided parameters."""
        self._present = {name for rank in self.ranks.values() for name in rank.finish_sums()}
        self.ownership.group.compare_gradients({name: p.grad for name, p in self._named.items()})
        scale_gradients([p.grad for p in self._updated()], self.scale)
        self._add_before(divided=False)

    def lose(self, error: BaseException) -> None:
        """Drop the gradients; but a loss scale that has shrunk to 0 raises before any update."""
        if isinstance(error, NonFiniteLossError):
            return
        super().lose(error)
        for parameter in [*self._parameters, *(part.parameter for part in self.shards.parts.values())]:
            parameter.grad = None
        self._before = []

    def step(self) -> Known:
        """Clip, and step every optimizer; with a loss scale divide by it first, and step none after an overflow."""
        if self._prepared is None:
            self.prepare()
        assert self._known is not None
        assert self._prepared is not None
        known, (norm, skipped), self._prepared = self._known, self._prepared, None
        self.gate.enter()
        for part in self.shards.parts.values():
            part.follow()
        for recorder, optimizer in self._steppers:
            start = recorder.clock.stamp()
            optimizer.step(known.loss, skipped=skipped)
            recorder.action(Action(optimizer.stage, Op.U, 0), start, recorder.clock.stamp())
        if not self.shards.apart:
            self.shards.gather()
        return known._replace(grad_norm=norm, skipped=skipped)

    def prepare(self) -> None:
        self._add_before_to_parts()
        norm, skipped = None, self._unscale()
        if self._max_grad_norm is not None:
            recorder = next(iter(self.recorders.values()))
            start = recorder.clock.stamp()
            norm = self.clip(self._max_grad_norm, of_parts=True)
            recorder.norm(start, recorder.clock.stamp())
        self._prepared = norm, skipped

    def take_back(self) -> None:
        self._prepared, self._known, self._before = None, None, []
        for parameter in self._parameters:
            parameter.grad = None

    def _unscale(self) -> bool:
        scale = self.loss_scale
        if scale is None:
            return False
        found = unscale([p.grad for p in self._updated()], scale.value, device=self.run.options.device)
        self.run.collectives.all_reduce(found, what="looking for gradients that overflowed")
        overflowed = bool(found > 0)
        scale.update(overflowed=overflowed)
        scale.publish()
        return overflowed

    def abandon(self, error: BaseException) -> None:
        if not self.is_lost:
            for parameter, grad in zip(self._parameters, self._before, strict=True):
                parameter.grad = grad
            for part in self.shards.parts.values():
                part.parameter.grad = None
            self._before = []
        if self.shards.apart:
            self.shards.drop()

    def accumulated(self) -> Known:
        assert self._known is not None
        self.shards.gather_gradients(self._present)
        self._add_before(divided=True)
        self._before = []
        return self._known

    def clip(
        self, max_norm: float, *, norm_type: float = 2.0, only_finite: bool = False, of_parts: bool = False
    ) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; see Update.clip. `of_parts`: before
        updates, when each rank has the gradients of its parts of divided parameters."""
        counted, changed = self._counted, self._parameters
        if of_parts:
            counted = [p for p in counted if id(p) not in self._divided]
            counted += [part.parameter for part in self._counted_parts]
            changed = self._updated()
        part = norm_part([p.grad for p in counted], norm_type=norm_type, device=self.run.options.device)
        self._sum_norm(part, largest=math.isinf(norm_type))
        norm = norm_of(part, norm_type=norm_type)
        if math.isfinite(norm) or not only_finite:
            clip_gradients([p.grad for p in changed], norm=norm, max_norm=max_norm)
        return norm

    def _sum_norm(self, part: torch.Tensor, *, largest: bool) -> None:
        self.run.collectives.all_reduce(part, what="summing the gradient norm", largest=largest)

    def timeline(self, records: Sequence[RankRecord], *, schedule: Schedule) -> Timeline:
        return assemble_timeline(schedule, records)

    def _updated(self) -> list[nn.Parameter]:
        whole = [p for p in self._parameters if id(p) not in self._divided]
        return whole + [part.parameter for part in self.shards.parts.values()]

    def _add_before(self, *, divided: bool) -> None:
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            if grad is not None and (id(parameter) in self._divided) == divided:
                parameter.grad = _sum(grad, parameter.grad)

    def _add_before_to_parts(self) -> None:
        before = {id(p): grad for p, grad in zip(self._parameters, self._before, strict=True) if grad is not None}
        for part in self.shards.parts.values():
            grad = before.get(id(part.whole))
            if grad is not None and not part.is_empty:
                part.parameter.grad = _sum(part.of(grad), part.parameter.grad)
        self._before = []


def shared_sums(ownership: Ownership, shards: Shards, collective: Collective, ranks: Sequence[int]) -> list[SharedSum]:
    run, named = ownership.run, dict(ownership.named_parameters())
    together: dict[tuple[bool, tuple[int, ...]], list[str]] = {}  # names of one sum: parts alone, or none
    for name in ownership.shared()[collective.stages]:
        holders = tuple(rank for rank in ownership.holders(name) if rank in ranks)
        together.setdefault((name in shards.parts, holders), []).append(name)
    return [
        SharedSum(
            collective,
            ranks=holders,
            parameters=[(name, named[name]) for name in some],
            parts=[shards.parts[name] for name in some] if are_parts else (),
            collectives=run.collectives,
            compare=ownership.group.compare_gradients if run.layout.place.is_uneven(holders) else None,
            added=run.added,
        )
        for (are_parts, holders), some in sorted(together.items(), key=lambda one: not one[0][0])
    ]


def _sum(before: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    return before if added is None else before.add_(added)

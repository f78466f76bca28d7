"""The update behind a flush: a batch is through on all ranks, then its gradients are summed, clipped and applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...comm import Collectives
from ...schedules import Action, Collective, Op, Schedule, Timeline, check_lowered, lower
from ...schedules.messages import Sharing
from ...schedules.program import RankProgram
from ...schedules.timing.records import RankRecord, assemble_timeline
from ..batch.batches import Batch, NonFiniteLossError
from ..parallel.sharding import Sharding
from ..stages.ownership import Ownership
from .gradients import refuse_sparse_modules
from .interface import Known, Programs, StageState, Update, UpdateParts
from .local_gradients import LocalGradients
from .loss_scale import LossScale
from .shards import shard_stages
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
    """What becomes of a batch's gradients behind it (`local_gradients`), and of the weights.

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
        self._gradients = LocalGradients(ownership, local, self.shards, parts.collectives, device=parts.device)
        self._present: set[str] = set()  # divided parameters of which the last batch made a gradient
        self._known: Known | None = None  # of the batch that ran last

    def begin(self, batch: Batch) -> Programs:
        """Put aside the gradients that are there."""
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
        """Every rank has all of them."""
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
            norm = self._gradients.clip_updated(self._max_grad_norm)
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
        """The gradients that were there before are there again."""
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
        """Scale all gradients so that their global norm is at most `max_norm`; see Update.clip."""
        return self._gradients.clip(max_norm, norm_type=norm_type, only_finite=only_finite)

    @contextmanager
    def whole_weights(self, *, replaced: bool = False) -> Iterator[None]:
        """Gathered, or to be filled; then let go."""
        stages = tuple(self.shards.stages.values()) if self.shards.apart else ()
        try:
            if replaced:
                for stage in stages:
                    stage.make_room()
            elif stages:
                self.shards.gather()
            yield
            for stage in stages if replaced else ():
                stage.take()
        finally:
            for stage in stages:
                stage.let_go(all_of_them=True)

    def timeline(self, records: Sequence[RankRecord], *, schedule: Schedule) -> Timeline:
        """One batch."""
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
            collectives=parts.collectives,
            recorder=parts.recorders[rank],
            shards=self.shards,
            device=parts.device,
        )

    def _option_numbers(self) -> dict[int, int]:
        """Option numbers of all parameters of this process."""
        numbers: dict[int, int] = {}
        for one in self.stages:
            numbers.update(one.optimizers.option_numbers())
        return numbers

"""Updates within a stream: batch after batch without a flush, an asynchronous schedule fed by train_step.

    begin(batch t)   every local rank runs call t of the stream; batches t - 1, t - 2, ... are still in flight; one of
                     the first batches, if these are to be alone in the pipeline, runs to its end
    drain()          every local rank runs the rest; the next batch begins with an empty pipeline

Calls and drains are collective, like every step: all ranks make them in the same order. The schedule determines weight
versions, messages and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from ...schedules import Schedule, Timeline, check
from ...schedules.lowering.calls import RunCalls, make_calls
from ...schedules.messages import Sharing
from ...schedules.timing.records import RankRecord, assemble_stream
from ...schedules.transform import defer_updates
from ..batch.batches import Batch
from ..context import Run
from ..results import Known
from ..stage.ownership import Ownership
from ..stage.weights import WeightVersions
from ..stage.wiring import Mode
from ..trace.recorder import RankRecorder
from .gradients import refuse_sparse_modules
from .interface import Programs, Update
from .optimizers import StageOptimizers
from .shards import shard, stage_optimizers
from .stream_rank import StreamRank

_SCHEDULED = {"lr", "betas", "momentum"}  # what torch's schedules change


class StreamUpdate(Update):
    def __init__(
        self,
        course: RunCalls,
        ownership: Ownership,
        recorders: Mapping[int, RankRecorder],
        made: Sequence[StageOptimizers] = (),
    ) -> None:
        assert not made  # a stream ends with the first death
        ranks = _make_ranks(course, ownership, recorders)
        stages = [one.stages[stage] for one in ranks.values() for stage in sorted(one.stages)]
        shards = next(iter(ranks.values())).shards  # nothing is divided where a process has several ranks
        super().__init__(course.schedule, ranks, stages, shards, ownership=ownership, recorders=recorders)
        self._ranks = ranks
        for rank in ranks.values():
            rank.gate = self.gate
        self._course = course
        self._first: int | None = None  # the batch that the stream began with; None: it is empty
        self._last = -1
        self._newest: Known | None = None

    def versions_of(self, rank: int, stage: int) -> WeightVersions:
        return self._ranks[rank].weights[stage]

    def begin(self, batch: Batch) -> Programs:
        """Begin one call. The user's changes of parameters are adopted when the pipeline is empty. Raises ValueError
        for changes while batches are in flight, and for a stream that an error has ended."""
        self._require_whole()
        self._take_changes()
        self._read_options(batch.step, is_next=True)
        first = batch.step if self._first is None else self._first
        self._first, self._last = None if self._course.is_alone(batch.step) else first, batch.step
        for rank in self._ranks.values():
            rank.enter(batch, first_batch=first)
            rank.has_updated = False
        return {r: self._course.call(r, batch.step, first_batch=first) for r in self._ranks}

    def step(self) -> Known | None:
        """The newest known result: the program has made the updates, and results are known a little later."""
        *others, speaker = self._ranks.values()  # the last one knows first
        if speaker.known:
            self._newest = speaker.known.pop()
        for rank in others:
            rank.known.clear()
        return self._newest

    def losses_known(self) -> None:
        """Raise the error of a batch that was alone in the pipeline; in a stream ranks raise it in the program."""
        for rank in self._ranks.values():
            if rank.failure is not None:
                raise rank.failure

    def abandon(self, error: BaseException) -> None:
        """Restore the weights before a batch that was alone in the pipeline, unless an update of it has begun. Else
        stages have weights of different updates, and the batches in flight are lost."""
        ranks = self._ranks.values()
        failed = any(rank.failure is error for rank in ranks)
        if self._course.is_alone(self._last) and (failed or not any(rank.has_updated for rank in ranks)):
            begun_with = self._last * self.schedule.groups_per_batch
            for weights in self._weights():
                if weights.newest != begun_with:
                    weights.restore(begun_with, {})
        else:
            self.lose(error)
        for rank in ranks:
            rank.drop()

    def refuse_users_gradients(self, what: str, *, instead: str) -> None:
        raise ValueError(
            f"{what} under the asynchronous schedule {self.schedule.name!r}: each stage updates inside the "
            f"pipeline, after its last backward. Expected {instead}, or a flush schedule such as schedule='1f1b'"
        )

    def drain(self) -> Programs | None:
        self._require_whole()
        if self._first is None:
            return None
        self._read_options(self._last + 1)
        first, self._first = self._first, None
        return {r: self._course.drain(r, self._last, first_batch=first) for r in self._ranks}

    def rest(self) -> list[Known]:
        *_, speaker = self._ranks.values()
        known = list(speaker.known)
        for rank in self._ranks.values():
            rank.known.clear()
        if known:
            self._newest = max([known[-1], *([] if self._newest is None else [self._newest])])
        return known

    def waiting(self) -> Sequence[Known]:
        *_, speaker = self._ranks.values()
        return tuple(speaker.known)

    def set_aside(self) -> Callable[[], None]:
        newest, waiting = self._newest, self.rest()

        def put_back() -> None:
            *_, speaker = self._ranks.values()
            speaker.known.extendleft(reversed(waiting))
            self._newest = newest

        return put_back

    def refuse_reading(self, what: str) -> None:
        if self.shards.parts:
            self.refuse_changes(f"{what}, of weights that several ranks update in parts,")

    def refuse_changes(self, what: str) -> None:
        if self._first is not None:
            raise ValueError(
                f"{what} while batches {self._first} to {self._last} are in the pipeline: expected flush() before it"
            )

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        for weights in self._weights():
            for own, name in zip(weights.own, weights.names, strict=True):
                own.data.copy_(state[name])
            weights.adopt(weights.names)

    def restart(self) -> None:
        for rank in self._ranks.values():
            rank.drop()
            rank.known.clear()
        for one in self.stages:
            one.options.forget()
        self._first, self._newest = None, None
        super().restart()

    def timeline(self, records: Sequence[RankRecord], *, schedule: Schedule) -> Timeline:
        """The last few batches, all with a flush or all without it, as the newest."""
        del schedule
        return assemble_stream(self._course, records)

    def _take_changes(self) -> None:
        for weights in self._weights():
            hooked = weights.take_hooks()
            if hooked is not None:
                raise ValueError(
                    f"parameter {hooked!r} has a hook after the accumulation of its gradient, and under the "
                    f"asynchronous schedule {self.schedule.name!r} gradients belong to versions of it: expected "
                    f"register_hook, or a flush schedule such as schedule='1f1b'"
                )
            for name in weights.frozen_outside():
                self.refuse_changes(f"requires_grad of parameter {name!r} was changed")
                weights.follow()
        changed: dict[str, torch.Tensor] = {}
        for weights in self._weights():
            for name in weights.changed_outside():
                self.refuse_changes(f"parameter {name!r} was changed")
                changed.setdefault(name, weights.own[weights.names.index(name)].data)
        if changed:
            self.gate.enter()
        for weights in self._weights() if changed else ():  # other ranks of this process may hold copies
            if not changed.keys().isdisjoint(weights.names):
                for name, own in zip(weights.names, weights.own, strict=True):
                    if name in changed and changed[name].data_ptr() != own.data_ptr():
                        own.data.copy_(changed[name])
                weights.adopt(changed)

    def _read_options(self, batch: int, *, is_next: bool = False) -> None:
        """Apply the user's changes from this batch on; ValueError where a schedule changes the same in flight."""
        for one in self.stages:
            names = one.options.read(batch) & _SCHEDULED
            if is_next and names and one.schedulers:
                self.refuse_changes(f"{min(names)!r} of an optimizer that has an lr_scheduler= was changed")

    def _weights(self) -> list[WeightVersions]:
        return [weights for rank in self._ranks.values() for weights in rank.weights.values()]


def stream_course(run: Run, mode: Mode, ownership: Ownership) -> RunCalls:
    """Calls of an asynchronous schedule, after `flush_first` batches with a flush. Collective over the processes.
    Raises ValueError for options that a weight rule excludes, and ScheduleError for a schedule that does not repeat."""
    sharing = _sharing_of(run, mode, ownership)
    for ranks in {**dict.fromkeys(sharing.parts), **dict.fromkeys(sharing.sums)} if sharing.parts else ():
        run.collectives.subgroup(ranks)  # for collectives with an empty pipeline
    late = _with_late_updates(mode.schedule, sharing)
    return make_calls(mode.schedule, sharing=sharing, flush_first=run.options.flush_first, late=late)


def _sharing_of(run: Run, mode: Mode, ownership: Ownership) -> Sharing:
    """Messages that the updates need, besides activations and gradients. Raises ValueError for options that a rule
    excludes: a global norm, or weights tied over ranks, where stages update independently."""
    schedule, max_grad_norm, shards = mode.schedule, run.options.max_grad_norm, run.layout.sharding.shards
    sums = sorted(ownership.all_holders())
    stage_groups = {tuple(sorted(ranks)) for ranks in schedule.owners}
    ties = [(name, ranks) for name, ranks in ownership.tied() if ownership.stage_ranks(name) not in stage_groups]
    rule = schedule.rule
    if max_grad_norm is not None and rule.why_no_norm:
        raise ValueError(f"max_grad_norm={max_grad_norm} under schedule {schedule.name!r}: {rule.why_no_norm}")
    if ties and rule.why_no_ties:
        name, ranks = ties[0]
        raise ValueError(
            f"parameter {name!r} is tied over the ranks {ranks} under schedule {schedule.name!r}: {rule.why_no_ties}"
        )
    trained = {stage for name, _ in ownership.tied() for stage in ownership.stages[name]}
    parts = {tuple(sorted(schedule.owners[s])) for s in trained if shards[s] > 1}
    own, ahead = tuple(sorted(parts)), mode.receives_ahead
    return Sharing(loss=True, norm=max_grad_norm is not None, sums=tuple(sums), parts=own, receives_ahead=ahead)


def _with_late_updates(schedule: Schedule, sharing: Sharing) -> Schedule:
    if not schedule.rule.updates_may_wait or not (sharing.norm or sharing.sums):
        return schedule
    late = defer_updates(schedule)
    check(late)
    return late


def _make_ranks(course: RunCalls, ownership: Ownership, recorders: Mapping[int, RankRecorder]) -> dict[int, StreamRank]:
    schedule = course.schedule
    refuse_sparse_modules(ownership.model.root, {name for name, _ in ownership.tied()})
    peaks = check(schedule).peak_versions
    taken: set[str] = set()  # parameters that another rank of this process has already
    ranks: dict[int, StreamRank] = {}
    delays = [course.stream.delay(stage) for stage in range(schedule.num_stages)]
    for rank, recorder in recorders.items():
        count = schedule.rule.versions_kept(peaks[rank])
        weights = _weights_of(rank, schedule, ownership, taken=taken, count=count)
        taken.update(name for one in weights.values() for name in one.names)
        make = partial(stage_optimizers, ownership, delays=delays)
        named = {stage: list(zip(one.names, one.own, strict=True)) for stage, one in weights.items()}
        stages = {stage: make(stage, named[stage], versions=one) for stage, one in weights.items()}
        shards = shard(ownership, rank, list(stages.values()), schedule, recorder)
        for one in weights.values():
            one.divide(shards.parts)
        ranks[rank] = StreamRank(rank, calls=course, stages=stages, shards=shards, ownership=ownership)
    return ranks


def _weights_of(
    rank: int, schedule: Schedule, own: Ownership, *, taken: Collection[str], count: int
) -> dict[int, WeightVersions]:
    weights: dict[int, WeightVersions] = {}
    for stage in schedule.placement[rank]:
        held = [(n, p) for n, p in own.parameters() if stage in own.stages[n] and p.requires_grad]
        twice = next((n for n, _ in held for other in weights.values() if n in other.names), None)
        if twice is not None:
            raise ValueError(
                f"parameter {twice!r} is in several stages of rank {rank} under schedule {schedule.name!r}: "
                f"expected one stage per rank, or a flush schedule such as schedule='interleaved'"
            )
        weights[stage] = WeightVersions(
            name=f"stage {stage} ({own.model.names[stage]})",
            module=own.model.train.stages[stage].module,
            parameters=held,
            rule=schedule.rule,
            count=count,
            copied={name for name, _ in held if name in taken},
        )
    return weights

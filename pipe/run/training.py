"""Training: batches through the engine, and updates from their gradients.

step:  begin (read, compared, checked) -> engine.run -> losses known, gradients ready -> update -> report
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch

from ...comm import HostClocks, PeerLost, PipelineTimeout
from ...schedules import Timeline
from ...schedules.kinds import above_zero, option
from ...schedules.timing.records import RankRecord
from ..batch.agreement import CALLS, UNKNOWN, Call, Identity
from ..batch.batches import Batch, check_same_batch, hand_back
from ..batch.reader import BatchReader
from ..results import Known, StepReports, StepResult
from ..settings.given import Given
from ..stage.reruns import MovingBuffers, Snapshot
from ..stage.unchanged import Unchanged
from ..telling import tell_of_late_loss
from ..trace.measurement import gather_records
from ..update.gradients import check_norm_type
from ..update.interface import Programs, Update
from .engine import Engine

GOES_ON = 'mesh=Mesh(on_failure="reroute")'


class Training:
    def __init__(
        self,
        engine: Engine,
        update: Update,
        reader: BatchReader,
        *,
        unchanged: Unchanged,
        clocks: HostClocks,
    ) -> None:
        run = update.run
        self.num_steps = 0
        self._num_calls = 0  # with a batch, evaluations too
        self._engine = engine
        self._update = update
        self._device = run.options.device
        self._reader = reader
        self._guard = run.guard
        self._collectives = run.collectives
        self._has_groups = max(run.layout.place.mesh.tensor_sizes) > 1
        self.unchanged = unchanged
        self._reports = StepReports(run.options.on_step, rank=run.layout.place.world.rank, device=run.options.device)
        self._clocks = clocks
        self.replan_seconds = 0.0  # of the newest batch
        self._num_samples = 0  # of the newest batch
        self.on_batch: list[Callable[[Batch], None]] = []  # called with each batch before it runs
        self.before_step: Callable[[Given, int, bool], None] = lambda given, step, reads_nothing: None
        self.goes_on = False  # whether a step in which a process dies may be repeated
        self.is_ready = False  # whether this process has all that the update of such a step needs
        self.steps_made = 0  # updates before the newest such step
        self._buffers: Snapshot = ()
        self._root = run.root
        self._begun = 0.0

    @property
    def reads_nothing(self) -> bool:
        return not self._reader.reads_inputs and not self._reader.reads_target

    def read(self, reader: BatchReader, given: Given, call: Call) -> Batch:
        """The batch of one more call; a call whose batch raises an error is not counted."""
        number = self._num_calls + 1
        alone, text = self._collectives.alone, f"{call} (call {number} with a batch)"
        self._guard.set_call(text)
        identity = Identity(UNKNOWN, UNKNOWN) if alone else Identity(CALLS.index(call), number)
        batch = reader.read(given, step=self.num_steps, call=identity)
        self._num_calls = number
        self._collectives.last_call = f" after {text}"
        return batch

    def step(self, given: Given, *, is_reported: bool = True) -> StepResult:
        """A batch and its update. Calls the engine directly: each additional call costs time."""
        self._begun = time.perf_counter()
        self.before_step(given, self.num_steps, self.reads_nothing)
        if self.goes_on:
            self._remember()
        batch, programs = self._begin(given, "train_step")
        with self._lost_on_error(self._abandon):
            self._engine.run(programs)
            self._gradients_ready(batch)
        self.num_steps += 1
        if self.goes_on:
            self._vote()
        return self.make_update(is_reported=is_reported)

    def make_update(self, *, is_reported: bool = True) -> StepResult:
        """The update of a step whose gradients are ready; where steps may be repeated, without the other ranks."""
        rates, self.is_ready = self._update.learning_rates(), False
        is_alone = self.goes_on and self._guard.ended  # the links broke after the vote: no other rank is needed
        with self._lost_on_error(self._update.lose), nullcontext() if is_alone else self._guard.together():
            known = self._update.step()
        self.steps_made, self._buffers = self.num_steps, ()
        for local in self._engine.ranks:
            local.recorder.leave()
        result = self._result(known)
        if is_reported:
            self._report(known, rates)
        return result

    def accumulate(self, given: Given) -> StepResult:
        if self.goes_on:
            raise ValueError(f"forward_backward with {GOES_ON}: expected train_step, which is repeated as a whole")
        self._update.refuse_users_gradients("forward_backward", instead="train_step, which updates too")
        batch, programs = self._begin(given, "forward_backward")
        with self._lost_on_error(self._abandon):
            self._engine.run(programs)
            self._gradients_ready(batch)
        self.num_steps += 1
        return self._result(self._update.accumulated())

    def _remember(self) -> None:
        self.steps_made, self.is_ready = self.num_steps, False
        if any(p.grad is not None for p in self._root.parameters()):
            raise ValueError(
                f"gradients are left from before, with {GOES_ON}, where a repeated step must drop its own: "
                f"expected p.grad = None"
            )
        self._buffers = MovingBuffers(self._root).before_forward()

    def _vote(self) -> None:
        """After it each rank knows that all can make their update, which is then made in any case."""
        with self._guard.together():
            self._update.prepare()
            self.is_ready = True
            self._collectives.all_reduce(torch.zeros(1), what="asking whether all gradients are whole")

    def take_back(self) -> None:
        """Undo a failed step, which will be repeated."""
        self.num_steps, self.is_ready = self.steps_made, False
        if self._buffers:
            self._update.take_back()
        with torch.no_grad():
            for each in self._buffers:
                each.module._buffers[each.name] = each.buffer
                each.buffer.copy_(each.copy)

    def clip(self, max_norm: float, *, norm_type: float, error_if_nonfinite: bool) -> float:
        option("max_norm", max_norm, above_zero())
        norm_type = check_norm_type(norm_type)
        if self._update.loss_scale is not None:
            raise ValueError(
                "clip_grad_norm_ with grad_scaler=: gradients are multiplied by the loss scale until train_step "
                "divides them by it. Expected PipelineModule(..., max_grad_norm=...)"
            )
        self._update.refuse_users_gradients("clip_grad_norm_", instead="PipelineModule(..., max_grad_norm=...)")
        with self._guard.together():
            norm = self._update.clip(max_norm, norm_type=norm_type, only_finite=error_if_nonfinite)
        if error_if_nonfinite and not math.isfinite(norm):  # on every rank alike: the run continues
            raise RuntimeError(
                f"the gradient norm of order {norm_type:g} over all stages is {norm}, and error_if_nonfinite=True: "
                f"nothing was clipped"
            )
        return norm

    def flush(self) -> list[StepResult]:
        self.drain()
        return [self._result(known) for known in self._update.rest()]

    def drain(self) -> None:
        """Finish a stream's batches in flight, for anything that needs final weights. Collective over the processes."""
        programs = self._update.drain()
        if programs is not None:
            with self._lost_on_error(self._abandon):
                self._engine.run(programs)
                self._gradients_ready()
            self._reports.tell(self._update.waiting())

    def restart(self, step: int) -> None:
        self.num_steps = self.steps_made = step
        for local in self._engine.ranks:
            local.recorder.restart()

    def close(self, timeout: float) -> None:
        if self._guard.closed:
            return
        if not self._guard.ended:
            if not self._update.is_lost:
                self.drain()
            left = (PeerLost, PipelineTimeout) if self.goes_on else ()  # a rank that died after the last call
            with suppress(*left), self._guard.together():
                for local in self._engine.ranks:
                    local.transport.drain(timeout)
                self._collectives.gather(None, what="closing a pipeline")  # no link is used any more
        for local in self._engine.ranks:
            local.transport.close()
        self._collectives.close()
        self._guard.close()

    def _begin(self, given: Given, call: Call) -> tuple[Batch, Programs]:
        """The batch of a call, compared and checked on all ranks, and its programs."""
        self.unchanged.refuse_untrained()
        for local in self._engine.ranks:
            local.recorder.enter()
        batch = self.read(self._reader, given, call)
        self._num_samples = batch.num_samples
        if batch.wants_grad:
            self._refuse_batch_gradients(batch)
        with self._guard.together():
            self.unchanged.check(training=True)
            self._update.refuse_shared_statistics()
            called = self._engine.ranks[0].worker.called
            check_same_batch(batch, self._collectives, device=self._device, called=called)
        for decide in self.on_batch:
            decide(batch)
        programs = self._update.begin(batch)
        for local in self._engine.ranks:
            local.recorder.begin()
        return batch, programs

    def _gradients_ready(self, batch: Batch | None = None) -> None:
        """After the programs: read losses, run the backward of what made the batch, and sum gradients."""
        self._update.losses_known()
        with self._guard.together():
            if batch is not None and batch.wants_grad:
                self._hand_back(batch)
            self._update.gradients_ready()

    def _hand_back(self, batch: Batch) -> None:
        found = [local.worker.batch_gradients for local in self._engine.ranks]
        hand_back(batch, found, self._update.scale, self._collectives)
        for each in found:
            each.clear()

    @contextmanager
    def _lost_on_error(self, lose: Callable[[BaseException], None]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            lose(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        self._engine.drop()
        self._update.abandon(error)

    def _refuse_batch_gradients(self, batch: Batch) -> None:
        what, instead = "a batch that wants gradients", "x.detach(), or what makes the batch as a part of the model"
        self._update.refuse_users_gradients(what, instead=instead)
        if self._update.loss_scale is not None or batch.replica[1] > 1 or self._has_groups:
            raise ValueError(
                f"{what} with grad_scaler=, or where data replicas or a tensor group divide it: expected {instead}"
            )

    def _report(self, known: Known | None, rates: Sequence[float]) -> None:
        self._reports.passed(
            self.num_steps - 1,
            seconds=time.perf_counter() - self._begun,
            learning_rates=tuple(dict.fromkeys(rates)),
            num_samples=self._num_samples,
            replan_seconds=self.replan_seconds,
        )
        self._reports.tell([*self._update.waiting(), *([] if known is None else [known])])

    def snapshots(self) -> dict[int, Callable[[], RankRecord]]:
        return {local.worker.rank: local.recorder.snapshot() for local in self._engine.ranks}

    def _result(self, known: Known | None) -> StepResult:
        snapshots = list(self.snapshots().values())
        schedule = self._update.schedule
        assemble = partial(self._update.timeline, schedule=schedule)
        first, last = schedule.owners[0], schedule.owners[-1]
        waits = self._num_calls == 1 or first == last or not any(one.worker.rank in last for one in self._engine.ranks)

        def timeline() -> Timeline:
            with self._guard.together():
                records = [snapshot() for snapshot in snapshots]
                return gather_records(records, self._collectives, assemble, self._clocks)

        make_result = partial(StepResult, _timeline=timeline, is_compared=waits or self._collectives.alone)
        if known is None:
            tell_of_late_loss(schedule.name, rank=self._engine.ranks[0].worker.rank)
            return make_result(loss=None, loss_step=None)
        return make_result(loss=known.loss, loss_step=known.step, grad_norm=known.grad_norm, skipped=known.skipped)

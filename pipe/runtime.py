"""The runtime behind PipelineModule: builds the stages of this process and runs batches through the engine.

build:  cut -> infer shapes -> wire -> schedule with the model's edges -> check -> lower -> links -> engine
step:   cut the batch -> engine.run -> losses -> tied gradients -> clip -> update
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm import (
    Collectives,
    FailureBoard,
    Guard,
    InProcessTransport,
    Mailbox,
    ProcessGroupTransport,
    Transport,
    World,
    link_lanes,
)
from ..comm.groups import RECEIVES_AHEAD
from ..comm.ping_pong import one_way_seconds
from ..schedules import Action, Costs, Lowered, Op, Schedule, Timeline, check, check_lowered, lower
from ..schedules.ir import ScheduleError
from . import checkpoint
from .agreement import check_agreement, describe
from .batches import (
    check_inputs,
    check_like_example,
    join_tensors,
    read_loss,
    read_loss_summary,
    split_target,
    split_tensor,
    to_device,
)
from .build import Parts, cut_model, with_model_inputs
from .clock import clock_for
from .engine import Engine, LocalRank, refuse_what_cannot_run
from .gradients import Gradients
from .measure import gather_costs, gather_records
from .optimizers import OptimizerFactory, SchedulerFactory, StageOptimizer
from .ownership import Ownership
from .randomness import Seeder
from .recorder import Recorder
from .results import EvalResult, StepResult
from .shapes import Inference, Signature, signature
from .stage import LossValue, Stage, Tensors
from .wiring import Wiring
from .worker import Batch, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What PipelineModule was told, checked; see there."""

    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: OptimizerFactory | None
    lr_scheduler: SchedulerFactory | None
    max_grad_norm: float | None
    split_points: Sequence[str] | None
    recompute: tuple[str, ...]
    seed: int
    device: torch.device
    timeout: float


@dataclass(slots=True, kw_only=True)
class _Mode:
    """The pipeline in one mode: training, or evaluation (forwards alone)."""

    inference: Inference
    wiring: Wiring
    lowered: Lowered


class Runtime:
    """One process's part of the run."""

    def __init__(
        self,
        *,
        model: nn.Module | None,
        stages: Sequence[nn.Module] | None,
        schedule: Schedule,
        world: World,
        settings: Settings,
    ) -> None:
        refuse_what_cannot_run(schedule)
        self._model = model
        self._stage_modules = stages
        self._settings = settings
        self._world = world
        self._seeder = Seeder(settings.seed, settings.device)
        self._num_steps = 0
        self._built = False
        self._latency: float | None = None
        self.schedule = schedule
        check(schedule)
        store = torch.distributed.distributed_c10d._get_default_store() if world.distributed else None
        self._guard = Guard(None if store is None else FailureBoard(store, rank=world.rank, size=world.size))

    # Building

    def build(self, inputs: Sequence[torch.Tensor]) -> None:
        """Cut and wire the model for inputs like these. Collective over the processes."""
        check_inputs(inputs, self.schedule.num_microbatches)
        with self._guard.together():
            self._build([x.to(self._settings.device) for x in inputs])

    def _build(self, inputs: Sequence[torch.Tensor]) -> None:
        settings, schedule, world = self._settings, self.schedule, self._world
        example = [split_tensor(x, schedule.num_microbatches)[0] for x in inputs]
        microbatch = signature(example)
        self._parts = cut_model(
            self._model,
            self._stage_modules,
            example_inputs=example,
            num_stages=schedule.num_stages,
            split_points=settings.split_points,
            seeder=self._seeder,
        )
        with_model_inputs(self._parts, len(inputs))
        self._input_types = [x.dtype for x in inputs]
        self.stage_num_parameters = tuple(
            sum(p.numel() for p in face.module.parameters()) for face in self._parts.train
        )
        self._train = self._make_mode(schedule, microbatch, training=True)
        self._eval = self._make_mode(schedule.forward_only(), microbatch, training=False)
        self._example_specs = self._train.inference.outputs(microbatch)
        self.schedule = self._train.lowered.schedule
        local = range(schedule.num_ranks) if not world.distributed else (world.rank,)
        local_stages = {s for rank in local for s in schedule.placement[rank]}
        owner_of = [ranks[0] for ranks in schedule.owners]
        self._ownership = Ownership(self._parts, owner_of=owner_of, local_stages=local_stages)
        for face in [*self._parts.train, *self._parts.evaluate]:
            for index in local_stages:
                if face in (self._parts.train[index], self._parts.evaluate[index]):
                    face.module.to(settings.device)
        self._collectives = Collectives(world, device=settings.device, timeout=settings.timeout)
        self._guard.on_failure(self._collectives.abort)
        mine = describe(
            schedule,
            self._parts.names,
            microbatch,
            seed=settings.seed,
            max_grad_norm=settings.max_grad_norm,
            loss_fn="none" if settings.loss_fn is None else "given",
        )
        check_agreement(mine, self._collectives, rank=world.rank)
        self._make_engine(local)
        self._gradients = Gradients(self._ownership, self._collectives, rank=world.rank, device=settings.device)
        self._optimizers: dict[int, StageOptimizer] = {}
        if settings.optimizer is not None:
            for s in sorted(local_stages):
                self._optimizers[s] = StageOptimizer(
                    s, self._ownership.stage_parameters(s), settings.optimizer, settings.lr_scheduler
                )
        self._built = True

    def _make_mode(self, schedule: Schedule, microbatch: Signature, *, training: bool) -> _Mode:
        parts = self._parts
        faces, sizes = (parts.train, parts.train_sizes) if training else (parts.evaluate, parts.evaluate_sizes)
        inference = Inference(faces, self._seeder, sizes=sizes, device=self._settings.device, training=training)
        wiring = Wiring(faces, inference.outputs(microbatch))
        wired = schedule.with_edges(wiring.edges())
        check(wired)
        share_loss = self._world.distributed and self._settings.loss_fn is not None
        lowered = lower(wired, share_loss=share_loss, receives_ahead=RECEIVES_AHEAD)
        check_lowered(lowered)
        return _Mode(inference=inference, wiring=wiring, lowered=lowered)

    def _make_engine(self, local: Sequence[int]) -> None:
        settings, schedule, world = self._settings, self.schedule, self._world
        if world.distributed:
            links = sorted(
                {
                    (program.rank, step.peer) if step.is_send else (step.peer, program.rank)
                    for mode in (self._train, self._eval)
                    for program in mode.lowered.programs
                    for step in program.steps
                    if not isinstance(step, Action)
                }
            )
            self._links = set(links)
            lanes = link_lanes(links, world, device=settings.device, timeout=settings.timeout)
            transports: list[Transport] = [
                ProcessGroupTransport(world.rank, lanes, device=settings.device, timeout=settings.timeout)
            ]
        else:
            mailbox = Mailbox()
            transports = [InProcessTransport(rank, mailbox) for rank in local]
        for transport in transports:
            self._guard.on_failure(transport.abort)
        clock = clock_for(settings.device)
        ranks = []
        for rank, transport in zip(local, transports, strict=True):
            stages = {s: self._make_stage(s) for s in schedule.placement[rank]}
            worker = Worker(rank, stages, num_stages=schedule.num_stages, seeder=self._seeder)
            ranks.append(LocalRank(worker=worker, transport=transport, recorder=Recorder(clock)))
        self._engine = Engine(ranks, timeout=settings.timeout)

    def _make_stage(self, index: int) -> Stage:
        is_last = index == self.schedule.num_stages - 1
        return Stage(
            index=index,
            name=self._parts.names[index],
            train=self._parts.train[index],
            evaluate=self._parts.evaluate[index],
            loss_of=self._loss_of if is_last and self._settings.loss_fn is not None else None,
            recompute=self._settings.recompute[index],
        )

    def _loss_of(self, flat: Tensors, target: object, training: bool) -> LossValue:
        assert self._settings.loss_fn is not None
        return read_loss(self._settings.loss_fn(self._parts.output(flat, training=training), target))

    # Running

    def train_step(self, arguments: Sequence[Any]) -> StepResult:
        """See PipelineModule.train_step."""
        if self._settings.optimizer is None:
            raise ValueError(
                "train_step needs an optimizer: expected PipelineModule(..., optimizer=lambda params: "
                "torch.optim.AdamW(params)), or call forward_backward and step an optimizer of your own"
            )
        loss, step = self._run_training(arguments)
        with self._guard.together():
            grad_norm = self._update()
        return self._result(loss, step, grad_norm)

    def _update(self) -> float | None:
        """Clip, and step the optimizers; the norm before."""
        grad_norm = None
        if self._settings.max_grad_norm is not None:
            recorder = self._engine.ranks[0].recorder
            start = recorder.clock.stamp()
            grad_norm = self._gradients.clip(self._settings.max_grad_norm)
            recorder.norm(start, recorder.clock.stamp())
        for local in self._engine.ranks:
            for s in sorted(local.worker.stages):
                start = local.recorder.clock.stamp()
                self._optimizers[s].step()
                local.recorder.action(Action(s, Op.U, 0), start, local.recorder.clock.stamp())
        return grad_norm

    def forward_backward(self, arguments: Sequence[Any]) -> StepResult:
        """See PipelineModule.forward_backward."""
        loss, step = self._run_training(arguments)
        return self._result(loss, step, None)

    def clip_grad_norm(self, max_norm: float) -> float:
        """See PipelineModule.clip_grad_norm_."""
        self._require_built("clip_grad_norm_")
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r}: expected a number above 0")
        with self._guard.together():
            return self._gradients.clip(max_norm)

    def _run_training(self, arguments: Sequence[Any]) -> tuple[float, int]:
        if self._settings.loss_fn is None:
            raise ValueError(
                "training needs a loss: expected PipelineModule(..., loss_fn=lambda output, target: ...), "
                "which returns a scalar mean or (sum, count)"
            )
        if not self.schedule.has_backward:
            raise ScheduleError(
                f"schedule {self.schedule.name!r} has no backward: expected F and B of each stage and microbatch to "
                f"train, or eval_step"
            )
        batch = self._cut(arguments, training=True)
        self._gradients.begin()
        try:
            self._run(self._train, batch, training=True)
            total, counts = self._loss(batch)
        except BaseException:
            self._gradients.abandon()
            raise
        scale = 1.0 if counts is None else batch.num_samples / counts
        with self._guard.together():
            self._gradients.finish(scale=scale)
        self._num_steps += 1
        return total, batch.step

    def eval_step(self, arguments: Sequence[Any]) -> EvalResult:
        """See PipelineModule.eval_step."""
        batch = self._cut(arguments, training=False)
        modules = [s.evaluate.module for local in self._engine.ranks for s in local.worker.stages.values()]
        flags = [(part, part.training) for module in modules for part in module.modules()]
        for part, _ in flags:
            part.training = False
        try:
            self._run(self._eval, batch, training=False)
        finally:
            for part, training in flags:
                part.training = training
        loss = None
        if self._settings.loss_fn is not None:
            loss, _ = self._loss(batch)
        output = None
        last = next((r.worker for r in self._engine.ranks if r.worker.outputs), None)
        if last is not None:
            columns = zip(*(last.outputs[k] for k in range(batch.num_microbatches)), strict=True)
            output = self._parts.output([join_tensors(column) for column in columns], training=False)
        return EvalResult(loss=loss, output=output)

    def _run(self, mode: _Mode, batch: Batch, *, training: bool) -> None:
        with self._guard.together():
            self._engine.run(mode.lowered, mode.wiring, batch, training=training)

    def _cut(self, arguments: Sequence[Any], *, training: bool) -> Batch:
        """The batch as microbatches; the stages are built by the first one if they are not yet."""
        has_target = self._settings.loss_fn is not None
        inputs, target = (arguments[:-1], arguments[-1:]) if has_target else (arguments, ())
        num_microbatches = self.schedule.num_microbatches
        num_samples = check_inputs(inputs, num_microbatches)
        if not self._built:
            self.build(inputs)
        check_like_example(inputs, self._input_types, has_target=has_target)
        device = self._settings.device
        columns = [split_tensor(x.to(device), num_microbatches) for x in inputs]
        whole_target = to_device(target[0], device) if has_target else None
        targets = split_target(whole_target, num_microbatches, num_samples)
        inference = (self._train if training else self._eval).inference
        specs = [inference.outputs(signature([column[k] for column in columns])) for k in range(num_microbatches)]
        weights = [len(columns[0][k]) / num_samples for k in range(num_microbatches)]
        return Batch(inputs=columns, targets=targets, specs=specs, weights=weights, step=self._num_steps)

    def _loss(self, batch: Batch) -> tuple[float, float | None]:
        """(loss, sum of counts or None) of the batch; over processes it came as a message."""
        summaries = (local.worker.loss_summary() for local in self._engine.ranks)
        return read_loss_summary(next(s for s in summaries if s is not None), step=batch.step)

    def _result(self, loss: float, step: int, grad_norm: float | None) -> StepResult:
        snapshots = [local.recorder.snapshot() for local in self._engine.ranks]

        def timeline() -> Timeline:
            with self._guard.together():
                return gather_records(self.schedule, [snapshot() for snapshot in snapshots], self._collectives)

        return StepResult(loss=loss, loss_step=step, grad_norm=grad_norm, _timeline=timeline)

    # What is known

    @property
    def parts(self) -> Parts:
        """The cut model."""
        self._require_built("stage_names")
        return self._parts

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """See PipelineModule.full_state_dict."""
        ownership = self.ownership
        with self._guard.together():
            return ownership.full_state_dict(self._collectives)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """See PipelineModule.save."""
        ownership = self.ownership
        with self._guard.together():
            checkpoint.save(
                folder,
                step=self._num_steps,
                ownership=ownership,
                optimizers=self._optimizers,
                local_stages=[s for local in self._engine.ranks for s in sorted(local.worker.stages)],
                num_stages=self.schedule.num_stages,
                collectives=self._collectives,
            )

    def load(self, folder: str | os.PathLike[str]) -> None:
        """See PipelineModule.load."""
        self._num_steps = checkpoint.load(
            folder, ownership=self.ownership, optimizers=self._optimizers, device=self._settings.device
        )

    @property
    def ownership(self) -> Ownership:
        """Names and tensors."""
        self._require_built("parameters and state")
        return self._ownership

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of the local stages, in order."""
        self._require_built("optimizers")
        return [o.optimizer for o in self._optimizers.values() if o.optimizer is not None]

    def measured_costs(self) -> Costs:
        """See PipelineModule.measured_costs."""
        self._require_built("measured_costs")
        recorders = [local.recorder for local in self._engine.ranks]
        with self._guard.together():
            costs = gather_costs(self.schedule, recorders, self._collectives, latency=self._link_latency())
        if costs is None:
            raise ValueError("nothing was measured yet: expected at least one train_step before measured_costs()")
        return costs

    def _link_latency(self) -> float:
        """Of an activation from stage 0 to its consumer on the next rank, measured once between ranks 0 and 1 [s]."""
        if self._latency is None:
            transport = self._engine.ranks[0].transport
            links = {(0, 1), (1, 0)}
            specs = self._example_specs[0]
            if isinstance(transport, ProcessGroupTransport) and links <= self._links and specs:
                self._latency = one_way_seconds(
                    transport,
                    rank=self._world.rank,
                    specs=specs,
                    device=self._settings.device,
                    timeout=self._settings.timeout,
                )
            else:
                self._latency = 0.0
        return self._latency

    def forget_measurements(self) -> None:
        """See PipelineModule.forget_measurements."""
        if self._built:
            for local in self._engine.ranks:
                local.recorder.forget()

    def close(self) -> None:
        """See PipelineModule.close."""
        if self._built and not self._guard.ended:
            with self._guard.together():
                for local in self._engine.ranks:
                    local.transport.drain(self._settings.timeout)

    def _require_built(self, what: str) -> None:
        if not self._built:
            raise ValueError(
                f"{what}: the stages are not built yet. Expected PipelineModule(..., example_inputs=(batch,)), "
                f"or a first train_step"
            )

"""The runtime behind PipelineModule: runs batches through the engine that `assembly` has put together.

step:   cut the batch -> engine.run -> losses -> tied gradients -> clip -> update      (flush schedules)
        cut the batch -> streaming.step, whose program holds all the rest              (asynchronous ones)
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..comm import (
    FailureBoard,
    Guard,
    ProcessGroupTransport,
    World,
)
from ..comm.ping_pong import one_way_seconds
from ..partition.plans.plan import Plan
from ..schedules import Action, Costs, Op, Schedule, Timeline, check
from ..schedules.ir import ScheduleError
from . import checkpoint
from .assembly import Assembly, Mode, Pipeline, Settings
from .batch.batches import (
    Batch,
    GroupLoss,
    check_inputs,
    check_like_example,
    combine_summaries,
    join_tensors,
    read_loss_summary,
    split_target,
    split_tensor,
    to_device,
    weigh,
)
from .batch.results import EvalResult, StepResult
from .layout import Layout
from .measure.gather import gather_costs, gather_records
from .measure.recorder import RankRecord, assemble_stream, assemble_timeline
from .run.engine import LocalRank, refuse_what_cannot_run
from .stages.build import CutModel
from .stages.ownership import Ownership
from .stages.shapes import signature
from .stages.weights import WeightVersions
from .update.gradients import Gradients
from .update.streaming import Streaming


class Runtime:
    """One process's part of the run."""

    def __init__(
        self,
        *,
        model: nn.Module | None,
        stages: Sequence[nn.Module] | None,
        layout: Layout,
        world: World,
        settings: Settings,
    ) -> None:
        schedule = layout.schedule
        refuse_what_cannot_run(schedule)
        self._settings = settings
        self._world = world
        self._layout = layout
        self._assembled: Pipeline | None = None
        self._num_steps = 0
        self._latency: float | None = None
        check(schedule)
        if schedule.is_asynchronous and settings.optimizer is None:
            raise ValueError(
                f"schedule {schedule.name!r} updates its weights while other batches run: expected "
                f"optimizer=lambda params: torch.optim.AdamW(params), or a flush schedule such as '1f1b'"
            )
        store = torch.distributed.distributed_c10d._get_default_store() if world.distributed else None
        self._guard = Guard(None if store is None else FailureBoard(store, rank=world.rank, size=world.size))
        self._assembly = Assembly(
            model=model, stages=stages, layout=layout, world=world, settings=settings, guard=self._guard
        )

    def build(self, inputs: Sequence[torch.Tensor]) -> None:
        """Cut and wire the model for inputs like these. Collective over the processes."""
        check_inputs(inputs, len(self._own_microbatches()))
        with self._guard.together():
            self._assembled = self._assembly.build([x.to(self._settings.device) for x in inputs])
        if self._world.distributed and self._assembled.parts.is_traced:
            gc.collect()  # traced graphs, in reference cycles, hold the weights of other ranks' stages

    def ready(self, arguments: Sequence[Any]) -> None:
        """Build the stages for such arguments, unless they are built."""
        if self._assembled is None:
            self.build(self._inputs(arguments))

    def _inputs(self, arguments: Sequence[Any]) -> Sequence[Any]:
        return arguments[:-1] if self._settings.loss_fn is not None else arguments

    @property
    def schedule(self) -> Schedule:
        """As it was given; as it runs, once the stages are built."""
        return self._layout.schedule if self._assembled is None else self._assembled.schedule

    @property
    def plan(self) -> Plan | None:
        """See PipelineModule.plan."""
        return self._layout.plan

    @property
    def stage_num_parameters(self) -> tuple[int, ...]:
        """See PipelineModule.stage_num_parameters."""
        return self._built("stage_num_parameters").stage_num_parameters

    @property
    def _pipeline(self) -> Pipeline:
        return self._built("this")

    @property
    def local_ranks(self) -> Sequence[LocalRank]:
        """What the ranks of this process are made of."""
        return self._pipeline.engine.ranks

    @property
    def _streaming(self) -> Streaming | None:
        return None if self._assembled is None else self._assembled.streaming

    # Running

    def train_step(self, arguments: Sequence[Any]) -> StepResult:
        """See PipelineModule.train_step."""
        if self._settings.optimizer is None:
            raise ValueError(
                "train_step needs an optimizer: expected PipelineModule(..., optimizer=lambda params: "
                "torch.optim.AdamW(params)), or call forward_backward and step an optimizer of your own"
            )
        if self.schedule.is_asynchronous:
            return self._stream_step(arguments)
        loss, step = self._run_training(arguments)
        with self._guard.together():
            grad_norm = self._update()
        return self._result(step, loss, grad_norm)

    def _stream_step(self, arguments: Sequence[Any]) -> StepResult:
        self._require_loss()
        batch = self._cut(arguments, training=True)
        streaming = self._streaming
        assert streaming is not None
        streaming.prepare()
        with self._guard.together():
            newest = streaming.step(batch)
        self._num_steps += 1
        return self._result(*(newest or (None, None, None)))

    def flush(self) -> list[StepResult]:
        """See PipelineModule.flush."""
        if self._streaming is None:
            return []
        self._drain()
        return [self._result(*known) for known in self._streaming.rest()]

    def _drain(self) -> None:
        """End what is under way, before anything that wants the weights at rest."""
        if self._streaming is not None and self._streaming.in_flight:
            with self._guard.together():
                self._streaming.drain()

    def _update(self) -> float | None:
        """Clip, and step the optimizers; the norm before."""
        grad_norm = None
        if self._settings.max_grad_norm is not None:
            recorder = self.local_ranks[0].recorder
            start = recorder.clock.stamp()
            grad_norm = self._flush_gradients.clip(self._settings.max_grad_norm)
            recorder.norm(start, recorder.clock.stamp())
        left = dict(self._pipeline.optimizers)
        for local in self.local_ranks:
            for s in sorted(left.keys() & local.worker.stages.keys()):  # replicas in one process have one optimizer
                start = local.recorder.clock.stamp()
                left.pop(s).step()
                local.recorder.action(Action(s, Op.U, 0), start, local.recorder.clock.stamp())
        return grad_norm

    def forward_backward(self, arguments: Sequence[Any]) -> StepResult:
        """See PipelineModule.forward_backward."""
        self._refuse_in_stream("forward_backward", "train_step, which updates too")
        loss, step = self._run_training(arguments)
        return self._result(step, loss, None)

    def clip_grad_norm(self, max_norm: float) -> float:
        """See PipelineModule.clip_grad_norm_."""
        self._refuse_in_stream("clip_grad_norm_", "PipelineModule(..., max_grad_norm=...)")
        self._built("clip_grad_norm_")
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r}: expected a number above 0")
        with self._guard.together():
            return self._flush_gradients.clip(max_norm)

    def _refuse_in_stream(self, what: str, instead: str) -> None:
        if self.schedule.is_asynchronous:
            raise ValueError(
                f"{what} under the asynchronous schedule {self.schedule.name!r}: each stage updates inside the "
                f"pipeline, behind its last backward. Expected {instead}, or a flush schedule such as schedule='1f1b'"
            )

    def _require_loss(self) -> None:
        if self._settings.loss_fn is None:
            raise ValueError(
                "training needs a loss: expected PipelineModule(..., loss_fn=lambda output, target: ...), "
                "which returns a scalar mean or (sum, count)"
            )

    def _run_training(self, arguments: Sequence[Any]) -> tuple[float, int]:
        self._require_loss()
        if not self.schedule.has_backward:
            raise ScheduleError(
                f"schedule {self.schedule.name!r} has no backward: expected F and B of each stage and microbatch to "
                f"train, or eval_step"
            )
        batch = self._cut(arguments, training=True)
        self._flush_gradients.begin()
        try:
            self._run(self._pipeline.train, batch, training=True)
            loss = self._loss(batch)
        except BaseException:
            self._flush_gradients.abandon()
            raise
        with self._guard.together():
            self._flush_gradients.finish(scale=loss.scale(batch.num_samples))
        self._num_steps += 1
        return loss.mean, batch.step

    def eval_step(self, arguments: Sequence[Any]) -> EvalResult:
        """See PipelineModule.eval_step."""
        batch = self._cut(arguments, training=False)
        self._drain()
        modules = [s.evaluate.module for local in self.local_ranks for s in local.worker.stages.values()]
        flags = [(part, part.training) for module in modules for part in module.modules()]
        for part, _ in flags:
            part.training = False
        try:
            self._run(self._pipeline.evaluate, batch, training=False)
        finally:
            for part, training in flags:
                part.training = training
        loss = None
        if self._settings.loss_fn is not None:
            loss = self._loss(batch).mean
        output = None
        outputs = {k: v for local in self.local_ranks for k, v in local.worker.outputs.items()}
        if outputs:
            columns = zip(*(outputs[k] for k in sorted(outputs)), strict=True)
            output = self._pipeline.parts.output([join_tensors(column) for column in columns], training=False)
        return EvalResult(loss=loss, output=output)

    def _run(self, mode: Mode, batch: Batch, *, training: bool) -> None:
        for local in self.local_ranks:
            local.worker.begin(mode.wiring, training=training)
            local.worker.enter(0, batch)
            local.recorder.begin()
        with self._guard.together():
            self._pipeline.engine.run(dict(enumerate(mode.programs)))

    def _cut(self, arguments: Sequence[Any], *, training: bool) -> Batch:
        """The batch as microbatches; the stages are built by the first one if they are not yet.

        A batch that is refused is refused on every rank alike, unless each replica has its own: then the others, which
        would go on without this one, are told.
        """
        if self._layout.place.replica[1] > 1 and self._assembled is not None:
            with self._guard.together():
                return self._microbatches(arguments, training=training)
        return self._microbatches(arguments, training=training)

    def _microbatches(self, arguments: Sequence[Any], *, training: bool) -> Batch:
        has_target = self._settings.loss_fn is not None
        inputs, target = self._inputs(arguments), arguments[-1:]
        num_microbatches = self.schedule.num_microbatches
        own = self._own_microbatches()
        num_samples = check_inputs(inputs, len(own))
        self.ready(arguments)
        check_like_example(inputs, self._pipeline.input_types, has_target=has_target)
        device = self._settings.device
        columns = [split_tensor(x.to(device), len(own)) for x in inputs]
        whole_target = to_device(target[0], device) if has_target else None
        targets = split_target(whole_target, len(own), num_samples)
        inference = (self._pipeline.train if training else self._pipeline.evaluate).inference
        specs = [inference.outputs(signature(microbatch)) for microbatch in zip(*columns, strict=True)]
        # Those of other replicas are taken to be as large as one's own.
        like = [k // own.step for k in range(num_microbatches)]
        sizes = [len(columns[0][j]) for j in like]
        group_size = self.schedule.group_size if training else num_microbatches
        return Batch(
            inputs=[[column[j] if k in own else None for k, j in enumerate(like)] for column in columns],
            targets=[targets[j] if k in own else None for k, j in enumerate(like)],
            specs=[specs[j] for j in like],
            sizes=sizes,
            group_size=group_size,
            weights=weigh(sizes, group_size),
            step=self._num_steps,
        )

    def _own_microbatches(self) -> range:
        """Those that the batch of a call holds: all, or those of this process's data replica."""
        replica, count = self._layout.place.replica
        return range(replica, self.schedule.num_microbatches, count)

    def _loss(self, batch: Batch) -> GroupLoss:
        """Of the batch; over processes it came as a message."""
        parts = {rank: part for local in self.local_ranks for rank, part in local.worker.loss_parts.items()}
        return read_loss_summary(combine_summaries([parts[rank] for rank in sorted(parts)]), step=batch.step)

    def _result(self, step: int | None, loss: float | None, grad_norm: float | None) -> StepResult:
        snapshots = [local.recorder.snapshot() for local in self.local_ranks]

        def assemble(records: Sequence[RankRecord]) -> Timeline:
            if self._streaming is not None:
                return assemble_stream(self._streaming.stream, records)
            return assemble_timeline(self.schedule, records)

        def timeline() -> Timeline:
            with self._guard.together():
                return gather_records([snapshot() for snapshot in snapshots], self._pipeline.collectives, assemble)

        return StepResult(loss=loss, loss_step=step, grad_norm=grad_norm, _timeline=timeline)

    # What is known

    @property
    def parts(self) -> CutModel:
        """The cut model."""
        self._built("stage_names")
        return self._pipeline.parts

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """See PipelineModule.full_state_dict."""
        ownership = self.ownership
        self._drain()
        with self._guard.together():
            return ownership.full_state_dict(self._pipeline.collectives)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """See PipelineModule.save."""
        ownership = self.ownership
        self._drain()
        with self._guard.together():
            checkpoint.save(
                folder,
                step=self._num_steps,
                ownership=ownership,
                optimizers=self._pipeline.optimizers,
                weights=self._first_weights(),
                local_stages=[s for s in range(self.schedule.num_stages) if self._is_first_owner(s)],
                num_stages=self.schedule.num_stages,
                collectives=self._pipeline.collectives,
            )

    def load(self, folder: str | os.PathLike[str]) -> None:
        """See PipelineModule.load."""
        ownership = self.ownership
        updates = [] if self._streaming is None else self._streaming.updates
        if self._streaming is not None and not self._streaming.is_lost:
            self._drain()
        self._num_steps = checkpoint.load(
            folder,
            ownership=ownership,
            optimizers=[o for u in updates for o in u.optimizers.values()] or list(self._pipeline.optimizers.values()),
            weights=[w for u in updates for w in u.weights.values()],
            updates_per_step=self.schedule.groups_per_batch,
            device=self._settings.device,
        )
        if self._streaming is not None:
            self._streaming.restart()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """See PipelineModule.load_state_dict."""
        if self._streaming is not None:
            self._streaming.refuse_changes("load_state_dict")
        self.ownership.load_state_dict(state)
        if self._streaming is not None:
            self._streaming.take_state(state)

    def _is_first_owner(self, stage: int) -> bool:
        first = self.schedule.owners[stage][0]
        return any(local.worker.rank == first for local in self.local_ranks)

    def _first_weights(self) -> dict[int, WeightVersions]:
        updates = [] if self._streaming is None else self._streaming.updates
        first: dict[int, WeightVersions] = {}
        for one in updates:
            for stage, weights in one.weights.items():
                first.setdefault(stage, weights)
        return first

    @property
    def ownership(self) -> Ownership:
        """Names and tensors."""
        self._built("parameters and state")
        return self._pipeline.ownership

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of the local stages, in order."""
        self._built("optimizers")
        return [o.optimizer for o in self._pipeline.optimizers.values() if o.optimizer is not None]

    def held_bytes(self) -> int:
        """See PipelineModule.held_bytes."""
        ownership = self.ownership
        tensors = list(ownership.state_dict().values())
        tensors += [p.grad for _, p in ownership.named_parameters() if p.grad is not None]
        updates = [] if self._streaming is None else self._streaming.updates
        tensors += [leaf for one in updates for weights in one.weights.values() for leaf in weights.tensors()]
        steppers = [o for one in updates for o in one.optimizers.values()] or list(self._pipeline.optimizers.values())
        for stepper in steppers:
            states = stepper.optimizer.state.values() if stepper.optimizer is not None else ()
            tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def measured_costs(self) -> Costs:
        """See PipelineModule.measured_costs."""
        self._built("measured_costs")
        if self._latency is None:
            self._drain()  # the link must be quiet
        recorders = [local.recorder for local in self.local_ranks]
        with self._guard.together():
            costs = gather_costs(self.schedule, recorders, self._pipeline.collectives, latency=self._link_latency())
        if costs is None:
            raise ValueError("nothing was measured yet: expected at least one train_step before measured_costs()")
        return costs

    def _link_latency(self) -> float:
        """Of an activation from stage 0 to its consumer on the next rank, measured once between ranks 0 and 1 [s]."""
        if self._latency is None:
            transport = self.local_ranks[0].transport
            links = {(0, 1), (1, 0)}
            specs = self._pipeline.example_specs[0]
            if isinstance(transport, ProcessGroupTransport) and links <= self._pipeline.links and specs:
                self._latency = one_way_seconds(
                    transport,
                    rank=self.local_ranks[0].worker.rank,
                    specs=specs,
                    device=self._settings.device,
                    timeout=self._settings.timeout,
                )
            else:
                self._latency = 0.0
        return self._latency

    def forget_measurements(self) -> None:
        """See PipelineModule.forget_measurements."""
        if self._assembled is not None:
            for local in self.local_ranks:
                local.recorder.forget()

    def close(self) -> None:
        """See PipelineModule.close."""
        if self._assembled is not None and not self._guard.ended:
            if self._streaming is not None and not self._streaming.is_lost:
                self._drain()
            with self._guard.together():
                for local in self.local_ranks:
                    local.transport.drain(self._settings.timeout)

    @property
    def _flush_gradients(self) -> Gradients:
        gradients = self._pipeline.gradients
        assert gradients is not None, "an asynchronous schedule has its gradients by update group"
        return gradients

    def _built(self, what: str) -> Pipeline:
        if self._assembled is None:
            raise ValueError(
                f"{what}: the stages are not built yet. Expected PipelineModule(..., example_inputs=(batch,)), "
                f"or a first train_step"
            )
        return self._assembled

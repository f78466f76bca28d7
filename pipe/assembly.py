"""Putting a pipeline together: from a model, a schedule and a world to stages, engine and optimizers.

cut -> infer shapes -> wire -> schedule with the model's edges -> check -> who holds what -> lower -> links -> engine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm import (
    Collectives,
    Guard,
    InProcessTransport,
    Mailbox,
    ProcessGroupTransport,
    Transport,
    World,
    link_lanes,
)
from ..comm.process_group import Link
from ..partition.graph.units import Tensors
from ..partition.profiler.clock import clock_for
from ..schedules import Schedule, check, check_lowered, lower
from ..schedules.lowering.stream import make_stream
from ..schedules.messages import Sharing, Transfer
from ..schedules.program import RankProgram
from .batch.agreement import check_agreement, describe
from .batch.batches import read_loss, split_tensor
from .layout import Layout
from .measure.recorder import Recorder
from .run.engine import Engine, LocalRank
from .run.worker import Worker
from .stages.build import CutModel, cut_model
from .stages.ownership import Ownership
from .stages.randomness import Seeder
from .stages.shapes import InferredStages, Signature, signature
from .stages.stage import LossValue, Stage
from .stages.wiring import OutputSpecs, Wiring
from .update.gradients import Gradients
from .update.optimizers import OptimizerFactory, SchedulerFactory, StageOptimizer
from .update.stream_parts import make_updates, sharing_of, with_late_updates
from .update.streaming import Streaming

STREAM_WINDOW = 4  # batches in a measured timeline of an asynchronous schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What PipelineModule was told, checked; see there."""

    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: OptimizerFactory | None
    lr_scheduler: SchedulerFactory | None
    max_grad_norm: float | None
    seed: int
    device: torch.device
    timeout: float


@dataclass(slots=True, kw_only=True)
class Mode:
    """The pipeline in one mode: training, or evaluation (forwards alone).

    programs: one batch, by rank; none of a stream, which makes its own.
    """

    inference: InferredStages
    wiring: Wiring
    schedule: Schedule
    programs: tuple[RankProgram, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """All parts of one process's pipeline.

    Arguments:
        schedule: with the model's own stage graph, as it runs.
        input_types: of the model's inputs.
        stage_num_parameters: [S].
        example_specs: outputs of the stages for the microbatch that it was built with.
        links: directed, of all ranks.
        optimizers: by local stage.
        gradients: of a flush schedule; streaming: of an asynchronous one.
    """

    schedule: Schedule
    parts: CutModel
    train: Mode
    evaluate: Mode
    ownership: Ownership
    collectives: Collectives
    engine: Engine
    input_types: tuple[torch.dtype, ...]
    stage_num_parameters: tuple[int, ...]
    example_specs: OutputSpecs
    links: frozenset[Link]
    optimizers: dict[int, StageOptimizer]
    gradients: Gradients | None
    streaming: Streaming | None


class Assembly:
    """Builds a Pipeline; one for each PipelineModule.

    Arguments:
        model, stages: one of them.
        guard: told how to let go of other ranks.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None,
        stages: Sequence[nn.Module] | None,
        layout: Layout,
        world: World,
        settings: Settings,
        guard: Guard,
    ) -> None:
        self._model = model
        self._stage_modules = stages
        self._layout = layout
        self._schedule = layout.schedule
        self._world = world
        self._settings = settings
        self._guard = guard
        self._seeder = Seeder(settings.seed, settings.device)
        self._local = layout.place.local_ranks

    def build(self, inputs: Sequence[torch.Tensor]) -> Pipeline:
        """For inputs like these. Collective over the processes."""
        settings, world, schedule = self._settings, self._world, self._schedule
        example = [split_tensor(x, schedule.num_microbatches // self._layout.place.replica[1])[0] for x in inputs]
        microbatch = signature(example)
        self._parts = parts = cut_model(
            self._model,
            self._stage_modules,
            example_inputs=example,
            num_stages=schedule.num_stages,
            split_points=self._layout.split_points,
            plan=self._layout.plan,
            seeder=self._seeder,
            device=settings.device,
        )
        stage_num_parameters = tuple(sum(p.numel() for p in s.module.parameters()) for s in parts.train.stages)
        train = self._make_mode(schedule, microbatch, training=True)
        evaluate = self._make_mode(schedule.forward_only(), microbatch, training=False)
        local_stages = sorted({s for rank in self._local for s in schedule.placement[rank]})
        ownership = Ownership(parts, owners=schedule.owners, local_stages=local_stages)
        for index in local_stages:
            parts.train.stages[index].module.to(settings.device)
            parts.evaluate.stages[index].module.to(settings.device)
        collectives = Collectives(self._layout.place, device=settings.device, timeout=settings.timeout)
        self._guard.on_failure(collectives.abort)
        mine = describe(
            schedule,
            parts.names,
            microbatch,
            seed=settings.seed,
            max_grad_norm=settings.max_grad_norm,
            loss_fn="none" if settings.loss_fn is None else "given",
        )
        check_agreement(mine, collectives, rank=world.rank)
        wired = train.schedule
        stream = None
        programs = (*train.programs, *evaluate.programs)
        if wired.is_asynchronous:
            sharing = sharing_of(wired, ownership, max_grad_norm=settings.max_grad_norm)
            wired = with_late_updates(wired, sharing)
            stream = make_stream(wired, sharing=sharing)
            programs = (*stream.calls, *stream.drains, *evaluate.programs)
        ownership.spread_from_first_owners(collectives)
        links = _links_of(programs) if world.distributed else frozenset()
        engine = self._make_engine(wired, links)
        gradients = streaming = None
        if stream is None:
            optimizers = self._make_optimizers(ownership, local_stages)
            gradients = Gradients(ownership, collectives, ranks=self._local, device=settings.device)
        else:
            optimizers = self._make_versions(wired, engine, ownership)
            streaming = Streaming(engine, stream, train.wiring)
        return Pipeline(
            schedule=wired,
            parts=parts,
            train=train,
            evaluate=evaluate,
            ownership=ownership,
            collectives=collectives,
            engine=engine,
            input_types=tuple(x.dtype for x in inputs),
            stage_num_parameters=stage_num_parameters,
            example_specs=train.inference.outputs(microbatch),
            links=links,
            optimizers=optimizers,
            gradients=gradients,
            streaming=streaming,
        )

    def _make_mode(self, schedule: Schedule, microbatch: Signature, *, training: bool) -> Mode:
        inference = self._parts.train if training else self._parts.evaluate
        wiring = Wiring(inference.stages, inference.outputs(microbatch))
        wired = schedule.with_edges(wiring.edges())
        check(wired)
        if wired.is_asynchronous:
            return Mode(inference=inference, wiring=wiring, schedule=wired, programs=())
        share_loss = self._world.distributed and self._settings.loss_fn is not None
        lowered = lower(wired, sharing=Sharing(loss=share_loss))
        check_lowered(lowered)
        return Mode(inference=inference, wiring=wiring, schedule=wired, programs=lowered.programs)

    def _make_optimizers(self, ownership: Ownership, local_stages: Sequence[int]) -> dict[int, StageOptimizer]:
        settings = self._settings
        if settings.optimizer is None:
            return {}
        return {
            s: StageOptimizer(s, ownership.stage_parameters(s), settings.optimizer, settings.lr_scheduler)
            for s in local_stages
        }

    def _make_versions(self, schedule: Schedule, engine: Engine, ownership: Ownership) -> dict[int, StageOptimizer]:
        """Weight versions and optimizers of the local ranks of a stream; returns the first owner's by stage."""
        settings = self._settings
        assert settings.optimizer is not None
        versions = [schedule.rule.versions_kept(n) for n in check(schedule).peak_versions]
        taken: set[str] = set()
        optimizers: dict[int, StageOptimizer] = {}
        for one in engine.ranks:
            updates = make_updates(
                one.worker.rank,
                schedule=schedule,
                parts=self._parts,
                ownership=ownership,
                taken=taken,
                num_versions=versions[one.worker.rank],
                optimizer=settings.optimizer,
                scheduler=settings.lr_scheduler,
                max_grad_norm=settings.max_grad_norm,
                batches=one.worker.batches,
                device=settings.device,
            )
            one.worker.updates = updates
            for s, stage in one.worker.stages.items():
                stage.weights = updates.weights[s]
                optimizers.setdefault(s, updates.optimizers[s])
        return optimizers

    def _make_engine(self, schedule: Schedule, links: frozenset[Link]) -> Engine:
        settings, world = self._settings, self._world
        if world.distributed:
            lanes = link_lanes(sorted(links), self._layout.place, device=settings.device, timeout=settings.timeout)
            transports: list[Transport] = [
                ProcessGroupTransport(self._local[0], lanes, device=settings.device, timeout=settings.timeout)
            ]
        else:
            mailbox = Mailbox()
            transports = [InProcessTransport(rank, mailbox) for rank in self._local]
        for transport in transports:
            self._guard.on_failure(transport.abort)
        clock = clock_for(settings.device)
        ranks = []
        for rank, transport in zip(self._local, transports, strict=True):
            stages = {s: self._make_stage(s) for s in schedule.placement[rank]}
            worker = Worker(rank, stages, schedule=schedule, seeder=self._seeder)
            recorder = Recorder(clock, window=STREAM_WINDOW if schedule.is_asynchronous else 1)
            ranks.append(LocalRank(worker=worker, transport=transport, recorder=recorder))
        return Engine(ranks, timeout=settings.timeout)

    def _make_stage(self, index: int) -> Stage:
        is_last, loss_fn = index == self._schedule.num_stages - 1, self._settings.loss_fn
        return Stage(
            index=index,
            name=self._parts.names[index],
            train=self._parts.train.stages[index],
            evaluate=self._parts.evaluate.stages[index],
            loss_of=self._loss_of if is_last and loss_fn is not None else None,
            loss_module=loss_fn if is_last and isinstance(loss_fn, nn.Module) else None,
            recompute=self._layout.recompute[index],
        )

    def _loss_of(self, flat: Tensors, target: object, training: bool) -> LossValue:
        assert self._settings.loss_fn is not None
        self._seeder.enter_loss()
        return read_loss(self._settings.loss_fn(self._parts.output(flat, training=training), target))


def _links_of(programs: Sequence[RankProgram]) -> frozenset[Link]:
    """The directed links, (sender, receiver), that any of the programs uses."""
    return frozenset(
        (program.rank, step.peer) if step.is_send else (step.peer, program.rank)
        for program in programs
        for step in program.steps
        if isinstance(step, Transfer)
    )

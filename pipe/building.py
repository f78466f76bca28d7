"""From options to a pipeline: a layout is decided on, and the stages are built for the first batch or an example."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..comm import Collectives, Guard, MeshPlace, PipelineError, World
from ..partition.model.forms import Arguments
from .batch.agreement import unequal_weights
from .batch.given import Given, check_batch
from .batch.slicing import check_slicing
from .build import Pipeline, build
from .checkpoint.process_state import ProcessState, lost_text, read_together
from .checkpoint.reader import Checkpoint
from .checkpoint.snapshot import HasState
from .checkpoint.state import check_model
from .context import Layout, Run, check_sync
from .options import AUTO, LayoutOptions, Options
from .run.engine import check_runnable
from .stage.loss import with_loss
from .telling import told_if_slow

if TYPE_CHECKING:
    from .auto.layout import AutoLayout

_ALONE = threading.RLock()  # recording a model, and random numbers, change what all threads see


class Building:
    """A module's layout and pipeline; None before the first batch of schedule="auto", or before stages are built."""

    def __init__(
        self, options: Options, make_layout: Callable[[World], Layout] | None, *, world: World, guard: Guard
    ) -> None:
        self._options = options
        self._world = world
        self._guard = guard
        self._auto: AutoLayout | None = None
        self.layout: Layout | None = None
        self.pipeline: Pipeline | None = None
        self.is_closed = False
        self.told_of_part = False  # that state_dict() has no other process's stages
        self.unequal: str | None = None  # how processes' first weights differ, until others are loaded
        self._loaded: Checkpoint | None = None  # that the stages go on from as soon as they are built
        if make_layout is None:
            self._plan_first(options.layout)
        else:
            self._start(make_layout(world), options.example)

    def _start(self, layout: Layout, example: Given | None) -> None:
        settings = self._options.settings
        self._options.layout.check_kind(layout.schedule, settings)
        check_slicing(layout, settings)
        check_sync(layout, settings)
        check_runnable(layout.schedule, has_optimizer=settings.optimizer is not None)
        layout.sharding.check_optimizer(has_optimizer=settings.optimizer is not None)
        self.layout = layout
        self._guard.stands_at(layout.place)
        if example is not None:
            replica, num_replicas = layout.place.replica
            check_batch(example, len(range(replica, layout.schedule.num_microbatches, num_replicas)))
            self._assemble(layout, example)

    def _plan_first(self, options: LayoutOptions) -> None:
        from .auto.kept import cache_folder
        from .auto.layout import AutoLayout  # the profiler and the planner, which other runs need not load

        self._options.settings.refuse_flush(AUTO)
        assert self._options.model is not None
        settings, cache = self._options.settings, cache_folder()
        self._auto = AutoLayout(self._options.model, self._world, options, settings, guard=self._guard, cache=cache)

    @property
    def replica(self) -> tuple[int, int]:
        return (0, 1) if self.layout is None else self.layout.place.replica

    @property
    def reads_nothing(self) -> bool:
        """Whether no stage of this process reads a batch's values; False before they are built."""
        return self.pipeline is not None and self.pipeline.training.reads_nothing

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        recorders = [] if self.pipeline is None else [local.recorder for local in self.pipeline.engine.ranks]
        begun = [recorder.clock.stamp() for recorder in recorders]
        yield
        for recorder, start in zip(recorders, begun, strict=True):
            recorder.data(start)

    def decided_for(self, given: Given) -> Layout:
        """The layout; under schedule="auto" the first batch decides on it. PipelineError behind `close`."""
        if self.is_closed:
            raise PipelineError("this pipeline has ended: expected a new PipelineModule after close()")
        if self.layout is None:
            assert self._auto is not None
            self._start(self._auto.decide(given.detached()), None)
            assert self.layout is not None
        return self.layout

    def built_for(self, given: Given) -> Pipeline:
        """The pipeline; the first batch builds the stages, unless there were example inputs."""
        layout = self.decided_for(given)
        return self._assemble(layout, given) if self.pipeline is None else self.pipeline

    def ready_for(self, given: Given) -> Pipeline:
        """The same, to run a batch: ValueError, on every rank, where their weights were never the same."""
        pipeline = self.built_for(given)
        if self.unequal is not None:
            raise ValueError(self.unequal)
        return pipeline

    def decided(self) -> Layout:
        if self.layout is None:
            raise ValueError('schedule="auto" is not decided yet: expected a first train_step, whose batch is profiled')
        return self.layout

    def built(self, what: str) -> Pipeline:
        """The pipeline; ValueError where the stages, which `what` needs, are not built yet."""
        self.decided()
        if self.pipeline is None:
            raise ValueError(
                f"{what}: the stages are not built yet. Expected PipelineModule(..., example_inputs=(x,)), "
                f"pipe.build(x, target) before, or a first train_step"
            )
        return self.pipeline

    @property
    def num_steps(self) -> int:
        """Batches trained on so far."""
        if self.pipeline is not None:
            return self.pipeline.training.num_steps
        return 0 if self._loaded is None else self._loaded.manifest.step

    def load(self, folder: Path, loader: HasState | None) -> None:
        """Go on from a checkpoint: stages that are not built yet do so when they are, the loader and generators now.

        Collective over the processes.
        """
        with told_if_slow(f"reading the checkpoint {folder}", rank=self._world.rank):
            if self.pipeline is not None:
                self.pipeline.state.load(folder, loader)
            else:
                self._load_first(folder, loader)
        self.unequal = None

    def _load_first(self, folder: Path, loader: HasState | None) -> None:
        settings, model, world = self._options.settings, self._options.model, self._world
        root = with_loss(nn.ModuleList(self._options.layout.stages) if model is None else model, settings.loss_fn)
        others_failed = self._guard.others_failed
        collectives = Collectives(
            MeshPlace.line(world), device=settings.device, timeout=settings.timeout, others_failed=others_failed
        )

        def read(checkpoint: Checkpoint) -> ProcessState:
            check_model(checkpoint, root)
            return ProcessState(checkpoint, loader, process=world.rank, num_processes=world.size)

        checkpoint, own = read_together(folder, read, collectives, self._guard)
        own.take()
        self._loaded = checkpoint
        if own.lost and world.rank == 0:
            warnings.warn(lost_text(checkpoint, own.lost), stacklevel=4)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a call, whatever mode it is made in, and in the precision that was asked for.

        In one process no other thread's runs meanwhile, and an error takes back stages that the call has built.
        """
        settings = self._options.settings
        if self.pipeline is not None and self.pipeline.training.fills.is_running:
            raise ValueError(
                "a piece of background work calls its pipeline in the midst of a step: expected other work"
            )
        dtype = settings.autocast
        autocast = nullcontext() if dtype is None else torch.autocast(settings.device.type, dtype=dtype)
        with torch.inference_mode(False), autocast:
            if self._world.distributed:  # waiting for another thread, each rank would wait for the others
                yield
                return
            with _ALONE:
                before = self.pipeline
                try:
                    yield
                except BaseException:
                    self.pipeline = before
                    raise

    def _assemble(self, layout: Layout, given: Given) -> Pipeline:
        run_on, own = self._options.settings.device, layout.schedule.num_microbatches // layout.place.replica[1]

        def like(x: torch.Tensor) -> torch.Tensor:
            if x.is_meta:
                return torch.zeros_like(x, device=run_on)
            return x.detach().to(run_on).requires_grad_(x.requires_grad)

        def first() -> Arguments:
            check_batch(given, own if given.microbatches else 1)  # training asks for more
            return given.cut(own)[0].arguments.map(like)

        slow = told_if_slow("building the pipeline", rank=self._world.rank)
        with self.alone(), self._guard.together(), slow:
            run = Run(
                layout,
                self._options.settings,
                self._guard,
                model=self._options.model,
                stages=self._options.layout.stages,
                verifies=self._options.verify_every is not None,
                if_it_fits=self._options.verify_if_it_fits,
            )
            if self._loaded is None:
                self.unequal = unequal_weights(run.root, layout.schedule, layout.place, run.collectives)
            pipeline = build(run, first)
        if self._loaded is not None:
            pipeline.state.resume(self._loaded.place)
            self._loaded = None
        self.pipeline = pipeline
        return pipeline

"""From options to a pipeline: a layout is decided on, and the stages are built for the first batch or an example."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from ..comm import (
    Collectives,
    Guard,
    MeshPlace,
    PipelineError,
    World,
    join_world,
)
from ..comm.membership import LIFE
from ..partition.model.forms import Arguments
from ..partition.model.modes import no_collection
from ..partition.model.source_line import fold
from .batch.agreement import unequal_weights
from .build import Pipeline, build
from .checkpoint.process_state import ProcessState, lost_text, read_together
from .checkpoint.reader import Checkpoint
from .checkpoint.snapshot import HasState
from .checkpoint.state import check_model
from .context import Layout, Run
from .life_cycle import LifeCycle
from .run.engine import check_runnable
from .settings.excludes import REROUTE, check_layout
from .settings.given import Given, check_batch
from .settings.options import Options
from .stage.loss import with_loss
from .telling import told_if_slow

T = TypeVar("T")

if TYPE_CHECKING:
    from .auto.layout import AutoLayout

_log = logging.getLogger("stagewright")
_ALONE = threading.RLock()  # recording a model, and random numbers, change what all threads see


def meet(options: Options) -> World:
    """The world of this process; see join_world, and `reroute` for one that was started again to join others."""
    if LIFE in os.environ and not dist.is_initialized():
        from .reroute import world_until_let_in

        return world_until_let_in(options)
    return join_world(device=options.device, timeout=options.timeout)


class _Folding:
    """A context whose errors are folded. No generator: contextlib would put the traceback back."""

    def __init__(self, inner: AbstractContextManager[None]) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, traceback)
        if isinstance(error, Exception):
            fold(error)


class Building:
    """A module's layout and pipeline; None before the first batch of schedule="auto", or before stages are built."""

    def __init__(
        self, options: Options, make_layout: Callable[[World], Layout] | None, *, world: World, guard: Guard
    ) -> None:
        self.options = options
        self.world = world
        self.guard = guard
        self.life = LifeCycle()
        self._auto: AutoLayout | None = None
        self.layout: Layout | None = None
        self.pipeline: Pipeline | None = None
        self.is_closed = False
        self.told_of_part = False  # that state_dict() has no other process's stages
        self.unequal: str | None = None  # how processes' first weights differ, until others are loaded
        self._loaded: Checkpoint | None = None  # that the stages go on from as soon as they are built
        self._fresh = False  # whether parameters may begin there with fresh state
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext  # each call
        if make_layout is None:
            from .auto.layout import AutoLayout  # the profiler and the planner, which other runs need not load

            self._auto = AutoLayout(options, world, guard=guard)
        else:
            self._start(make_layout(world), options.example)

    def _start(self, layout: Layout, example: Given | None) -> None:
        options = self.options
        check_layout(options, layout.schedule, layout.place, layout.sharding)
        check_runnable(layout.schedule, has_optimizer=options.optimizer is not None)
        self.layout = layout
        if options.mesh.on_failure == REROUTE:
            from .reroute import life_cycle_of

            self.life = life_cycle_of(self, layout)
        self.guard.stands_at(layout.place)
        if example is not None:
            replica, num_replicas = layout.place.replica
            check_batch(example, len(range(replica, layout.schedule.num_microbatches, num_replicas)))
            self._assemble(layout, example)

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

    def built_for(self, given: Given, *, evaluates: bool = False) -> Pipeline:
        """The pipeline; the first batch builds the stages, unless there were example inputs. `evaluates`: for
        evaluation, too, where that may wait for the first one."""
        layout = self.decided_for(given)
        if self.pipeline is None:
            return self._assemble(layout, given, evaluates=evaluates)
        if evaluates:
            self.pipeline.evaluation.prepare()
        return self.pipeline

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
        self.life.enter()
        if self.pipeline is not None:
            return self.pipeline.training.num_steps
        return self.life.step if self._loaded is None else self._loaded.manifest.step

    def load(self, folder: Path, loader: HasState | None, *, fresh: bool) -> None:
        """Go on from a checkpoint: stages that are not built yet do so when they are, the loader and generators now.

        Collective over the processes.
        """
        with told_if_slow(f"reading the checkpoint {folder}", rank=self.world.rank):
            if self.pipeline is not None:
                self.pipeline.state.load(folder, loader, fresh=fresh)
            else:
                self._load_first(folder, loader)
                self._fresh = fresh
        self.unequal = None

    def _load_first(self, folder: Path, loader: HasState | None) -> None:
        options, world = self.options, self.world
        root = with_loss(options.root, options.loss_fn)
        place = MeshPlace.line(world)
        collectives = Collectives(place, device=options.device, timeout=options.timeout, guard=self.guard)

        def read(checkpoint: Checkpoint) -> ProcessState:
            check_model(checkpoint, root)
            return ProcessState(checkpoint, loader, process=world.rank, num_processes=world.size)

        checkpoint, own = read_together(folder, read, collectives, self.guard)
        own.take()
        self._loaded = checkpoint
        if own.lost and world.rank == 0:
            warnings.warn(lost_text(checkpoint, own.lost), stacklevel=4)

    def alone(self) -> _Folding:
        """`_alone`; an error of the user's own code then shows that code alone."""
        return _Folding(self._alone())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around a call, whatever mode it is made in, and in the precision that was asked for.

        In one process no other thread's runs meanwhile, and an error takes back stages that the call has built.
        """
        inside = None if self.pipeline is None else self.pipeline.state.run.inside
        if inside is not None:
            raise ValueError(f"{inside} calls its pipeline in the midst of a step: expected other work")
        dtype = self.options.autocast
        autocast = nullcontext() if dtype is None else torch.autocast(self.options.device.type, dtype=dtype)
        with self.around(), torch.inference_mode(False), autocast:
            if (
                self.world.distributed or self.options.mesh.on_failure == REROUTE
            ):  # all ranks would wait for a thread's turn
                yield
                return
            with _ALONE:
                before = self.pipeline
                try:
                    yield
                except BaseException:
                    self.pipeline = before
                    raise

    def _assemble(self, layout: Layout, given: Given, *, evaluates: bool = False) -> Pipeline:
        options, own = self.options, layout.schedule.num_microbatches // layout.place.replica[1]
        run_on = options.device

        def like(x: torch.Tensor) -> torch.Tensor:
            if x.is_meta:
                return torch.zeros_like(x, device=run_on)
            return x.detach().to(run_on).requires_grad_(x.requires_grad)

        def first() -> Arguments:
            check_batch(given, own if given.microbatches else 1)  # training asks for more
            if options.model is not None and not given.microbatches:
                options.calls.refuse_chance(options.model, given, num_parts=own, device=run_on)
            return given.cut(own)[0].arguments.map(like)

        slow = told_if_slow("building the pipeline", rank=self.world.rank)
        with self.alone(), self.guard.together(), slow, no_collection():  # nearly all that it makes stays
            verifies = self.options.verify_every is not None and not self.life.joins
            evaluates = evaluates or self.world.distributed or self.options.mesh.sync != 1
            run = Run(layout, self.options, self.guard, verifies=verifies, evaluates=evaluates)
            if self._loaded is None:
                self.unequal = unequal_weights(run.root, layout.schedule, layout.place, run.collectives)
            pipeline = build(run, first)
        if self.life.step:
            pipeline.training.restart(self.life.step)
        if self._loaded is not None:
            pipeline.state.resume(self._loaded.place, fresh=self._fresh)
            self._loaded = None
        self.pipeline = pipeline
        return pipeline

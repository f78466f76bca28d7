"""From options to a pipeline: the layout is chosen, and the stages are built for the first batch or an example."""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from ..schedules import ScheduleError
from .batch.agreement import unequal_weights
from .build import Pipeline, build
from .checkpoint.reader import Checkpoint, ProcessState, lost_text, read_together
from .checkpoint.snapshot import HasState
from .checkpoint.state import check_model
from .context import Layout, Run
from .life_cycle import LifeCycle
from .run.engine import check_runnable
from .run.evaluation import Evaluation
from .run.training import Training
from .settings.arguments import FIRST
from .settings.excludes import REROUTE, check_layout
from .settings.given import Given, check_batch
from .settings.options import Options
from .settings.precision import refuse_float16_autocast
from .stage.loss import with_loss
from .telling import tell, told_if_slow, warn_of_evaluation_mode
from .verify.plain import NotVerifiableError
from .verify.verification import Verification

T = TypeVar("T")

if TYPE_CHECKING:
    from .auto.layout import AutoLayout

_log = logging.getLogger("stagewright")
_ALONE = threading.RLock()  # recording a model, and random numbers, change what all threads see


def meet(options: Options) -> World:
    """The world of this process; see join_world, and `reroute` for a restarted process."""
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


class UntilBuilt:
    """Context of each call: an error before the stages are built takes the edits back until the next call."""

    def __init__(
        self, edits: ExitStack, again: Callable[[], AbstractContextManager[object]], is_built: Callable[[], bool]
    ) -> None:
        self._edits = edits
        self._again = again
        self._is_built = is_built
        self._are_undone = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._are_undone:
            self._edits.enter_context(self._again())
            self._are_undone = False
        try:
            yield
        except BaseException as error:
            if not self._is_built():
                self._edits.__exit__(type(error), error, error.__traceback__)
                self._are_undone = True
            raise
        if self._is_built():
            self._edits.close()


class Building:
    """A module's layout and pipeline; None before schedule="auto" has decided, or before stages are built."""

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
        self.told_of_part = False  # that state_dict() lacks other processes' stages
        self.unequal: str | None = None  # how processes' first weights differ, until others are loaded
        self._loaded: Checkpoint | None = None  # for the stages, when they are built
        self._fresh = False  # whether parameters that it lacks may begin with fresh state
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext  # each call
        self._until_verified = math.inf if options.verify_every is None else 0.0  # batches
        self._has_trained = False
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
        self.guard.set_place(layout.place)
        if example is not None:
            replica, num_replicas = layout.place.replica
            check_batch(example, len(range(replica, layout.schedule.num_microbatches, num_replicas)))
            self._assemble(layout, example)

    @property
    def replica(self) -> tuple[int, int]:
        """(number of this process's data replica, number of data replicas)."""
        return (0, 1) if self.layout is None else self.layout.place.data

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
        """The layout, which under schedule="auto" the first batch decides. Raises PipelineError after `close`."""
        if self.is_closed:
            raise PipelineError("this pipeline has ended: expected a new PipelineModule after close()")
        if self.layout is None:
            assert self._auto is not None
            self._start(self._auto.decide(given.detached()), None)
            assert self.layout is not None
        return self.layout

    def built_for(self, given: Given, *, evaluates: bool = False) -> Pipeline:
        """The pipeline, built for this batch if it is not yet; with `evaluates`, stages for evaluation as well."""
        layout = self.decided_for(given)
        if self.pipeline is None:
            return self._assemble(layout, given, evaluates=evaluates)
        if evaluates:
            self.pipeline.evaluation.prepare()
        return self.pipeline

    def ready_for(self, given: Given) -> Pipeline:
        """The same, to run a batch. Raises ValueError, on every rank, if their first weights differed."""
        pipeline = self.built_for(given)
        if self.unequal is not None:
            raise ValueError(self.unequal)
        return pipeline

    def training_for(self, given: Given) -> Training:
        """Training of a batch like this one, after the checks and the verification that are due before it."""
        refuse_float16_autocast(self.options.device, scales_loss=self.options.grad_scaler is not None)
        schedule = self.decided_for(given).schedule
        if not schedule.has_backward:
            raise ScheduleError(
                f"schedule {schedule.name!r} has no backward: expected F and B of each stage and microbatch to "
                f"train, or eval_step"
            )
        pipeline = self.ready_for(given)
        if not self._has_trained and self.world.rank == 0:
            warn_of_evaluation_mode(pipeline.state.run.root)
        self._has_trained = True
        if self.is_verification_due and pipeline.state.run.verifies:
            self._verify_as_due(given)
        self._until_verified -= 1
        return pipeline.training

    @property
    def is_verification_due(self) -> bool:
        return self._until_verified <= 0

    def _verify_as_due(self, given: Given) -> None:
        pipeline, is_first = self.built_for(given), self._until_verified == 0.0
        try:
            self.verify(given, evaluates=pipeline.evaluation.is_prepared)
        except NotVerifiableError as error:
            if self.options.verify != FIRST:
                raise
            self._until_verified = math.inf
            tell(f"the first batch is not verified: {error}", rank=self.world.rank)
        if is_first and pipeline.training.num_steps == 0:
            pipeline.measurement.forget()

    def verify(self, given: Given, *, evaluates: bool = True) -> Verification:
        verifier = self.ready_for(given).verifier
        with told_if_slow("comparing a batch with the plain model", rank=self.world.rank):
            found = verifier.verify(given.detached(), evaluates=evaluates)
        self._until_verified = self.options.verify_every or math.inf
        return found

    def evaluation_for(self, given: Given) -> Evaluation:
        pipeline = self.ready_for(given)
        if pipeline.verifier.owes_evaluation and pipeline.evaluation.takes(given):
            try:
                pipeline.verifier.verify_evaluation(given.detached())
            except NotVerifiableError as error:  # such as a model that keeps what it has computed in training
                if self.options.verify != FIRST:
                    raise
                pipeline.verifier.owes_evaluation = False
                _log.info("the first evaluation is not verified: %s", error)
        return pipeline.evaluation

    def decided(self) -> Layout:
        if self.layout is None:
            raise ValueError('schedule="auto" is not decided yet: expected a first train_step, whose batch is profiled')
        return self.layout

    def built(self, what: str) -> Pipeline:
        """The pipeline. Raises ValueError if the stages, which `what` needs, are not built."""
        self.decided()
        if self.pipeline is None:
            raise ValueError(
                f"{what}: the stages are not built yet. Expected PipelineModule(..., example_inputs=(x,)), "
                f"pipe.build(x, target) before, or a first train_step"
            )
        return self.pipeline

    @property
    def num_steps(self) -> int:
        self.life.enter()
        if self.pipeline is not None:
            return self.pipeline.training.num_steps
        return self.life.step if self._loaded is None else self._loaded.manifest.step

    def load(self, folder: Path, loader: HasState | None, *, fresh: bool) -> None:
        """Loads a checkpoint; stages that are not built load it when they are. Collective."""
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
        """Context of a call, in the precision that the options ask for.

        In one process no other thread's call runs meanwhile, and an error removes stages that the call has built.
        """
        inside = None if self.pipeline is None else self.pipeline.state.run.inside
        if inside is not None:
            raise ValueError(f"{inside} calls its pipeline during a step: expected other work")
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
            check_batch(given, own if given.microbatches else 1)  # training needs more
            if options.model is not None and not given.microbatches:
                options.calls.refuse_chance(options.model, given, num_parts=own, device=run_on)
            return given.cut(own)[0].arguments.map(like)

        slow = told_if_slow("building the pipeline", rank=self.world.rank)
        with self.alone(), self.guard.together(), slow, no_collection():  # nearly all objects that it makes are kept
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

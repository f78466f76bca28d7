"""From options to a pipeline: a layout is decided on, and the stages are built for the first batch or an example."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from ..comm import (
    Collectives,
    Guard,
    MeshPlace,
    PeerLost,
    PipelineError,
    PipelineTimeout,
    World,
    join_world,
    make_guard,
)
from ..comm.membership import LIFE, Membership
from ..comm.sealed import own_folder
from ..partition.model.forms import Arguments
from ..partition.model.modes import no_collection
from ..schedules.transform import on_rows, schedule_without
from .batch.agreement import made_of, unequal_weights
from .batch.slicing import check_slicing
from .build import Pipeline, build
from .checkpoint.process_state import ProcessState, lost_text, read_together
from .checkpoint.reader import Checkpoint
from .checkpoint.snapshot import HasState
from .checkpoint.state import check_model
from .context import Layout, Run, check_sync
from .results import StepResult
from .run.compression import check_compress
from .run.engine import check_runnable
from .run.training import Training
from .settings.arguments import AUTO
from .settings.given import Given, check_batch
from .settings.options import REROUTE, Options
from .stage.loss import with_loss
from .telling import told_if_slow

T = TypeVar("T")

if TYPE_CHECKING:
    from .auto.layout import AutoLayout

_log = logging.getLogger("stagewright")
_ALONE = threading.RLock()  # recording a model, and random numbers, change what all threads see


def meet(options: Options) -> World:
    """The world of this process; one that was started again, beside others that went on, is alone until they let it in.

    Raises ValueError for options under which nobody goes on; see join_world.
    """
    if LIFE not in os.environ or dist.is_initialized():
        return join_world(device=options.device, timeout=options.timeout)
    if options.mesh.on_failure != REROUTE:
        raise ValueError(
            'a PipelineModule in a process that was started again, to join others: expected Mesh(on_failure="reroute")'
        )
    return World(rank=0, size=1)


class Building:
    """A module's layout and pipeline; None before the first batch of schedule="auto", or before stages are built."""

    def __init__(
        self, options: Options, make_layout: Callable[[World], Layout] | None, *, world: World, guard: Guard
    ) -> None:
        self.options = options
        self.world = world
        self.guard = guard
        self._members: Membership | None = None  # of a run that goes on when processes die
        self._in_vain = 0  # failures of one step, one behind the other, in which nobody died
        self._auto: AutoLayout | None = None
        self.layout: Layout | None = None
        self.pipeline: Pipeline | None = None
        self.is_closed = False
        self.told_of_part = False  # that state_dict() has no other process's stages
        self.unequal: str | None = None  # how processes' first weights differ, until others are loaded
        self._loaded: Checkpoint | None = None  # that the stages go on from as soon as they are built
        self._fresh = False  # whether parameters may begin there with fresh state
        # Edits of the model, until they stay, and what makes them again.
        self.edits: tuple[ExitStack, Callable[[], AbstractContextManager[object]]] = ExitStack(), nullcontext
        self._are_undone = False
        if make_layout is None:
            self._plan_first()
        else:
            self._start(make_layout(world), options.example)

    def _start(self, layout: Layout, example: Given | None) -> None:
        options = self.options
        options.check_kind(layout.schedule)
        check_slicing(layout, options)
        check_sync(layout, options)
        check_compress(layout, options)
        check_runnable(layout.schedule, has_optimizer=options.optimizer is not None)
        layout.sharding.check_optimizer(has_optimizer=options.optimizer is not None)
        self.layout = layout
        if options.mesh.on_failure == REROUTE:
            options.refuse_reroute()
            if self.world.distributed or LIFE in os.environ:
                self._members = Membership(self.world, timeout=options.timeout, made=made_of(layout.schedule, options))
                self._judged(self.guard, self._members)
        self.guard.stands_at(layout.place)
        if example is not None:
            replica, num_replicas = layout.place.replica
            check_batch(example, len(range(replica, layout.schedule.num_microbatches, num_replicas)))
            self._assemble(layout, example)

    @contextmanager
    def _edited(self) -> Iterator[None]:
        """Edits stay as soon as the stages are built; an error before takes them back, and the next call makes them."""
        edits, again = self.edits
        if self._are_undone:
            edits.enter_context(again())
            self._are_undone = False
        try:
            yield
        except BaseException as error:
            if self.pipeline is None:
                edits.__exit__(type(error), error, error.__traceback__)
                self._are_undone = True
            raise
        if self.pipeline is not None:
            edits.close()

    def _plan_first(self) -> None:
        from .auto.layout import AutoLayout  # the profiler and the planner, which other runs need not load

        self.options.refuse_flush(AUTO)
        self._auto = AutoLayout(self.options, self.world, guard=self.guard)

    @property
    def replica(self) -> tuple[int, int]:
        return (0, 1) if self.layout is None else self.layout.place.replica

    def refuse_reroute(self, what: str, *, instead: str) -> None:
        """ValueError for what would not outlast the death of a process, where the others go on."""
        if self._members is not None:
            raise ValueError(f'{what} beside Mesh(on_failure="reroute"), where it ends with the first death: {instead}')

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

    def step_of(self, training: Training) -> Callable[[Given], StepResult]:
        """A step's run; where the run goes on when processes die, until those that are left have made it."""
        if self._members is None:
            return training.step
        if self._members.is_outside:
            raise ValueError(
                f"train_step in rank {self._members.me}, which was started again to join others, before it has asked "
                f"which step they are at: expected for step in range(pipe.num_steps, ...)"
            )
        return partial(self._step, self._members)

    def _step(self, members: Membership, given: Given) -> StepResult:
        def training() -> Training:
            return self.built("train_step").training

        def step() -> StepResult:
            training().goes_on = True
            return training().step(given)

        return self._go_on(
            members,
            step,
            admits=True,
            is_ready=lambda: training().is_ready,
            finish=lambda: training().make_update(),
            take_back=lambda: training().take_back(),
        )

    def outlasting(self, call: Callable[[], T]) -> T:
        """The answer of a collective call that trains nothing: where the run goes on when processes die, those that
        are left make it again, unless each of them has its answer."""
        members, answers = self._members, list[T]()
        if members is None or members.is_outside or self.pipeline is None:
            return call()

        def made() -> T:
            answers.append(call())
            with self.guard.together():
                collectives = self.built("a call").state.run.collectives
                collectives.all_reduce(torch.zeros(1), what="asking whether all have an answer")
            return answers[0]

        return self._go_on(
            members,
            made,
            admits=False,
            is_ready=lambda: len(answers) > 0,
            finish=lambda: answers[0],
            take_back=answers.clear,
        )

    def _go_on(
        self,
        members: Membership,
        call: Callable[[], T],
        *,
        admits: bool,
        is_ready: Callable[[], bool],
        finish: Callable[[], T],
        take_back: Callable[[], None],
    ) -> T:
        """The result of a call. A rank that `is_ready` has all that it is made of, and finishes it alone.

        Arguments:
            admits: whether processes that were started again may join in front of it.
        """
        while True:
            try:
                self.guard.goes_on = True
                step = self.num_steps
                if admits and not members.changed and members.someone_comes(step):
                    folder = members.folder_for_those_that_come()
                    self.built("train_step").state.save_for_others(folder)
                    members.let_in(step)
                if members.changed:
                    self._form(members)
                self.guard.goes_on = True
                result = call()
                members.calls += 1
            except (PeerLost, PipelineTimeout) as error:
                if not self._is_whole(members, error, is_ready=is_ready()):
                    take_back()
                    continue
                result = finish()
            except BaseException as error:
                if self.guard.ended:
                    members.fail(error)
                raise
            finally:
                self.guard.goes_on = False
            members.step_made()
            self._in_vain = 0
            return result

    def _is_whole(self, members: Membership, error: PipelineError, *, is_ready: bool) -> bool:
        """Whether what failed is whole here, as those that are left agree; else they do it again."""
        assert self.layout is not None
        assert self.pipeline is not None
        before = members.members
        has_waited = isinstance(error, PipelineTimeout)
        verdict = members.agree(members.calls, is_ready=is_ready, has_waited=has_waited)
        gone = [one for one in before if one not in verdict.members]
        failed = verdict.failed
        self._in_vain = 0 if gone else self._in_vain + 1
        if self._in_vain > 1:
            failed = failed or "a step failed twice, and nobody is dead: expected the same calls in every process"
        for stage, ranks in enumerate(self.layout.schedule.owners):
            if not failed and not set(ranks) & set(verdict.members):
                names = [*self.pipeline.state.own_checkpoints]
                last = f"the last checkpoint, {names[-1]}" if names else "a checkpoint, of which this run has none"
                failed = (
                    f"ranks {', '.join(map(str, ranks))} are dead, and nobody else has stage {stage} "
                    f"({self.pipeline.parts.names[stage]}): expected a new start from {last}"
                )
        if failed:
            raise type(error)(f"{error}\ncause: {failed}", peers=error.peers, is_explained=True) from error
        if gone and members.me == verdict.members[0]:
            _log.warning("rank %s died: %d ranks go on without it", ", ".join(map(str, gone)), len(verdict.members))
        return verdict.is_whole and is_ready

    def _form(self, members: Membership) -> None:
        """The world and the pipeline of those that are left. Collective over them."""
        assert self.layout is not None
        assert self.pipeline is not None
        before = self.pipeline
        for local in before.engine.ranks:
            local.transport.close()
        world = members.form()
        guard = self._judged(make_guard(world), members)
        guard.goes_on = True
        gone = set(range(self.layout.schedule.num_ranks)) - set(members.members)
        schedule = on_rows(schedule_without(self.layout.schedule, gone), members.members)
        layout = replace(self.layout, schedule=schedule, place=MeshPlace.line(world))
        with guard.together():
            self.pipeline = before.again(Run(layout, self.options, guard))
        if members.folder is not None:
            self.pipeline.state.take_from_others(own_folder(members.folder))
        self.world, self.guard, members.changed = world, guard, False

    def _judged(self, guard: Guard, members: Membership) -> Guard:
        guard.someone_died = members.someone_died
        return guard

    @property
    def num_steps(self) -> int:
        """Batches trained on so far; a process that was started again waits until it is let in."""
        members = self._members
        if members is not None and members.is_outside:
            members.enter()
            if self.pipeline is not None:
                self.pipeline.training.restart(members.step)
        if self.pipeline is not None:
            return self.pipeline.training.num_steps
        first = 0 if members is None else members.step
        return first if self._loaded is None else self._loaded.manifest.step

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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a call, whatever mode it is made in, and in the precision that was asked for.

        In one process no other thread's runs meanwhile, and an error takes back stages that the call has built.
        """
        inside = None if self.pipeline is None else self.pipeline.state.run.inside
        if inside is not None:
            raise ValueError(f"{inside} calls its pipeline in the midst of a step: expected other work")
        dtype = self.options.autocast
        autocast = nullcontext() if dtype is None else torch.autocast(self.options.device.type, dtype=dtype)
        with self._edited(), torch.inference_mode(False), autocast:
            if self.world.distributed or self._members is not None:  # for a thread's turn all ranks would wait
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

        joins = self._members is not None and self._members.life > 0
        slow = told_if_slow("building the pipeline", rank=self.world.rank)
        with self.alone(), self.guard.together(), slow, no_collection():  # nearly all that it makes stays
            verifies = self.options.verify_every is not None and not joins
            evaluates = evaluates or self.world.distributed or self.options.mesh.sync != 1
            run = Run(layout, self.options, self.guard, verifies=verifies, evaluates=evaluates)
            if self._loaded is None:
                self.unequal = unequal_weights(run.root, layout.schedule, layout.place, run.collectives)
            pipeline = build(run, first)
        if self._members is not None:
            pipeline.training.restart(self._members.step)
        if self._loaded is not None:
            pipeline.state.resume(self._loaded.place, fresh=self._fresh)
            self._loaded = None
        self.pipeline = pipeline
        return pipeline

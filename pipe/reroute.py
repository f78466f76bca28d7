"""Mesh(on_failure="reroute"): a run that continues when processes die, and lets in restarted ones.

call -> a process dies -> the others agree -+-> the call was complete: it is finished
                                            +-> a new world, schedule and pipeline, and the call again
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from ..comm import Guard, MeshPlace, PeerLost, PipelineError, PipelineTimeout, World, make_guard
from ..comm.membership import LIFE, Membership
from ..comm.sealed import own_folder
from ..schedules.transform import on_rows, schedule_without
from .batch.agreement import made_of
from .context import Layout, Run
from .life_cycle import LifeCycle, Running
from .results import StepResult
from .run.training import Training
from .settings.excludes import REROUTE
from .settings.given import Given
from .settings.options import Options

T = TypeVar("T")

_log = logging.getLogger("stagewright")


def world_until_let_in(options: Options) -> World:
    """The world of a restarted process, which is alone until the others let it in.

    Raises ValueError for options under which no others continue.
    """
    if options.mesh.on_failure != REROUTE:
        raise ValueError(
            'a PipelineModule in a process that was restarted to join others: expected Mesh(on_failure="reroute")'
        )
    return World(rank=0, size=1)


def life_cycle_of(run: Running, layout: Layout) -> LifeCycle:
    options = run.options
    if not run.world.distributed and LIFE not in os.environ:
        return LifeCycle()
    made = made_of(layout.schedule, options)
    return Rerouted(run, Membership(run.world, timeout=options.timeout, made=made))


class Rerouted(LifeCycle):
    """Makes calls again, in a new world, when processes died."""

    def __init__(self, run: Running, members: Membership) -> None:
        self._run = run
        self._members = members
        self._in_vain = 0  # failures of one step in a row, in which no process died
        run.guard.someone_died = members.someone_died

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return self._members.life > 0

    @property
    def step(self) -> int:  # type: ignore[override]
        return self._members.step

    def enter(self) -> None:
        """A restarted process waits until it is let in."""
        if self._members.is_outside:
            self._members.enter()
            if self._run.pipeline is not None:
                self._run.pipeline.training.restart(self._members.step)

    def refuse(self, what: str, *, instead: str) -> None:
        raise ValueError(f'{what} with Mesh(on_failure="reroute"), under which it ends with the first death: {instead}')

    def step_of(self, training: Training) -> Callable[[Given], StepResult]:
        """Function that runs a training step until the remaining processes have completed it."""
        if self._members.is_outside:
            raise ValueError(
                f"train_step in rank {self._members.me}, which was restarted to join others, before it knows "
                f"their step: expected for step in range(pipe.num_steps, ...)"
            )
        return self._step

    def _step(self, given: Given) -> StepResult:
        def training() -> Training:
            return self._run.built("train_step").training

        def step() -> StepResult:
            training().goes_on = True
            return training().step(given)

        return self._go_on(
            step,
            admits=True,
            is_ready=lambda: training().is_ready,
            finish=lambda: training().make_update(),
            take_back=lambda: training().take_back(),
        )

    def outlasting(self, call: Callable[[], T]) -> T:
        """Result of a collective call that does not train; repeated unless each remaining process has it."""
        if self._members.is_outside or self._run.pipeline is None:
            return call()
        answers = list[T]()

        def made() -> T:
            answers.append(call())
            with self._run.guard.together():
                collectives = self._run.built("a call").state.run.collectives
                collectives.all_reduce(torch.zeros(1), what="asking whether all have an answer")
            return answers[0]

        return self._go_on(
            made,
            admits=False,
            is_ready=lambda: len(answers) > 0,
            finish=lambda: answers[0],
            take_back=answers.clear,
        )

    def _go_on(
        self,
        call: Callable[[], T],
        *,
        admits: bool,
        is_ready: Callable[[], bool],
        finish: Callable[[], T],
        take_back: Callable[[], None],
    ) -> T:
        """Result of a call. A rank that `is_ready` has everything that the result needs, and finishes it alone.
        `admits`: whether restarted processes may join before it."""
        run, members = self._run, self._members
        while True:
            try:
                run.guard.survives_losses = True
                step = run.num_steps
                if admits and not members.changed and members.someone_comes(step):
                    folder = members.folder_for_those_that_come()
                    run.built("train_step").state.save_for_others(folder)
                    members.let_in(step)
                if members.changed:
                    self._form()
                run.guard.survives_losses = True
                result = call()
                members.calls += 1
            except (PeerLost, PipelineTimeout) as error:
                if not self._is_whole(error, is_ready=is_ready()):
                    take_back()
                    continue
                result = finish()
            except BaseException as error:
                if run.guard.ended:
                    members.fail(error)
                raise
            finally:
                run.guard.survives_losses = False
            members.step_made()
            self._in_vain = 0
            return result

    def _is_whole(self, error: PipelineError, *, is_ready: bool) -> bool:
        """Whether the failed call is complete here, as the remaining processes agree; else they repeat it."""
        pipeline, members = self._run.built("a call"), self._members
        before = members.members
        has_waited = isinstance(error, PipelineTimeout)
        verdict = members.agree(members.calls, is_ready=is_ready, has_waited=has_waited)
        gone = [one for one in before if one not in verdict.members]
        failed = verdict.failed
        self._in_vain = 0 if gone else self._in_vain + 1
        if self._in_vain > 1:
            failed = failed or "a step failed twice, and no process is dead: expected the same calls in every process"
        for stage, ranks in enumerate(_layout_of(self._run).schedule.owners):
            if not failed and not set(ranks) & set(verdict.members):
                names = [*pipeline.state.own_checkpoints]
                last = f"the last checkpoint, {names[-1]}" if names else "a checkpoint, of which this run has none"
                failed = (
                    f"ranks {', '.join(map(str, ranks))} are dead, and no other rank has stage {stage} "
                    f"({pipeline.parts.names[stage]}): expected a restart from {last}"
                )
        if failed:
            raise type(error)(f"{error}\ncause: {failed}", peers=error.peers, is_explained=True) from error
        if gone and members.me == verdict.members[0]:
            _log.warning("rank %s died: %d ranks continue without it", ", ".join(map(str, gone)), len(verdict.members))
        return verdict.is_whole and is_ready

    def _form(self) -> None:
        """The world and the pipeline of the remaining processes. Collective over them."""
        run, members = self._run, self._members
        before, whole = run.built("a call"), _layout_of(run)
        for local in before.engine.ranks:
            local.transport.close()
        world = members.form()
        guard: Guard = make_guard(world)
        guard.someone_died, guard.survives_losses = members.someone_died, True
        gone = set(range(whole.schedule.num_ranks)) - set(members.members)
        schedule = on_rows(schedule_without(whole.schedule, gone), members.members)
        layout = replace(whole, schedule=schedule, place=MeshPlace.line(world))
        with guard.together():
            run.pipeline = before.again(Run(layout, run.options, guard))
        if members.folder is not None:
            run.pipeline.state.take_from_others(own_folder(members.folder))
        run.world, run.guard, members.changed = world, guard, False


def _layout_of(run: Running) -> Layout:
    assert run.layout is not None
    return run.layout

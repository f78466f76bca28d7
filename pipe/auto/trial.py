"""Trials: the best plans run for a few steps before one of them is used for training.

plans, the shortest prediction first
  the first --copy of the model, real steps on the first batch--> its step, and the seconds of its parts
  each of them in turn, those near the first one
the fastest -> the plan, with measured instead of predicted values

A trial is a pipeline like any other, over a copy of the model and of the loss, with its own links, process groups and
optimizers. These get a learning rate of 0, so that each step computes the same, and a rate that a scheduler would have
warmed up does no harm. Afterwards no trace is left: what user code reaches through the model, the loss and `optimizer=`
(closures, lists, random generators) is restored, and so are gradients.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...comm import Collectives, Guard, PipelineError, World, make_guard
from ...partition.model.copies import Copies
from ...partition.model.untouched import StateSnapshot
from ...partition.plans.as_schedule import with_measured
from ...partition.plans.as_text import CHOSEN, describe
from ...partition.plans.plan import Plan
from ...partition.plans.record import OWN
from ...partition.profiler.optimizers import NamedParameters, make_optimizers_of_copies, named
from ...schedules import Costs, Timeline
from ...schedules.wording import count, duration, size
from ..build import Pipeline, build
from ..context import Run, layout_of_plan
from ..settings.given import Given
from ..settings.options import Options
from ..telling import figure, tell, told_if_slow

TRIAL_SECONDS = 3.0  # for the steps of all of them, building and settling apart, where _LEAST steps of each take less
LONGEST = 16.0  # seconds that _LEAST steps may take

_WARM_UP = 2  # steps that do not count; one where there is little time
_LEAST, _MOST = 2, 12  # steps
_KINDS = ("own", "memory", "lost")  # of errors, what counts first


def to_try(best: Plan, others: Sequence[Plan], *, trials: int, noise: float) -> list[Plan]:
    """The best plan, and others predicted to take at most the share `noise` longer, of distinct layouts."""
    found, layouts = [best], {_layout(best)}
    least = best.simulated_step_time or 0.0
    for plan in sorted(others, key=lambda plan: plan.simulated_step_time or 0.0):
        is_near = (plan.simulated_step_time or 0.0) <= least * (1 + noise)
        if len(found) < trials and is_near and _layout(plan) not in layouts:
            layouts.add(_layout(plan))
            found.append(plan)
    return found


def _layout(plan: Plan) -> object:
    counts = tuple(plan.replicas[s] for s in plan.firsts)
    return counts, plan.microbatch_size, plan.num_chunks > 1, plan.schedule == OWN


_Ran = tuple[list[Timeline], Costs]  # steps of a trial, and costs


class Trials:
    """Tries plans on the ranks that will train, and leaves the model unchanged."""

    def __init__(self, options: Options, world: World, collectives: Collectives) -> None:
        self._options = options
        self._model = options.root
        self._world = world
        self._collectives = collectives

    def best(self, plans: Sequence[Plan], given: Given) -> tuple[Plan, Plan]:
        """The plan that took least, as measured and as predicted; if none could be tried, the first one with a note.
        Collective.

        `plans` are the same on every rank, the least predicted step first. Raises, on every rank, errors that the run
        itself would raise, except for lack of memory, with which a plan loses.
        """
        if (why := self.refusal(plans, given)) is not None:
            plan = _noted(plans[0], f"not tried: {why}")
            return plan, plan
        notes: list[str] = []
        tried: list[tuple[Plan, Plan]] = []  # as predicted and as measured
        for number, plan in enumerate(plans):
            label = _label(plan)
            found: _Ran | str | None = self._refusal_of(plan)
            if found is None:
                with told_if_slow(f"trial of {label}", rank=self._world.rank):
                    found = self._try(plan, given, seconds=TRIAL_SECONDS / len(plans), settles=not tried)
            if isinstance(found, str):
                notes.append(f"not tried: {label}: {found}")
                told = f"not possible: {found}"
            else:
                tried.append((plan, self._measured(plan, found)))
                told = figure(tried[-1][1], plan)
            tell(f"trial {number + 1} of {len(plans)}: {label}: {told}", rank=self._world.rank)
        if not tried:
            plan = _noted(plans[0], *notes)
            return plan, plan
        best = min(tried, key=_seconds)
        others = [
            f"tried, too: {_label(each[0])}: {duration(_seconds(each))} a batch" for each in tried if each is not best
        ]
        return _noted(best[1], *others, *notes), best[0]

    # What cannot be tried

    def refusal(self, plans: Sequence[Plan], given: Given) -> str | None:
        """Why none of these plans can be tried; None if one can."""
        if self._options.compile is not None:
            return "compile= would compile the model for each trial"
        sizes = {tuple(x.shape for x in part.inputs) for part in given.microbatches}
        if len(sizes) > 1:
            return "microbatches differ in size, and so do those of the next batch"
        whys = [self._refusal_of(plan) for plan in plans]
        return None if None in whys else whys[0]

    def _refusal_of(self, plan: Plan) -> str | None:
        if not self._world.distributed and plan.num_devices > 1:
            return "all ranks are in one process, where they take turns"
        if plan.tensor > 1:
            return "its matrices are split over tensor ranks"
        if plan.is_asynchronous:
            return "batches of a stream overlap: a few of them say little"
        step = plan.simulated_step_time or 0.0
        if _LEAST * step > LONGEST:
            return f"{_LEAST} steps of {duration(step)} take longer than {duration(LONGEST)}, the time of a trial"
        own = sum(x.numel() * x.element_size() for x in (*self._model.parameters(), *self._model.buffers()))
        limits, memory = plan.memory_limits, plan.memory_bytes
        for rank in sorted(limits.keys() & memory.keys()):
            if memory[rank] + own > limits[rank]:
                return (
                    f"on rank {rank} a copy of the model in addition to the run takes {size(memory[rank] + own)} of "
                    f"{size(limits[rank])}"
                )
        return None

    # One trial

    def _measured(self, plan: Plan, ran: _Ran) -> Plan:
        mine = with_measured(plan, *ran).to_json() if self._world.rank == 0 else ""
        return Plan.from_json(self._collectives.gather(mine, what="comparing plans")[0])

    def _try(self, plan: Plan, given: Given, *, seconds: float, settles: bool) -> _Ran | str:
        found: _Ran | str = ""
        failed: Exception | None = None
        with self._as_found():
            copied, why = self._copied()
            whys = self._collectives.gather(why, what="copying the model for a trial")
            for rank, each in enumerate(whys):
                if each is not None:
                    return f"on rank {rank} {each}"
            assert copied is not None
            guard = make_guard(self._world)
            try:
                found = self._carry_out(plan, given, copied, guard, seconds=seconds, settles=settles)
            except Exception as error:
                guard.fail(error)
                failed = error
            except BaseException as error:
                guard.fail(error)
                raise
            del copied
        reason = self._agree(failed)
        if failed is not None:
            failed.__traceback__ = None  # holds the copy
        failed = None
        gc.collect()  # a pipeline's parts know each other
        return reason or found

    def _agree(self, failed: Exception | None) -> str:
        """ "" if the trial succeeded on all ranks, a reason if memory failed; else raises the error."""
        kind = "" if failed is None else _kind(failed)
        story = "" if failed is None else str(failed) or type(failed).__name__
        try:
            answers = self._collectives.gather((kind, story), what="ending a trial")
        except PipelineError:
            if failed is None:
                raise
            raise failed from None  # a rank that does not answer raises its own error
        told = [(_KINDS.index(kind), rank, story) for rank, (kind, story) in enumerate(answers) if kind]
        if not told:
            return ""
        first, rank, story = min(told)
        if _KINDS[first] != "memory":
            if failed is None:
                raise PipelineError(f"a trial of a plan failed on rank {rank}: {story}", peers=(rank,))
            failed.add_note("in a trial of a plan: trials=0 leaves them out")
            raise failed
        return f"out of memory on rank {rank}: {story}"

    @contextmanager
    def _as_found(self) -> Iterator[None]:
        """Context in which user code may run; afterwards gradients, generators and what it reaches are restored."""
        options, hook = self._options, sys.excepthook
        kept = StateSnapshot([self._model, *options.user_code], device=options.device)
        gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None  # a loss may compute with the user's own parameters
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            kept.restore()
            sys.excepthook = hook

    def _copied(self) -> tuple[Options | None, str | None]:
        options = self._options
        copies: dict[int, Any] = {}  # by id of what was copied
        originals = {"the model": self._model, "loss_fn": options.loss_fn, "grad_scaler": options.grad_scaler}
        copied: list[Any] = []
        for name, original in originals.items():
            try:
                copied.append(copy.deepcopy(original, copies))
            except Exception as error:
                return None, f"{name} cannot be copied: {type(error).__name__}: {error}"
        model, loss, scaler = copied
        if Copies(self._model).shared(model, loss) is not None:
            return None, "loss_fn, or a hook, computes with parameters of the model itself, not of a copy"
        for parameter in model.parameters():
            parameter.grad = None
        owners = [each for each in (self._model, options.loss_fn) if isinstance(each, nn.Module)]
        own = {id(copies[id(p)]): p for owner in owners for p in owner.parameters() if id(p) in copies}
        optimizer = None if options.optimizer is None else named(partial(self._optimizers, own))
        mesh = replace(options.mesh, compress=None)
        alone = replace(options, model=model, lr_scheduler=None, on_step=None, mesh=mesh)
        return replace(alone, loss_fn=loss, optimizer=optimizer, grad_scaler=scaler), None

    def _optimizers(self, own: Mapping[int, nn.Parameter], parameters: NamedParameters) -> list[torch.optim.Optimizer]:
        """The user's, which take their time and change nothing; `own` has the run's parameter by id of a copy."""
        assert self._options.optimizer is not None
        called = [(name, own.get(id(each), each), each) for name, each in parameters]
        optimizers = make_optimizers_of_copies(self._options.optimizer, called, where="a stage")
        for group in (group for each in optimizers for group in each.param_groups):
            if "lr" in group:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate := group["lr"], torch.Tensor) else 0.0
        return optimizers

    def _carry_out(
        self, plan: Plan, given: Given, options: Options, guard: Guard, *, seconds: float, settles: bool
    ) -> _Ran:
        """`settles`: whether as many seconds pass before, since the first steps after a search are slow for a while."""
        layout = layout_of_plan(plan, self._world, num_microbatches=None)
        guard.set_place(layout.place)
        first = given.on(options.device).cut(layout.schedule.num_microbatches)[0]
        with guard.together():
            pipeline = build(Run(layout, options, guard), lambda: first.arguments)
        try:
            step = self._step_of(pipeline, given)
            once = step()().batch_seconds  # the same on every rank, and so is the number of steps
            for _ in range(min(_MOST, int(settles * seconds / max(once, 1e-9)))):
                once = step()().batch_seconds
            left = seconds - once
            for _ in range(_WARM_UP - 1 if left > 2 * _WARM_UP * once else 0):
                once = step()().batch_seconds
                left -= once
            number = max(1, min(_MOST, int(left / max(once, 1e-9))))
            pipeline.measurement.forget()
            timelines = [step() for _ in range(number)]
            return [timeline() for timeline in timelines], pipeline.measurement.costs()
        finally:
            pipeline.training.close(options.timeout)

    def _step_of(self, pipeline: Pipeline, given: Given) -> Callable[[], Callable[[], Timeline]]:
        """A step of a pipeline; it returns a function that gives its timeline."""
        training = pipeline.training
        if self._options.optimizer is not None:
            return lambda: training.step(given.copied(), is_reported=False).timeline

        def accumulated() -> Callable[[], Timeline]:
            result = training.accumulate(given.copied())
            for _, parameter in pipeline.state.ownership.named_parameters():
                parameter.grad = None
            return result.timeline

        return accumulated


def _seconds(tried: tuple[Plan, Plan]) -> float:
    assert tried[1].tried_seconds is not None
    return tried[1].tried_seconds


def _kind(error: BaseException) -> str:
    """ "memory", "lost" for an error that only reports another rank's, or "own"."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: " in text:
            return "memory"
        seen = seen.__cause__
    return "lost" if isinstance(error, PipelineError) else "own"


def _label(plan: Plan) -> str:
    chosen = (note.removeprefix(CHOSEN) for note in plan.notes if note.startswith(CHOSEN))
    return next(chosen, f"{plan.schedule}, {describe(plan)}, {count(plan.num_microbatches or 0, 'microbatch')}")


def _noted(plan: Plan, *notes: str) -> Plan:
    return replace(plan, notes=(*plan.notes, *notes))

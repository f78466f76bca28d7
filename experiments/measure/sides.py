"""The two sides: one batch through this runtime, and through torch.distributed.pipelining.

A step of each side consists of the user's calls: cut the batch, forwards, backwards, gradients of the mean loss, the
optimizer's step if the workload has an optimizer, and zero_grad. One difference: this runtime also sends the loss to
every rank and checks that it is finite; torch's last rank reads its own losses, and its other ranks have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from ...pipe import PipelineModule
from ...pipe.results import StepResult
from ...schedules import Schedule, Timeline, build
from .models import Problem, StagesProblem, WholeProblem, Workload, drop_gradients
from .timing import timed

TIMEOUT = 120.0  # of a whole model's runs [s]
WARM_UP_STEPS = 2


class Side(Protocol):
    loss: float | None  # of the last step; None on ranks without it

    def step(self) -> object:
        """One batch, to its end on this rank."""


class OurSide:
    """A PipelineModule over the processes of this job, and its batch."""

    def __init__(self, pipe: PipelineModule, problem: Problem) -> None:
        self.pipe = pipe
        self.loss: float | None = None
        self.result: StepResult | None = None
        self._batch = (problem.inputs, problem.target)
        self._has_optimizer = problem.optimizer is not None
        self._parameters = pipe.parameters()

    @classmethod
    def of_stages(cls, workload: Workload, problem: StagesProblem) -> OurSide:
        schedule = build(
            workload.schedule,
            num_ranks=workload.num_ranks,
            num_microbatches=workload.num_microbatches,
            num_chunks=workload.num_chunks,
            **({"warmup": workload.warmup} if workload.schedule == "2bw" else {}),
        )
        return cls.of_schedule(schedule, problem)

    @classmethod
    def of_schedule(cls, schedule: Schedule, problem: StagesProblem) -> OurSide:
        return cls(_pipe(problem, problem.stages, schedule=schedule), problem)

    @classmethod
    def of_model(cls, problem: WholeProblem, **cut: Any) -> OurSide:
        """A whole model, cut by a plan or by a schedule with split points, as arguments of PipelineModule."""
        return cls(_pipe(problem, problem.make_model(), timeout=TIMEOUT, **cut), problem)

    @property
    def timeline(self) -> Timeline:
        assert self.result is not None
        return self.result.timeline()

    def step(self) -> StepResult:
        if self._has_optimizer:
            self.result = self.pipe.train_step(*self._batch)
        else:
            self.result = self.pipe.forward_backward(*self._batch)
            drop_gradients(self._parameters)
        self.loss = self.result.loss
        return self.result


def _pipe(problem: Problem, model: nn.Module | Sequence[nn.Module], **options: Any) -> PipelineModule:
    return PipelineModule(
        model,
        **options,
        loss_fn=problem.loss_fn,
        optimizer=problem.optimizer,
        example_inputs=(problem.inputs,),
        verify=False,
    )


class TorchSide:
    """torch.distributed.pipelining over the same processes and the default process group."""

    def __init__(self, workload: Workload, problem: StagesProblem) -> None:
        self.loss: float | None = None
        rank, S = dist.get_rank(), workload.num_stages
        mine = range(rank, S, workload.num_ranks) if workload.schedule != "zb-v" else (rank, S - 1 - rank)
        device = torch.device("cpu")
        self.stages = [PipelineStage(problem.stages[s], s, S, device) for s in mine]
        self._schedule = self._make_schedule(workload, problem)
        self._inputs = (problem.inputs,) if rank == 0 else ()
        self._target = problem.target if S - 1 in mine else None
        self._parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self._optimizers = (
            []
            if problem.optimizer is None
            else [problem.optimizer(list(stage.submod.parameters())) for stage in self.stages]
        )

    def _make_schedule(self, workload: Workload, problem: StagesProblem):  # type: ignore[no-untyped-def]
        M, loss_fn = workload.num_microbatches, problem.loss_fn
        looped = {
            "interleaved": ScheduleInterleaved1F1B,
            "interleaved-zb": ScheduleInterleavedZeroBubble,
            "zb-v": ScheduleZBVZeroBubble,
        }
        if workload.schedule in looped:
            return looped[workload.schedule](self.stages, M, loss_fn=loss_fn)  # type: ignore[arg-type]
        single = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[workload.schedule]
        return single(self.stages[0], M, loss_fn=loss_fn)

    def step(self) -> None:
        losses: list[torch.Tensor] = []
        # return_outputs=False: else it would keep and join the outputs, which are not used here
        self._schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)
        if losses:
            self.loss = float(torch.stack(losses).detach().mean())
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not self._optimizers:
            drop_gradients(self._parameters)

    @property
    def receive_bytes(self) -> int:
        infos = [
            info
            for stage in self.stages
            for table in (stage.args_recv_info, stage.grad_recv_info)
            for row in table.values()
            for info in row
        ]
        buffers = [info.buffer for info in infos if not info.is_root_arg and info.buffer is not None]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


class DataParallelSide:
    """torch's DistributedDataParallel: a rank's share of the batch at once, all-reduces during the backward."""

    def __init__(self, problem: WholeProblem) -> None:
        self.loss: float | None = None
        self._model, self._loss_fn = DistributedDataParallel(problem.make_model()), problem.loss_fn
        rank, size = dist.get_rank(), dist.get_world_size()
        self._input, self._target = (each.tensor_split(size)[rank] for each in (problem.inputs, problem.target))
        assert problem.optimizer is not None
        self._optimizer = problem.optimizer(self._model.parameters())

    def step(self) -> None:
        loss = self._loss_fn(self._model(self._input), self._target)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = float(loss.detach())


def warm_up(name: str, sides: Mapping[str, Side]) -> None:
    """First steps (torch infers its shapes in one). Raises RuntimeError if the sides have different losses."""
    for _ in range(WARM_UP_STEPS):
        for side in sides.values():
            timed(side.step)
        known = {who: side.loss for who, side in sides.items() if side.loss is not None}
        if known and max(known.values()) - min(known.values()) > 1e-4 * max(1.0, *map(abs, known.values())):
            raise RuntimeError(f"{name}: the losses differ, so the sides do not do the same work: {known}")

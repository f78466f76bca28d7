"""The stages that are run: tiny ones, sleeping ones and the GPT's. Both sides run equal modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training.corpus import loss_fn
from ..training.gpt import GPTConfig, gpt_stages
from .workloads import ModelKind, Workload

TINY_WIDTH = 8
SPIN = 0.2e-3  # [s] the end of a sleep, which a sleep alone would miss by the timer's slack
GPT_SIZE = GPTConfig(layers=8, width=256, length=128)
GPT_MICROBATCH = 4  # sequences

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A batch and how it is trained on.

    Arguments:
        inputs, target: one whole batch.
        loss_fn: (output, target) -> mean.
        optimizer: parameters -> optimizer; None: a step ends with the last backward.
    """

    inputs: Tensor
    target: Tensor
    loss_fn: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesProblem(Problem):
    """A model in stages.

    Arguments:
        stages: [S] modules, freshly made, the same in every process and on both sides.
        boundary: a tensor as it crosses from stage to stage.
    """

    stages: list[nn.Module]
    boundary: Tensor


def make_problem(workload: Workload) -> StagesProblem:
    """Stages and batch of a workload, from a fixed seed."""
    generator = torch.Generator().manual_seed(_SEED)
    torch.manual_seed(_SEED)
    M, S = workload.num_microbatches, workload.num_stages
    if workload.model is ModelKind.GPT:
        shape = (M * GPT_MICROBATCH, GPT_SIZE.length)
        return StagesProblem(
            stages=list(gpt_stages(GPT_SIZE, S)),
            inputs=torch.randint(GPT_SIZE.vocabulary, shape, generator=generator),
            target=torch.randint(GPT_SIZE.vocabulary, shape, generator=generator),
            loss_fn=loss_fn,
            optimizer=adamw,
            boundary=torch.zeros(GPT_MICROBATCH, GPT_SIZE.length, GPT_SIZE.width),
        )
    stages: list[nn.Module] = [
        nn.Linear(TINY_WIDTH, TINY_WIDTH)
        if workload.model is ModelKind.TINY
        else SleepingStage(workload.forward, workload.backward)
        for _ in range(S)
    ]
    return StagesProblem(
        stages=stages,
        inputs=torch.randn(M, TINY_WIDTH, generator=generator),
        target=torch.randn(M, TINY_WIDTH, generator=generator),
        loss_fn=F.mse_loss,
        # An asynchronous schedule updates inside the pipeline: with as little as there is.
        optimizer=(lambda parameters: torch.optim.SGD(parameters, lr=1e-6)) if workload.schedule == "2bw" else None,
        boundary=torch.zeros(1, TINY_WIDTH),
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every workload that has a real one."""
    return torch.optim.AdamW(parameters, lr=3e-4)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set all gradients to None, as zero_grad does."""
    for parameter in parameters:
        parameter.grad = None


def sleep_until(moment: float) -> None:
    """Return at `moment` of time.perf_counter: sleep, then spin the last 0.2 ms."""
    left = moment - time.perf_counter() - SPIN
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < moment:
        pass


class SleepingStage(nn.Module):
    """x * weight, [B, D] -> [B, D], ready `forward` [s] after its start; the backward likewise.

    A stand-in for a stage on a device of its own: any number of them run at once on a few cores.
    """

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(TINY_WIDTH))
        self._durations = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        end = time.perf_counter() + self._durations[0]
        out: Tensor = _Sleep.apply(x, self.weight, end, self._durations[1])  # type: ignore[no-untyped-call]
        return out


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, end: float, backward: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.duration = backward
        out = x * weight
        sleep_until(end)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        end = time.perf_counter() + ctx.duration
        x, weight = ctx.saved_tensors
        grad_x = gradient * weight if ctx.needs_input_grad[0] else None
        grad_weight = (gradient * x).sum(0)
        sleep_until(end)
        return grad_x, grad_weight, None, None

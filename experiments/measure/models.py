"""Models for measurements, each made from one seed: tiny, sleeping or GPT stages, and whole models.

A workload is one model in stages under one schedule. Both sides of a comparison run equal modules.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cli.train.corpus import loss_fn
from ...cli.train.gpt import GPT, GPTConfig, gpt_stages
from ..jobs.case import Case

TINY_WIDTH = 8
SPIN = 0.2e-3  # [s] of busy waiting at the end of a sleep, because of the timer's slack
GPT_SIZE = GPTConfig(layers=8, width=256, length=128)
GPT_MICROBATCH = 4  # sequences
IMAGE_CLASSES = 10

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model under one schedule."""

    # "tiny": a linear layer of width 8, almost no compute; "sleep": P can exceed the number of cores; "gpt": the
    # example GPT, with its optimizer
    model: str
    schedule: str
    num_ranks: int  # P; every rank is a process with one thread
    num_microbatches: int  # M
    num_chunks: int = 1  # V
    forward: float = 0.0  # of one stage action, if the stages sleep [s]
    backward: float = 0.0  # likewise
    warmup: str = "plain"  # of 2bw

    @classmethod
    def of(cls, case: Case, **others: Any) -> Workload:
        """The workload of a case; a rank's `seconds` of a forward are divided among its chunks."""
        chunks, seconds = case.count("chunks", 1), case.number("seconds", 0.0)
        values: dict[str, Any] = {
            "model": case.text("model"),
            "schedule": case.get("schedule"),
            "num_ranks": case.count("ranks"),
            "num_microbatches": case.count("microbatches"),
            "num_chunks": chunks,
            "forward": seconds / chunks,
            "backward": 2 * seconds / chunks,
        }
        return cls(**{**values, **others})

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @property
    def ideal_makespan(self) -> float:
        """(M*V + P - 1)(F + B): free messages, equal stages, 1F1B or interleaved with P dividing M [s]."""
        actions = self.num_microbatches * self.num_chunks + self.num_ranks - 1
        return actions * (self.forward + self.backward)

    def __str__(self) -> str:
        chunks = f" V={self.num_chunks}" if self.num_chunks > 1 else ""
        return f"{self.schedule} P={self.num_ranks}{chunks} M={self.num_microbatches}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A batch with its loss and optimizer."""

    inputs: Tensor  # one whole batch
    target: Tensor  # likewise
    loss_fn: Callable[[Any, Any], Tensor]  # (output, target) -> mean
    # parameters -> optimizer; None: a step ends with the last backward
    optimizer: Callable[[Any], torch.optim.Optimizer] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesProblem(Problem):
    """A model in [S] new stages, the same in every process and on both sides; `boundary`: a tensor like those sent."""

    stages: list[nn.Module]
    boundary: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeProblem(Problem):
    """A whole model; `make_model` makes it with the same weights each time."""

    make_model: Callable[[], nn.Module]


def make_problem(workload: Workload) -> StagesProblem:
    generator = torch.Generator().manual_seed(_SEED)
    torch.manual_seed(_SEED)
    M, S = workload.num_microbatches, workload.num_stages
    if workload.model == "gpt":
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
        if workload.model == "tiny"
        else SleepingStage(workload.forward, workload.backward)
        for _ in range(S)
    ]
    return StagesProblem(
        stages=stages,
        inputs=torch.randn(M, TINY_WIDTH, generator=generator),
        target=torch.randn(M, TINY_WIDTH, generator=generator),
        loss_fn=F.mse_loss,
        # An asynchronous schedule updates inside the pipeline, here with the cheapest optimizer.
        optimizer=(lambda parameters: torch.optim.SGD(parameters, lr=1e-6)) if workload.schedule == "2bw" else None,
        boundary=torch.zeros(1, TINY_WIDTH),
    )


def sleeping_layers(count: int, num_microbatches: int) -> WholeProblem:
    """Layers that sleep for a fixed time of 2 to 10 ms each; a backward takes twice as long."""
    draw = random.Random(_SEED)
    seconds = [round(draw.uniform(0.002, 0.010), 5) for _ in range(count)]
    generator = torch.Generator().manual_seed(_SEED)
    return WholeProblem(
        make_model=lambda: nn.Sequential(*[SleepingStage(forward, 2 * forward) for forward in seconds]),
        inputs=torch.randn(num_microbatches, TINY_WIDTH, generator=generator),
        target=torch.randn(num_microbatches, TINY_WIDTH, generator=generator),
        loss_fn=F.mse_loss,
        optimizer=None,
    )


def image_problem(size: int, *, batch: int) -> WholeProblem:
    generator = torch.Generator().manual_seed(_SEED)
    return WholeProblem(
        make_model=lambda: seeded(lambda: convolutions(size)),
        inputs=torch.randn(batch, 3, size, size, generator=generator),
        target=torch.randint(IMAGE_CLASSES, (batch,), generator=generator),
        loss_fn=F.cross_entropy,
        optimizer=adamw,
    )


def gpt_problem(size: GPTConfig, *, batch: int) -> WholeProblem:
    generator = torch.Generator().manual_seed(_SEED)
    shape = (batch, size.length)
    return WholeProblem(
        make_model=lambda: seeded(lambda: GPT(size)),
        inputs=torch.randint(size.vocabulary, shape, generator=generator),
        target=torch.randint(size.vocabulary, shape, generator=generator),
        loss_fn=loss_fn,
        optimizer=adamw,
    )


def convolutions(size: int) -> nn.Sequential:
    """Ten layers for images [B, 3, size, size], size a multiple of 16.

    Six convolutions, the first two over all pixels: most of the work, 1% of the parameters. Four linear layers: the
    parameters.
    """
    widths = (3, 24, 24, 32, 32, 48, 48)
    strides = (1, 1, 2, 2, 2, 2)
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=stride, padding=1), nn.ReLU())
        for a, b, stride in zip(widths[:-1], widths[1:], strides, strict=True)
    ]
    wide = 1024
    flat = widths[-1] * (size // 16) ** 2
    layers += [
        nn.Sequential(nn.Flatten(), nn.Linear(flat, wide), nn.ReLU()),
        nn.Sequential(nn.Linear(wide, wide), nn.ReLU()),
        nn.Sequential(nn.Linear(wide, wide), nn.ReLU()),
        nn.Linear(wide, IMAGE_CLASSES),
    ]
    return nn.Sequential(*layers)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(_SEED)
    return make()


def adamw(parameters: Any) -> torch.optim.Optimizer:
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
    """x * weight, [B, D] -> [B, D], which takes `forward` [s], and `backward` [s] likewise.

    Emulates a stage on its own device: any number of them run at once on a few cores.
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

"""The models that a plan or a cut divides: whole, freshly made from one seed, the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..training.corpus import loss_fn
from ..training.gpt import GPT, GPTConfig
from .models import GPT_MICROBATCH, GPT_SIZE, TINY_WIDTH, Problem, SleepingStage, adamw
from .plan_workloads import ContestModel, CutContest, PlannedModel, PlannedRun

IMAGE_CLASSES = 10

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeProblem(Problem):
    """A model in one piece; `make_model` gives the same weights each time."""

    make_model: Callable[[], nn.Module]


def planned_problem(run: PlannedRun) -> WholeProblem:
    """The problem of a planned run."""
    if run.model is PlannedModel.GPT:
        size = GPTConfig(layers=run.num_layers, width=GPT_SIZE.width, length=GPT_SIZE.length)
        return gpt_problem(size, batch=run.num_microbatches * GPT_MICROBATCH)
    generator = torch.Generator().manual_seed(_SEED)
    return WholeProblem(
        make_model=lambda: nn.Sequential(*[SleepingStage(forward, 2 * forward) for forward in run.forward_seconds]),
        inputs=torch.randn(run.num_microbatches, TINY_WIDTH, generator=generator),
        target=torch.randn(run.num_microbatches, TINY_WIDTH, generator=generator),
        loss_fn=F.mse_loss,
        optimizer=None,
    )


def contest_problem(contest: CutContest) -> WholeProblem:
    """The problem of a contest."""
    batch = contest.num_microbatches * contest.microbatch_size
    if contest.model is ContestModel.HEAD:
        return gpt_problem(GPTConfig(vocabulary=8192, width=256, layers=6, length=contest.size), batch=batch)
    generator = torch.Generator().manual_seed(_SEED)
    return WholeProblem(
        make_model=lambda: _seeded(lambda: convolutions(contest.size)),
        inputs=torch.randn(batch, 3, contest.size, contest.size, generator=generator),
        target=torch.randint(IMAGE_CLASSES, (batch,), generator=generator),
        loss_fn=F.cross_entropy,
        optimizer=adamw,
    )


def gpt_problem(size: GPTConfig, *, batch: int) -> WholeProblem:
    """A GPT on random tokens [batch, length]."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = (batch, size.length)
    return WholeProblem(
        make_model=lambda: _seeded(lambda: GPT(size)),
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


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(_SEED)
    return make()

"""Training recipe of the GPT: its weights, AdamW, the learning rate, and the pipeline around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...partition.plans.plan import Plan
from ...pipe import PipelineModule
from ...schedules import Schedule
from ..host import physical_bytes
from .corpus import loss_fn
from .gpt import GPT
from .options import DEFAULT_MICROBATCHES, TrainOptions, model_config

WARMUP = 0.1  # of the steps
FINAL_RATE = 0.05  # of the peak learning rate
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0


def make_pipe(
    options: TrainOptions, what: Schedule | Plan | None, model: nn.Module, tokens: torch.Tensor
) -> PipelineModule:
    """The pipeline that the options describe; tokens: one batch [B, T]."""
    choice: dict[str, Any]
    if isinstance(what, Plan):
        choice = {"plan": what, "num_microbatches": DEFAULT_MICROBATCHES if what.num_microbatches is None else None}
    elif what is None:
        mesh = {"pipe": options.ranks} if options.ranks else None
        choice = {"schedule": "auto", "mesh": mesh, "num_microbatches": options.microbatches}
    else:
        choice = {"schedule": what, "mesh": {"pipe": what.num_ranks}, "recompute": options.recompute}
    return PipelineModule(
        model,
        **choice,
        loss_fn=loss_fn,
        optimizer=lambda parameters: make_optimizer(parameters, lr=options.lr),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, learning_rate_curve(options.steps)),
        max_grad_norm=MAX_GRAD_NORM,
        example_inputs=(tokens,),
        verify=options.verify and may_verify(model),
        seed=options.seed,
        timeout=options.timeout,
    )


def may_verify(model: nn.Module) -> bool:
    """Whether a plain copy with its gradients takes little of the machine's memory."""
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters()) < physical_bytes() / 8


def make_model(options: TrainOptions) -> GPT:
    """The same weights on each rank, from the seed."""
    torch.manual_seed(options.seed)
    return GPT(model_config(options))


def make_optimizer(parameters: Iterable[nn.Parameter], *, lr: float, beta1: float = 0.9) -> Optimizer:
    """AdamW; decay pulls at matrices only (biases and norms have no scale to lose)."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=lr, betas=(beta1, 0.95))


def learning_rate_curve(steps: int, *, warmup_part: float = WARMUP) -> Callable[[int], float]:
    """Fraction of the peak rate at each step: a straight line up, then half a cosine down to FINAL_RATE."""
    warmup = max(1, round(warmup_part * steps)) if warmup_part else 0

    def fraction(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))

    return fraction

"""Recipe of the GPT: AdamW; and of every run: the learning rate's curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import AdamW, Optimizer

WARMUP = 0.1  # of the steps
FINAL_RATE = 0.05  # of the peak learning rate
WEIGHT_DECAY = 0.1


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

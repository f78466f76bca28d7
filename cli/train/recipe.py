"""Optimizers of the GPT, AdamW alone or with Muon, and the learning rate's curve of every run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import nn
from torch.optim import AdamW, Muon, NAdam, Optimizer

from ...partition.profiler.optimizers import NamedFactory, NamedParameters, named

WARMUP = 0.1  # of the steps
FINAL_RATE = 0.05  # of the peak learning rate
WEIGHT_DECAY = 0.1
BETA2 = 0.95
MOMENTUM = 0.95  # of Muon
NESTEROV = 0.99  # of NAdam
_SETTLED = 1e3  # decay of torch's warm-up of NAdam's momentum, which so ends after one step
ENDS = 1.0  # AdamW's rate over Muon's, if both are used


def make_optimizer(
    name: str = "adamw",
    *,
    lr: float,
    beta1: float = 0.9,
    momentum: float = MOMENTUM,
    ends: float = ENDS,
) -> NamedFactory:
    """Optimizers of a stage of the GPT, for `PipelineModule(optimizer=)`.

    adamw: for all parameters. nadam: the same with Nesterov's momentum (arXiv 2505.01099). muon: Muon for the matrices
    of the blocks, AdamW for the others: embedding, positions, head, norms and biases. Both use one rate: torch's
    "match_rms_adamw" gives Muon's step the length of AdamW's, 0.2 of the rate in the root mean square, for any shape of
    the matrix. The fused matrix of queries, keys and values is one parameter, which torch.optim.Muon cannot split.

    Only matrices have weight decay. Raises ValueError for another name.
    """
    if name not in ("adamw", "nadam", "muon"):
        raise ValueError(f"optimizer {name!r}: expected adamw, nadam or muon")

    rate = ends * lr if name == "muon" else lr

    def make(parameters: NamedParameters) -> list[Optimizer | None]:
        inner, others = split(parameters) if name == "muon" else ([], [p for _, p in parameters])
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        adam: Callable[..., Optimizer] = AdamW
        if name == "nadam":
            adam = partial(NAdam, momentum_decay=_SETTLED, decoupled_weight_decay=True)
        muon = partial(Muon, lr=lr, momentum=momentum, weight_decay=WEIGHT_DECAY)
        return [
            muon(inner, adjust_lr_fn="match_rms_adamw") if inner else None,
            adam(groups, lr=rate, betas=(beta1, BETA2)) if groups else None,
        ]

    return named(make)


def split(parameters: NamedParameters) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks, which Muon orthogonalises; other parameters)."""
    inner = [name.startswith("blocks.") and parameter.ndim == 2 for name, parameter in parameters]
    matrices = [p for (_, p), is_inner in zip(parameters, inner, strict=True) if is_inner]
    return matrices, [p for (_, p), is_inner in zip(parameters, inner, strict=True) if not is_inner]


def learning_rate_curve(steps: int, *, warmup_part: float = WARMUP) -> Callable[[int], float]:
    """Fraction of the peak rate at each step: a straight line up, then half a cosine down to FINAL_RATE."""
    warmup = max(1, round(warmup_part * steps)) if warmup_part else 0

    def fraction(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))

    return fraction

"""Training in one plain process: what a pipeline is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class Alone(NamedTuple):
    """losses: of all steps; norms: before clipping; state: behind them."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def train_alone(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    optimizer: Callable[[Any], Any],
    *,
    loss_fn: Callable[..., Any] = F.mse_loss,
    parts: int = 1,
    delay: int = 0,
    clip: float = float("inf"),
) -> Alone:
    """A step a batch, of equal parts; each gradient is taken at the weights of `delay` steps before."""
    trained = [p for p in model.parameters() if p.requires_grad]
    steps, versions = optimizer(trained), list[nn.Module]()
    losses, norms = [], []
    for t, (x, y) in enumerate(batches):
        versions += [copy.deepcopy(model)] if delay else []
        used = versions[max(t - delay, 0)] if delay else model
        used.zero_grad()
        losses.append(0.0)
        for mine, target in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            loss = loss_fn(used(mine.clone()), target)
            loss = (loss[0] / loss[1] if isinstance(loss, tuple) else loss) / parts
            loss.backward()
            losses[-1] += loss.item()
        for parameter, leaf in zip(model.parameters(), used.parameters(), strict=True):
            parameter.grad = leaf.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip)))
        steps.step()
    return Alone(losses, norms, model.state_dict())

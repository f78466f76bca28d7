"""Where a model that returns its own loss has put it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

MODEL = "model"  # loss_fn="model"


def own_loss(output: object) -> object:
    """The loss in a model's output; ValueError where there is none. It is the output itself, a tensor without
    dimensions; its `loss`, as an attribute or a key; or the first of a tuple or list."""
    loss: object = None
    if isinstance(output, torch.Tensor):
        loss = output
    elif isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif getattr(output, "loss", None) is not None:
        loss = output.loss  # type: ignore[attr-defined]
    elif isinstance(output, tuple | list) and output:
        loss = output[0]
    if loss is None:
        raise ValueError(
            f'loss_fn="model", and the model returned {type(output).__name__} without a loss: expected a scalar tensor '
            f"as its `loss`, as the first of a tuple, or alone; give what it needs for one (labels=...), or "
            f"loss_fn=lambda output, target: ..."
        )
    return loss


def mean_of_model(output: object, target: object = None) -> torch.Tensor:
    loss = own_loss(output)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f'loss_fn="model", and in the place of its loss the model returned {shown}: expected a scalar tensor; '
            f"give what it needs for one (labels=...), or loss_fn=lambda output, target: ..."
        )
    return loss

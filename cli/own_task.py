"""The user's own model, data, loss and optimizer, as the commands use them.

    --model m:f      f() -> nn.Module, called once in each process, with the same seed
    --data m:f       f() or f(batch_size=B) -> Dataset of samples          sampled, reshuffled each epoch
                                            -> iterable of batches         iterated once per epoch
                                            (for an iterator that has ended, f is called again)
                                            a batch: (inputs..., target), or a dict of keywords
    --loss m:f       f(output, target) -> scalar mean, or (sum, count); a Module class is made first; "model": its own
    --optimizer m:f  f(parameters) or f(parameters, lr=...) -> Optimizer

The batches of a run, epoch after epoch: `own_batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils import _pytree as pytree

from ..partition.model.batch_dims import TARGET
from ..pipe.batch.loader import seed_generators
from ..schedules.custom.user_code import call, load, takes
from .options import OwnOptions

DEFAULT_BATCH = 16
IGNORED = -100  # a target without loss, as in torch's cross-entropy
OWN_LOSS = "model"  # the model returns it
Loss = Callable[[Any, Any], Any] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arguments of one `train_step`: (inputs..., target), or keywords."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """N, the first tensor's size in dimension 0."""
        first = next(x for x in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Tensor) and x.dim())
        return int(first.shape[0])

    def head(self, num_samples: int) -> Batch:
        """The first samples, along dimension 0 of every tensor."""
        return self.map(lambda x: x[:num_samples] if x.dim() else x)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            args=pytree.tree_map_only(Tensor, change, self.args),
            kwargs=pytree.tree_map_only(Tensor, change, dict(self.kwargs)),
        )

    def parted(self, loss: Loss) -> tuple[tuple[Any, ...] | dict[str, Any], Any]:
        """The model's arguments, as example_inputs= takes them, and the loss's target."""
        if self.kwargs:
            return {name: its for name, its in self.kwargs.items() if name != TARGET}, self.kwargs.get(TARGET)
        return (self.args, None) if loss == OWN_LOSS else (self.args[:-1], self.args[-1])


def make_model(options: OwnOptions, *, seed: int) -> nn.Module:
    """The user's model. Raises ValueError for a result of another type."""
    value = str(options.model)
    function = load("model", value)
    seed_generators(seed)
    model = call("model", value, function)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--model {value} returned {type(model).__name__}: expected a torch.nn.Module; write `return model` at its "
            f"end"
        )
    return model


def make_loss(options: OwnOptions, batch: Batch) -> Loss:
    """The user's loss; else the model's own, for keywords without a target; else what the target's type suggests."""
    if options.loss == OWN_LOSS or (options.loss is None and batch.kwargs and TARGET not in batch.kwargs):
        return OWN_LOSS
    if options.loss is None:
        return default_loss
    loss = load("loss", options.loss)
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        module: nn.Module = call("loss", options.loss, loss)
        return module
    return loss


def describe_loss(options: OwnOptions, batch: Batch) -> str:
    loss = make_loss(options, batch)
    if loss == OWN_LOSS:
        return "the model's own"
    target = batch.parted(loss)[1]
    whole = isinstance(target, Tensor) and not target.is_floating_point()
    return options.loss or ("cross-entropy" if whole else "mean squared error")


def make_optimizer(options: OwnOptions, parameters: list[nn.Parameter], *, lr: float | None) -> Optimizer:
    """The user's optimizer, or AdamW. Raises ValueError for a result of another type, or an lr it does not take."""
    if options.optimizer is None:
        return AdamW(parameters) if lr is None else AdamW(parameters, lr=lr)
    value = options.optimizer
    function = load("optimizer", value)
    if lr is not None and not takes(function, "lr"):
        raise ValueError(
            f"--lr {lr} with --optimizer {value}, which has no parameter lr: leave --lr away, or write "
            f"`def {value.rpartition(':')[2]}(parameters, lr)`"
        )
    optimizer = call("optimizer", value, function, parameters, **({} if lr is None else {"lr": lr}))
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"--optimizer {value} returned {type(optimizer).__name__}: expected a torch.optim.Optimizer")
    return optimizer


def default_loss(output: Any, target: Any) -> tuple[Tensor, Tensor] | Tensor:
    """Cross-entropy of whole-number targets, as (sum, count of targets other than IGNORED); else mean squared error.

    The classes are the output's dimension that the target lacks: the last one, or the second.

    Raises ValueError for outputs and targets whose shapes don't determine it.
    """
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        kinds = " and ".join(type(each).__name__ for each in (output, target))
        raise ValueError(f"output and target are {kinds}: expected tensors, or --loss package.module:function")
    shapes = f"an output of shape {tuple(output.shape)} and a target of shape {tuple(target.shape)}"
    if target.is_floating_point():
        if output.shape != target.shape:
            raise ValueError(f"{shapes}: expected equal shapes for mean squared error, or --loss")
        return F.mse_loss(output, target)
    last, second = output.shape[:-1] == target.shape, output.shape[:1] + output.shape[2:] == target.shape
    if target.is_complex() or last == (second and output.dim() > 2):
        which = "either may be" if last else "none is"
        raise ValueError(f"{shapes}: {which} the dimension of the classes for cross-entropy: expected --loss")
    if last:
        output, target = output.flatten(0, -2), target.flatten()
    count = (target != IGNORED).sum()
    return F.cross_entropy(output, target.long(), ignore_index=IGNORED, reduction="sum"), count

"""Profiles of the user's own model, in microbatches of the user's own data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..partition import Profile
from ..partition.deferred.recording import as_recipes
from ..pipe.auto.runtime_seconds import clipping, measure_runtime_seconds
from ..pipe.shards.cutting import profile_cut
from ..schedules.wording import count
from . import own_task as own
from .options import OwnOptions
from .own_task import OwnBatches


def profile_own(
    options: OwnOptions,
    sizes: Sequence[int],
    *,
    batch_size: int | None,
    seconds: float,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    has_optimizer: bool = True,
    max_grad_norm: float = 0.0,
    split_backward: bool = True,
    tensor_sizes: Sequence[int] = (1,),
    tensor_parallel: str | dict[str, str] = "auto",
) -> list[Profile]:
    """A profile per microbatch size and tensor size, with progress on standard error.

    Arguments:
        batch_size: as OwnBatches takes it.
        seconds: for all sizes together.
        max_grad_norm: clips gradients before the optimizer's step; 0: no clipping.
        tensor_sizes: numbers of ranks over which matrices are cut, by `tensor_parallel`.
        dtype: of the weights and of floating-point inputs; None: unchanged.

    Raises ValueError for a batch smaller than a microbatch.
    """
    batch = next(OwnBatches(options, batch_size=batch_size, default_size=max(sizes), seed=0))
    if batch.num_samples < max(sizes):
        raise ValueError(
            f"--data {options.data} gives batches of {batch.num_samples}, smaller than one microbatch of {max(sizes)}: "
            f"expected {max(sizes)} samples or more"
        )
    model, loss = own.make_model(options, seed=0), own.make_loss(options, batch)
    with as_recipes(model.parameters()):
        model.to(device, dtype)

    def moved(x: Tensor) -> Tensor:
        return x.to(device, dtype if x.is_floating_point() else None)

    def tell(size: int, tensor: int, text: str) -> None:
        over = f" over {tensor} tensor ranks" if tensor > 1 else ""
        print(f"microbatch of {count(size, 'sample')}{over}: {text}", file=sys.stderr, flush=True)

    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        return own.make_optimizer(options, parameters, lr=None)

    action, around = measure_runtime_seconds(torch.device(device))
    profiles = []
    for tensor, size in product(tensor_sizes, sizes):
        inputs, target = batch.head(size).map(moved).parted(loss)
        found = profile_cut(
            model,
            inputs,
            tensor=tensor,
            tensor_parallel=tensor_parallel,
            target=target,
            loss_fn=loss,
            optimizer=clipping(optimizer, max_grad_norm) if has_optimizer else None,
            autocast=autocast,
            seconds=seconds / len(sizes) / len(tensor_sizes),
            split_backward=split_backward,
            progress=partial(tell, size, tensor),
        )
        found = replace(found, action_seconds=action, around_seconds=around, max_grad_norm=max_grad_norm)
        profiles.append(replace(found, microbatch_size=size))
    return profiles

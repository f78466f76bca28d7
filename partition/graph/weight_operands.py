"""Operands of operations that take a weight, where the backward is split; gradients that come at once or later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

Compute = Callable[..., Sequence[torch.Tensor]]


class Aside(Protocol):
    """A place for what W computes: see `split_backward`."""

    def put(self, weights: Sequence[torch.Tensor], compute: Compute, *tensors: torch.Tensor) -> None: ...


class Split(Protocol):
    """The backward that is split: see `split_backward.SplitBackward`."""

    def put(self, weight: torch.Tensor | None, ctx: Any, number: int) -> Aside | None: ...
    def cast(self, x: torch.Tensor, dtype: torch.dtype, *, tracked: bool) -> torch.Tensor: ...


class Operands(NamedTuple):
    """Operands of one call: casts of the weight and bias, where autocast wants them."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def is_weight(tensor: object) -> bool:
    """Whether it is a tensor whose gradient may be put aside: a leaf that wants one, dense."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.requires_grad
        and tensor.is_leaf
        and tensor.layout == torch.strided
        and not tensor.is_nested
    )


def operands(split: Split, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Operands | None:
    """Operands as autocast casts them; None where types do not fit, or x is left over from a torch.func transform."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        found = Operands(
            split.cast(x, dtype, tracked=True),
            split.cast(weight, dtype, tracked=False),
            None if bias is None else split.cast(bias, dtype, tracked=False),
        )
    else:
        found = Operands(x, weight, bias)
    dtype = found.x.dtype
    if found.weight.dtype != dtype or (found.bias is not None and found.bias.dtype != dtype):
        return None
    fits = x.layout == torch.strided and not x.is_nested and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    return found if fits else None


def recorded(ctx: Any, used: Any) -> Any:
    """The weight that was computed with; where this backward is recorded, so is a cast of it."""
    if used is not None and torch.is_grad_enabled() and used.dtype != ctx.weight.dtype:
        return ctx.weight.to(used.dtype)
    return used


def later_or_now(
    ctx: Any, number: int, weight: torch.Tensor, compute: Compute, *tensors: torch.Tensor
) -> torch.Tensor | None:
    """The gradient of the tensor with this number among the inputs; None: it is put aside."""
    aside = ctx.split.put(weight, ctx, number)
    if aside is None:
        return compute(*tensors)[0]
    aside.put((weight,), compute, *tensors)
    return None

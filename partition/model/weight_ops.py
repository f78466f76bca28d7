"""Operations that take a weight, and what is called in their place where the backward is split.

Each has the forward of the operation and its backward, to the last bit, but gives the gradient of its input at once and
puts that of its weight aside, if `BackwardSplitter.put` says where. None: the operation itself is to be called, since
it takes no weight that is a leaf, or takes it in a way that is not written here.
"""
# ruff: noqa: PLR0917 (the signatures are those of the operations)

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .weight_products import (
    BackwardSplitter,
    Compute,
    Operands,
    addmm,
    baddbmm,
    is_weight,
    later_or_now,
    linear,
    matmul,
    operands,
    recorded,
)

_aten = torch.ops.aten


# Embeddings


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, split: BackwardSplitter, call: Callable[[], torch.Tensor], compute: Compute, indices: Any, weight: Any
    ) -> torch.Tensor:
        ctx.split, ctx.compute, ctx.weight = split, compute, weight
        ctx.save_for_backward(indices)
        return call()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            return None, None, None, None, later_or_now(ctx, 1, ctx.weight, ctx.compute, grad, indices)


def _embedding(
    split: BackwardSplitter,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not is_weight(weight) or weight.dim() != 2:
        return None
    rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx + rows if padding_idx < 0 else padding_idx
    call = partial(F.embedding, input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return _embedded(split, call, (rows, padding, scale_grad_by_freq, sparse), input, weight)


def _aten_embedding(
    split: BackwardSplitter,
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not is_weight(weight):
        return None
    call = partial(torch.embedding, weight, indices, padding_idx, scale_grad_by_freq, sparse)
    return _embedded(split, call, (weight.shape[0], padding_idx, scale_grad_by_freq, sparse), indices, weight)


def _embedded(
    split: BackwardSplitter, call: Callable[[], torch.Tensor], how: Sequence[Any], indices: Any, weight: Any
) -> Any:
    def compute(grad: torch.Tensor, indices: torch.Tensor) -> Sequence[torch.Tensor]:
        return (_aten.embedding_backward(grad, indices, *how),)

    return _Embedding.apply(split, call, compute, indices, weight)  # type: ignore[no-untyped-call]


# Convolutions


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: BackwardSplitter, how: Sequence[Any], given: Operands, *inputs: Any) -> torch.Tensor:
        x, ctx.weight, ctx.bias = inputs
        ctx.split, ctx.how = split, how
        ctx.save_for_backward(x, given.weight)
        return torch.convolution(x, given.weight, given.bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, used = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            return None, None, None, *_of_inputs(ctx, grad, x, recorded(ctx, used))


def _of_inputs(ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Gradients of x, the weight and the bias; None for those that nobody wants, or that are put aside."""
    wants_x, *wants = ctx.needs_input_grad[3:]
    both = [ctx.weight] if ctx.bias is None else [ctx.weight, ctx.bias]
    pairs = zip(both, wants, strict=False)
    asides = [ctx.split.put(each, ctx, i) if wanted else None for i, (each, wanted) in enumerate(pairs, start=1)]
    later = [aside is not None for aside in asides] + [False] * (2 - len(asides))
    sizes = None if ctx.bias is None else list(ctx.bias.shape)
    now = wants_x, wants[0] and not later[0], wants[1] and not later[1]
    found: Any = (None, None, None)
    if any(now):
        found = _aten.convolution_backward(grad, x, weight, sizes, *ctx.how, now)
    if any(later):
        weights = [each for each, is_later in zip((ctx.weight, ctx.bias), later, strict=True) if is_later]
        compute = partial(_of_convolution, weight=weight.detach(), sizes=sizes, how=ctx.how, later=later)
        next(put for put in asides if put is not None)(weights, compute, grad, x)
    return found


def _of_convolution(
    grad: torch.Tensor, x: torch.Tensor, *, weight: Any, sizes: Any, how: Sequence[Any], later: Sequence[bool]
) -> Sequence[torch.Tensor]:
    found = _aten.convolution_backward(grad, x, weight, sizes, *how, (False, *later))[1:]
    return [each for each, is_later in zip(found, later, strict=True) if is_later]


def _convolution(split: BackwardSplitter, *, input: Any, weight: Any, bias: Any, padding: Any, **how: Any) -> Any:
    if not is_weight(weight) or input.dim() != weight.dim() or (isinstance(padding, str) and padding != "valid"):
        return None
    given = operands(split, input, weight, bias)
    if given is None:
        return None
    pads = 0 if padding == "valid" else padding
    sizes = [_each(value, weight.dim() - 2) for value in (how["stride"], pads, how["dilation"], how["output_padding"])]
    numbers = (*sizes[:3], how["transposed"], sizes[3], how["groups"])
    return _Convolution.apply(split, numbers, given, given.x, weight, bias)  # type: ignore[no-untyped-call]


def _each(value: Any, num: int) -> list[int]:
    found = [value] if isinstance(value, int) else list(value)
    return found * num if len(found) == 1 else found


class Instead:
    """A stand-in for an operation: called with a BackwardSplitter and the operation's arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        _, *parameters = inspect.signature(call).parameters.values()
        self._names = frozenset(each.name for each in parameters)
        self._most = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it takes such arguments; the operation itself may take others, such as out=."""
        return len(args) <= self._most and (not kwargs or kwargs.keys() <= self._names)


_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}


class _Convolve(Instead):
    """The same of a convolution, whose arguments have these names."""

    def __init__(self, names: str, **fixed: bool) -> None:
        self._in_order = tuple(names.split())
        self._names, self._most = frozenset(self._in_order), len(self._in_order)
        self._fixed = _DEFAULTS | fixed

    def call(self, split: BackwardSplitter, *args: Any, **kwargs: Any) -> Any:
        return _convolution(split, **(self._fixed | dict(zip(self._in_order, args, strict=False)) | kwargs))


def _spellings() -> dict[Any, Instead]:
    found: dict[Any, Instead] = {
        F.linear: Instead(linear),
        F.embedding: Instead(_embedding),
        torch.embedding: Instead(_aten_embedding),
        torch.convolution: _Convolve("input weight bias stride padding dilation transposed output_padding groups"),
        torch.Tensor.__matmul__: Instead(matmul),
    }
    products: dict[str, Callable[..., Any]] = {
        "matmul": matmul,
        "mm": matmul,
        "bmm": matmul,
        "addmm": addmm,
        "baddbmm": baddbmm,
    }
    for name, instead in products.items():
        found[getattr(torch, name)] = found[getattr(torch.Tensor, name)] = Instead(instead)
    for dims in (1, 2, 3):
        found[getattr(torch, f"conv{dims}d")] = _Convolve(
            "input weight bias stride padding dilation groups", transposed=False
        )
        found[getattr(torch, f"conv_transpose{dims}d")] = _Convolve(
            "input weight bias stride padding output_padding groups dilation", transposed=True
        )
    return found


INSTEAD = _spellings()

"""The backward in two halves: I, the gradients of inputs, then W, those of weights.

    forward   x ----> [linear] --> [gelu] --> [linear] --> y      linears are called through functions of their own
    I         gx <--- [linear] <-- [gelu] <-- [linear] <-- gy     which give the gradient of x at once,
    W             w1 += gy1' x1                w2 += gy2' x2      and put that of w aside: (x, gy)

What has no such function, such as a norm, makes the gradients of its weights in I. A whole backward through the same
graph makes all of them at once, as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class _Owed:
    """One gradient of a weight that is still to be computed.

    Arguments:
        tensors: that it is made of, with their versions then.
    """

    weight: torch.Tensor
    compute: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    def gradient(self) -> torch.Tensor:
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"one of the variables needed for the gradient of a weight {tuple(self.weight.shape)} has been "
                    f"modified by an inplace operation between I and W: a tensor {tuple(tensor.shape)} is at version "
                    f"{tensor._version}, expected version {version}"
                )
        return self.compute(*self.tensors)


class WeightGradients:
    """The gradients of weights that the backward of one microbatch put aside."""

    def __init__(self) -> None:
        self._owed: dict[int, list[_Owed]] = {}

    def put(self, weight: torch.Tensor, compute: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
        """`compute(*tensors)` is a part of the gradient of `weight`."""
        owed = _Owed(weight, compute, tensors, tuple(tensor._version for tensor in tensors))
        self._owed.setdefault(id(weight), []).append(owed)

    def add(self) -> None:
        """W: to `.grad` of the weights."""
        with torch.no_grad():
            while self._owed:
                parts = self._owed.pop(next(iter(self._owed)))
                gradient = parts[0].gradient()
                for part in parts[1:]:  # as autograd does: the parts of one backward first
                    gradient = gradient + part.gradient()
                _accumulate(parts[0].weight, gradient)


class SplitBackward:
    """Splits the backwards of forwards that run within `forward()`."""

    def __init__(self) -> None:
        self._mode = _Mode(self)
        self.aside: WeightGradients | None = None

    def forward(self) -> TorchFunctionMode:
        """Within: operations are recorded so that their backward can be split."""
        return self._mode

    @contextmanager
    def backward(self, aside: WeightGradients | None) -> Iterator[None]:
        """Within: backwards of such forwards put gradients of weights aside; None: they are whole."""
        before, self.aside = self.aside, aside
        try:
            with self._mode:  # what runs again in the backward runs as it did
                yield
        finally:
            self.aside = before

    def takes(self, weight: torch.Tensor, node: torch.autograd.graph.Node | None) -> bool:
        """Whether the gradient of a weight is put aside now.

        Arguments:
            node: that adds it up.
        """
        if self.aside is None or torch.is_grad_enabled() or node is None:
            return False
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            return False
        try:
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:  # torch.autograd.grad asks for it
            return False


class _Mode(TorchFunctionMode):
    def __init__(self, split: SplitBackward) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        straight = _STRAIGHT.get(func)
        if straight is not None:
            with self:
                return straight(*args, **(kwargs or {}))
        instead = _INSTEAD.get(func)
        if instead is not None and torch.is_grad_enabled():
            result = instead(self._split, *args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


def _without_check(function: Any) -> Any:
    """A function of torch's that runs its body under a mode, and does not hand itself to the mode."""
    never = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **never},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# What they call is seen by the mode, too.
_STRAIGHT = {
    function: _without_check(function)
    for function in (
        torch.autograd.backward,
        torch.autograd.grad,
        torch.Tensor.backward,
        F.multi_head_attention_forward,
    )
}


def _is_weight(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad


def _linear(split: SplitBackward, input: Any, weight: Any, bias: Any = None) -> Any:
    if not _is_weight(weight) or input.dim() < 2 or torch.is_autocast_enabled(input.device.type):
        return None
    return _Linear.apply(split, input, weight, bias)  # type: ignore[no-untyped-call]


_INSTEAD: dict[Any, Callable[..., Any]] = {F.linear: _linear}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: SplitBackward, x: Any, weight: Any, bias: Any) -> Any:
        ctx.split, ctx.weight, ctx.bias = split, weight, bias
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat, x_flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x = of_weight = of_bias = None
        if wants_x:
            of_x = flat.mm(weight.conj()).view(x.shape)
        if wants_weight:
            if ctx.split.takes(ctx.weight, ctx.next_functions[1][0]):
                ctx.split.aside.put(ctx.weight, _product, flat, x_flat)
            else:
                of_weight = _product(flat, x_flat)
        if wants_bias:
            if ctx.split.takes(ctx.bias, ctx.next_functions[2][0]):
                ctx.split.aside.put(ctx.bias, _sum, flat)
            else:
                of_bias = _sum(flat)
        return None, of_x, of_weight, of_bias


def _product(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.t().mm(x.conj())


def _sum(grad: torch.Tensor) -> torch.Tensor:
    return grad.sum(0)


def _accumulate(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    known = weight.grad
    if known is None or known.is_sparse or gradient.is_sparse:
        torch.autograd.backward([weight], [gradient])  # as autograd does it: layout, type, sparse with dense
    else:
        known += gradient

"""Operations that take a weight, and what is called in their place where the backward is split.

Each has the forward of the operation and its backward, to the last bit, but gives the gradient of its input at once and
puts that of its weight aside, if `BackwardSplitter.put` says where. None: the operation itself is to be called, since
it takes no weight that is a leaf, or takes it in a way that is not written here.

Before products (y = x @ mat2 (+ bias), where mat2 is the weight, or a linear's, transposed) what all such operations
share: operands, and gradients that come at once or later.
"""
# ruff: noqa: PLR0917 (the signatures are those of the operations)

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from .linear_loss import linear_cross_entropy, linear_loss

_aten = torch.ops.aten
_unsafe_view = _aten._unsafe_view.default


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        split: BackwardSplitter,
        call: Callable[..., torch.Tensor],
        is_transposed: bool,
        given: Operands,
        *inputs: Any,
    ) -> torch.Tensor:
        x, ctx.weight, ctx.bias = inputs
        _, used, bias = given
        ctx.split, ctx.is_transposed = split, is_transposed
        ctx.is_by_columns = _is_row_major(used) if is_transposed else _is_column_major(used)
        ctx.save_for_backward(x, used if x.requires_grad else None)
        y = call(x, used, bias)
        # A view that a function returns may not be changed in place, as by nn.ReLU(inplace=True).
        return _unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, used = ctx.saved_tensors  # a forward may run again here, which the mode has to see: not what follows
        with torch._C.DisableTorchFunction():
            return None, None, None, None, *_of_product(ctx, grad, x, recorded(ctx, used))


# Its apply, without what that does for torch.func, where ours are not called: that takes as long again as the rest.
_product_of: Callable[..., Any] = super(torch.autograd.Function, _Product).apply


def _of_product(ctx: Any, grad: torch.Tensor, x: torch.Tensor, used: Any) -> Sequence[torch.Tensor | None]:
    """Gradients of x, the weight and the bias; None for those that are not needed, or that are put aside."""
    *_, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
    weight, bias, is_transposed = ctx.weight, ctx.bias, ctx.is_transposed
    flat = x
    if weight.dim() == 2:
        grad = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    of_x = None
    if wants_x:
        of_x = _left(grad, used, flat, is_transposed)
        of_x = of_x if flat is x else of_x.reshape(x.shape)
    right = partial(_right, is_transposed, ctx.is_by_columns)
    later = ctx.split.put(weight, ctx, 1) if wants_weight else None
    if later is not None and wants_bias and ctx.split.put(bias, ctx, 2) is not None:
        shape = bias.shape
        later((weight, bias), lambda grad, mat1: (*right(grad, mat1), grad.sum_to_size(shape)), grad, flat)
        return of_x, None, None
    of_weight = None
    if later is not None:
        later((weight,), right, grad, flat)
    elif wants_weight:
        (of_weight,) = right(grad, flat)
    return of_x, of_weight, later_or_now(ctx, 2, bias, partial(_sum_to, bias.shape), grad) if wants_bias else None


def _left(grad: torch.Tensor, weight: torch.Tensor, mat1: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """The gradient of mat1 in mat1 @ mat2, computed in mat1's layout, as torch does."""
    if mat1.dim() == 3:
        return grad.bmm(weight.transpose(1, 2).conj())
    if _is_column_major(mat1):
        return (weight.t() if is_transposed else weight).conj().mm(grad.t()).t()
    return grad.mm((weight if is_transposed else weight.t()).conj())


def _right(
    is_transposed: bool, is_by_columns: bool, grad: torch.Tensor, mat1: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The gradient of mat2, or of a weight that is mat2 transposed, computed in mat2's layout."""
    if mat1.dim() == 3:
        return (mat1.transpose(1, 2).conj().bmm(grad),)
    if is_by_columns:
        found = grad.t().mm(mat1.conj())
        return (found if is_transposed else found.t(),)
    found = mat1.t().conj().mm(grad)
    return (found.t() if is_transposed else found,)


def _is_column_major(matrix: torch.Tensor) -> bool:
    if matrix.is_contiguous() and matrix.numel() > 1:  # asked first, since it takes a tenth of the time
        return False
    strides = matrix.stride()
    return strides[0] == 1 and strides[1] == matrix.shape[0]


def _is_row_major(matrix: torch.Tensor) -> bool:
    strides = matrix.stride()
    return strides[1] == 1 and strides[0] == matrix.shape[1]


def _sum_to(shape: Sequence[int], grad: torch.Tensor) -> Sequence[torch.Tensor]:
    return (grad.sum_to_size(shape),)


def _product(
    split: BackwardSplitter,
    call: Callable[..., torch.Tensor],
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    is_transposed: bool = False,
) -> Any:
    given = operands(split, x, weight, bias)
    if given is None:
        return None
    return _product_of(split, call, is_transposed, given, given.x, weight, bias)


def linear(split: BackwardSplitter, input: Any, weight: Any, bias: Any = None) -> Any:
    if not is_weight(weight) or weight.dim() != 2 or input.dim() < 2:
        return None
    return _product(split, F.linear, input, weight, bias, is_transposed=True)


def matmul(split: BackwardSplitter, input: Any, other: Any) -> Any:
    if not isinstance(input, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    if other.dim() == 2 and input.dim() >= 2:
        return _times(split, lambda x, mat2, _: torch.matmul(x, mat2), input, other)
    if other.dim() == 3 and input.dim() == 3 and input.shape[0] == other.shape[0] and is_weight(other):
        return _product(split, lambda x, mat2, _: torch.bmm(x, mat2), input, other)
    return None


def addmm(split: BackwardSplitter, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if beta != 1 or alpha != 1:
        return None
    return _times(split, lambda x, mat2, bias: torch.addmm(bias, x, mat2), mat1, mat2, input)


def baddbmm(split: BackwardSplitter, input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if beta != 1 or alpha != 1 or not is_weight(batch2):
        return None
    return _product(split, lambda x, mat2, bias: torch.baddbmm(bias, x, mat2), batch1, batch2, input)


def _times(split: BackwardSplitter, call: Callable[..., torch.Tensor], x: Any, mat2: Any, bias: Any = None) -> Any:
    """x @ mat2 for a matrix that is a weight, or weight.t() in whichever spelling, and nothing else."""
    if is_weight(mat2):
        return _product(split, call, x, mat2, bias)
    weight, node = mat2._base, mat2.grad_fn
    if (
        node is not None
        and node.name() in ("TBackward0", "TransposeBackward0", "PermuteBackward0")
        and is_weight(weight)
        and mat2.shape == weight.shape[::-1]
        and mat2.stride() == weight.stride()[::-1]
        and getattr(node.next_functions[0][0], "variable", None) is weight
    ):
        transposed = partial(_transposed, call)
        return _product(split, transposed, x, weight, bias, is_transposed=True)
    return None


def _transposed(call: Callable[..., torch.Tensor], x: Any, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    return call(x, weight.t(), bias)


Compute = Callable[..., Sequence[torch.Tensor]]


class BackwardSplitter(Protocol):
    """The backward that is split: see `split_backward.SplitBackward`."""

    def put(self, weight: torch.Tensor | None, ctx: Any, number: int) -> Callable[..., None] | None: ...
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


def operands(
    split: BackwardSplitter, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Operands | None:
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
    put_aside = ctx.split.put(weight, ctx, number)
    if put_aside is None:
        return compute(*tensors)[0]
    put_aside((weight,), compute, *tensors)
    return None


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
    """Gradients of x, the weight and the bias; None for those that are not needed, or that are put aside."""
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
    """A replacement of an operation: called with a BackwardSplitter and the operation's arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        _, *parameters = inspect.signature(call).parameters.values()
        self._names = frozenset(each.name for each in parameters)
        self._most = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it takes such arguments; the operation itself may take others, such as out=."""
        return len(args) <= self._most and (not kwargs or kwargs.keys() <= self._names)


class _Loss(Instead):
    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return True


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
        linear_cross_entropy: _Loss(linear_loss),
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

"""Cross entropy of a projection to a large vocabulary, which never holds all logits.

    hidden [N, H] ── rows of the weight ──> logits [N, chunk] ──> lse = log sum exp(logits), added up over the chunks
                                                                  loss = lse - (1 - e) logits[target] - e mean(logits)
    backward: each chunk's logits once more, which become their gradient in place; it makes these rows' gradient, and a
    part of that of hidden

Kept for the backward are hidden, lse and the weight itself. In a tensor group each member has V / T rows; one gather of
lse and one sum of the rest make the loss of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypedDict, Unpack, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

Reduction = Literal["mean", "sum", "none", "pair"]
_LEAST_ROWS = 256  # of a chunk: fewer would make slow products


class Members(Protocol):
    """Processes that hold the rows of a weight together."""

    index: int
    count: int

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...
    def all(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...


class LossOptions(TypedDict, total=False):
    """Options of `linear_cross_entropy`."""

    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk: int | None
    members: Members | None


@dataclass(slots=True, kw_only=True)
class _LossOf:
    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk: int | None = None
    members: Members | None = None
    dtype: torch.dtype = torch.float32  # of the products

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise ValueError(
                f"reduction={self.reduction!r}: expected one of {', '.join(map(repr, get_args(Reduction)))}"
            )
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing}: expected 0 to 1")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}: expected a number of rows of the weight, at least 1")

    @property
    def exact(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def vocabulary(self, weight: torch.Tensor) -> int:
        return len(weight) * (1 if self.members is None else self.members.count)

    def columns(self, target: torch.Tensor, weight: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, 1] columns of the targets among the logits of these rows, and [N] whether they are there."""
        size = min(rows.stop, len(weight)) - rows.start
        local = target - rows.start - (0 if self.members is None else self.members.index * len(weight))
        return local.clamp(0, size - 1)[:, None], (local >= 0) & (local < size)

    def logits(self, hidden: Any, weight: Any, bias: Any) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of the weight, chunk by chunk, and their logits, which the caller may change."""
        size = max(_LEAST_ROWS, weight.shape[1]) if self.chunk is None else self.chunk
        for start in range(0, len(weight), size):
            rows = slice(start, start + size)
            part, shift = weight[rows].to(self.dtype), None if bias is None else bias[rows].to(self.dtype)
            yield rows, F.linear(hidden.to(self.dtype), part, shift).to(self.exact)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: Unpack[LossOptions],
) -> Any:
    """`F.cross_entropy(F.linear(hidden, weight, bias), target)` with logits of a part of the vocabulary at a time,
    which the backward computes again.

    Arguments:
        hidden: [..., H].
        weight, bias: [V, H] and [V], or a member's rows.
        target: [...] whole numbers from 0 to V - 1, or `ignore_index`.
        reduction: "mean" of the tokens that are not ignored (default), "sum", "none", or "pair": (sum, number of such
            tokens), as a `loss_fn` of a pipeline may return it.
        ignore_index, label_smoothing: as in F.cross_entropy: -100, 0.0.
        z_loss: weight of lse^2, which keeps logits small (Chowdhery et al. 2022, section 5): 0.0.
        chunk: rows of the weight whose logits exist at a time; by default H, so that they are as many as `hidden` has
            values, but at least 256.
        members: that hold the weight's rows together, each as many.

    Raises ValueError for shapes that do not fit, and on a CPU for targets outside of the vocabulary. Elsewhere those
    make the loss NaN.
    """
    if has_torch_function((hidden, weight)):  # one call, also where code is recorded and a backward is split
        given = hidden, weight, target, bias
        return handle_torch_function(linear_cross_entropy, (hidden, weight), *given, **options)
    return linear_loss(None, hidden, weight, target, bias, **options)


def linear_loss(
    split: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: Unpack[LossOptions],
) -> Any:
    """`linear_cross_entropy`. split: puts gradients of weights aside, as `weight_ops.BackwardSplitter`; or None."""
    if hidden.shape[:-1] != target.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy of hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and target "
            f"{tuple(target.shape)}: expected [..., H], [V, H] and [...]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: expected [V], {tuple(weight.shape[:1])}")
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target of {target.dtype}: expected whole numbers, torch.int64 or torch.int32")
    how, kind, wanted = _LossOf(**options), hidden.device.type, target.flatten()
    is_cast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    how.dtype = torch.get_autocast_dtype(kind) if is_cast else hidden.dtype
    counted, total = wanted != how.ignore_index, how.vocabulary(weight)
    outside = counted & ((wanted < 0) | (wanted >= total))
    if kind == "cpu" and not isinstance(wanted, FakeTensor) and outside.any():
        raise ValueError(f"target {wanted[outside][0].item()}: expected 0 to {total - 1}, or {how.ignore_index}")
    losses = _LinearCrossEntropy.apply(split, how, hidden.reshape(-1, hidden.shape[-1]), weight, bias, wanted)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(outside, torch.nan)
    if how.reduction == "none":
        return losses.view(target.shape)
    loss, count = losses.sum(), counted.sum()
    return (loss, count) if how.reduction == "pair" else loss / count if how.reduction == "mean" else loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Any, how: _LossOf, *given: Any) -> torch.Tensor:
        hidden, weight, bias, target = given
        found, total = hidden.new_zeros(2, len(hidden), dtype=how.exact)
        lse = torch.full_like(found, -torch.inf)
        for rows, logits in how.logits(hidden, weight, bias):
            lse = torch.logaddexp(lse, logits.logsumexp(1))
            at, is_here = how.columns(target, weight, rows)
            found += logits.gather(1, at)[:, 0].masked_fill(~is_here, 0)  # which may be -inf
            if how.label_smoothing:
                total += logits.sum(1)
        if how.members is not None:
            lse = how.members.all(lse[:, None], 1).logsumexp(1)
            found, total = how.members.sum(torch.stack([found, total]))
        ctx.split, ctx.how, ctx.weight, ctx.bias = split, how, weight, bias
        ctx.save_for_backward(hidden, weight, target, lse, bias)  # refuses changes in place
        loss = lse - (1 - how.label_smoothing) * found + how.z_loss * lse.square()
        loss = loss - how.label_smoothing / how.vocabulary(weight) * total
        return torch.where(target == how.ignore_index, torch.zeros_like(loss), loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, used, target, lse, used_bias = ctx.saved_tensors
        how, weight, bias = ctx.how, ctx.weight, ctx.bias
        wants = list(ctx.needs_input_grad[2:5])
        with torch._C.DisableTorchFunction():
            tensors = hidden, target, lse, grad.masked_fill(target == how.ignore_index, 0)
            found = partial(_gradients, how, weight=used.detach(), bias=None if bias is None else used_bias.detach())
            later = ctx.split.put(weight, ctx, 1) if ctx.split is not None and wants[1] else None
            if later is None or (wants[2] and ctx.split.put(bias, ctx, 2) is None):
                return None, None, *found(*tensors, wants=wants), None

            def compute(*tensors: torch.Tensor) -> list[torch.Tensor]:
                gradients = found(*tensors, wants=[False, *wants[1:]])
                return [each for each in gradients if each is not None]

            later((weight, bias) if wants[2] else (weight,), compute, *tensors)
            return None, None, found(*tensors, wants=[wants[0], False, False])[0], None, None, None


def _gradients(
    how: _LossOf, hidden: Any, target: Any, lse: Any, grad: Any, *, weight: Any, bias: Any, wants: list[bool]
) -> list[torch.Tensor | None]:
    """Gradients of hidden, weight and bias, or None, by `grad`, [N], of the losses."""
    of_hidden = torch.zeros_like(hidden, dtype=how.exact) if wants[0] else None
    of_weight, of_bias = (
        torch.empty_like(x) if wanted else None for x, wanted in zip((weight, bias), wants[1:], strict=True)
    )
    by_sum = (grad * (1 + 2 * how.z_loss * lse))[:, None]
    for rows, logits in how.logits(hidden, weight, bias) if any(wants) else ():
        at, is_here = how.columns(target, weight, rows)
        slope = logits.sub_(lse[:, None]).exp_().mul_(by_sum)
        slope.scatter_add_(1, at, (grad * is_here * (how.label_smoothing - 1))[:, None])
        if how.label_smoothing:
            slope -= (grad * (how.label_smoothing / how.vocabulary(weight)))[:, None]
        if of_bias is not None:
            of_bias[rows] = slope.sum(0)
        slope = slope.to(how.dtype)
        if of_hidden is not None:
            of_hidden += slope @ weight[rows].to(how.dtype)
        if of_weight is not None:
            of_weight[rows] = slope.t() @ hidden.to(how.dtype)
    return [None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias]


class LinearCrossEntropy(nn.Linear):
    """A head: `head(hidden)` are logits, `head(hidden, target)` their cross entropy by `linear_cross_entropy`.

    It is a torch.nn.Linear in all else. In a pipeline it is a unit: its loss is made on its stage, and only that number
    is sent on. A tensor group divides its vocabulary.

    Arguments:
        in_features, out_features, bias, device, dtype: H and V, as of torch.nn.Linear; no bias by default.
        options: of `linear_cross_entropy`.

    >>> head = LinearCrossEntropy(8, 1000)
    >>> hidden, target = torch.randn(2, 5, 8), torch.randint(1000, (2, 5))
    >>> plain = F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())
    >>> torch.allclose(head(hidden, target), plain)
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.reduction = _LossOf(**options).reduction
        self._options = options

    def forward(self, hidden: torch.Tensor, target: torch.Tensor | None = None, **options: Unpack[LossOptions]) -> Any:
        if target is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **self._options | options)

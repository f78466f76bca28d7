"""Cross entropy of a projection to a large vocabulary, which never holds the logits of all tokens.

    hidden [N, H] ── some tokens ──> logits [n, V] ──> lse = log sum exp(logits), one number per token
                                                      loss = lse - (1 - e) logits[target] - e mean(logits) + z lse^2
    backward: the logits of these tokens are computed again, and become their gradient in place

Kept for the backward are hidden, lse and the weight itself. In a tensor group each member has V / T of the logits; one
gather of lse and one sum of the rest make the loss of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

Reduction = Literal["mean", "sum", "none", "pair"]
_LEAST_TOKENS = 64  # of a chunk: fewer would make slow products


class Members(Protocol):
    """Processes that hold the rows of a weight together."""

    index: int
    count: int

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...
    def all(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk: int  # tokens
    dtype: torch.dtype  # of the products
    members: Members | None

    @property
    def exact(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    members: Members | None = None,
) -> Any:
    """`F.cross_entropy(F.linear(hidden, weight, bias), target)` with the logits of a chunk of tokens at a time, which
    the backward computes again.

    Arguments:
        hidden: [..., H].
        weight, bias: [V, H] and [V], or a member's rows.
        target: [...] whole numbers from 0 to V - 1, or `ignore_index`.
        reduction: "mean" of the tokens that are not ignored, "sum", "none", or "pair": (sum, number of such tokens), as
            a `loss_fn` of a pipeline may return it.
        label_smoothing: as in F.cross_entropy.
        z_loss: weight of lse^2, which keeps logits small (Chowdhery et al. 2022, section 5).
        chunk: tokens whose logits exist at a time; None: about as many logits as `hidden` has values, of 64 tokens at
            least.
        members: that hold the weight's rows together, each as many.

    Raises ValueError for shapes that do not fit, and on a CPU for targets outside of the vocabulary, which make the loss
    NaN elsewhere.
    """
    given = hidden, weight, target, bias
    options = reduction, ignore_index, label_smoothing, z_loss, chunk, members
    if has_torch_function((hidden, weight)):  # one call, also where code is recorded and a backward is split
        names = "reduction", "ignore_index", "label_smoothing", "z_loss", "chunk", "members"
        keywords = dict(zip(names, options, strict=True))
        return handle_torch_function(linear_cross_entropy, (hidden, weight), *given, **keywords)
    return linear_loss(None, *given, *options)


def linear_loss(
    split: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: Reduction,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk: int | None,
    members: Members | None,
) -> Any:
    """`linear_cross_entropy`. split: puts gradients of weights aside, as `weight_ops.BackwardSplitter`; or None."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(map(repr, get_args(Reduction)))}")
    if hidden.shape[:-1] != target.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy of hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and target "
            f"{tuple(target.shape)}: expected [..., H], [V, H] and [...]"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: expected a number of tokens, at least 1")
    kind = hidden.device.type
    is_cast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    flat, wanted = hidden.flatten(0, -2) if hidden.dim() > 1 else hidden[None], target.flatten()
    total = weight.shape[0] * (1 if members is None else members.count)
    counted = wanted != ignore_index
    outside = counted & ((wanted < 0) | (wanted >= total))
    if kind == "cpu" and not isinstance(wanted, FakeTensor) and outside.any():
        raise ValueError(f"target {wanted[outside][0].item()}: expected 0 to {total - 1}, or {ignore_index} (ignored)")
    how = _How(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        chunk=max(_LEAST_TOKENS, flat.numel() // weight.shape[0]) if chunk is None else chunk,
        dtype=torch.get_autocast_dtype(kind) if is_cast else hidden.dtype,
        members=members,
    )
    losses = _LinearCrossEntropy.apply(split, how, flat, weight, bias, wanted)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(outside, torch.nan)
    if reduction == "none":
        return losses.view(target.shape)
    loss, count = losses.sum(), counted.sum()
    return (loss, count) if reduction == "pair" else loss / count if reduction == "mean" else loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Any, how: _How, *given: Any) -> torch.Tensor:
        hidden, weight, bias, target = given
        lse, found, total = hidden.new_zeros(3, len(hidden), dtype=how.exact)
        for tokens, logits in _logits(how, hidden, weight, bias):
            lse[tokens] = logits.logsumexp(1)
            at, is_own = _own(how, target[tokens], weight)
            found[tokens] = logits.gather(1, at[:, None])[:, 0] * is_own
            if how.label_smoothing:
                total[tokens] = logits.sum(1)
        vocabulary = weight.shape[0]
        if how.members is not None:
            lse = how.members.all(lse[:, None], 1).logsumexp(1)
            found, total = how.members.sum(torch.stack([found, total]))
            vocabulary *= how.members.count
        ctx.split, ctx.how, ctx.weight, ctx.bias = split, how, weight, bias
        ctx.save_for_backward(hidden, weight, target, lse)
        loss = lse - (1 - how.label_smoothing) * found + how.z_loss * lse.square()
        loss -= how.label_smoothing / vocabulary * total
        return loss.masked_fill_(target == how.ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, used, target, lse = ctx.saved_tensors
        how, weight, bias = ctx.how, ctx.weight, ctx.bias
        wants = list(ctx.needs_input_grad[2:5])
        with torch._C.DisableTorchFunction():
            grad = grad.masked_fill(target == how.ignore_index, 0)
            tensors = hidden, target, lse, grad
            later = ctx.split.put(weight, ctx, 1) if ctx.split is not None and wants[1] else None
            if later is not None and (not wants[2] or ctx.split.put(bias, ctx, 2) is not None):
                weights = (weight, bias) if wants[2] else (weight,)
                weight, given = used.detach(), None if bias is None else bias.detach()

                def compute(*tensors: torch.Tensor) -> list[torch.Tensor]:
                    found = _gradients(how, weight, given, *tensors, wants=[False, *wants[1:]])
                    return [each for each in found if each is not None]

                later(weights, compute, *tensors)
                return None, None, _gradients(how, used, bias, *tensors, wants=[wants[0], False, False])[0], *[None] * 3
            return None, None, *_gradients(how, used, bias, *tensors, wants=wants), None


def _gradients(
    how: _How, weight: Any, bias: Any, hidden: Any, target: Any, lse: Any, grad: Any, *, wants: list[bool]
) -> list[torch.Tensor | None]:
    """Gradients of hidden, weight and bias, or None, by `grad`, [N], of the losses."""
    of_hidden, of_weight, of_bias = (
        torch.zeros(x.shape, dtype=how.exact, device=x.device) if wanted else None
        for x, wanted in zip((hidden, weight, bias), wants, strict=True)
    )
    matrix, rows = weight.to(how.dtype), weight.shape[0] * (1 if how.members is None else how.members.count)
    for tokens, logits in _logits(how, hidden, weight, bias) if any(wants) else ():
        by, log_sum = grad[tokens], lse[tokens]
        at, is_own = _own(how, target[tokens], weight)
        slope = logits.sub_(log_sum[:, None]).exp_().mul_((by * (1 + 2 * how.z_loss * log_sum))[:, None])
        slope.scatter_add_(1, at[:, None], (by * is_own * (how.label_smoothing - 1))[:, None])
        if how.label_smoothing:
            slope -= (by * (how.label_smoothing / rows))[:, None]
        if of_bias is not None:
            of_bias += slope.sum(0)
        slope = slope.to(how.dtype)
        if of_hidden is not None:
            of_hidden[tokens] = (slope @ matrix).to(how.exact)
        if of_weight is not None:
            of_weight += slope.t() @ hidden[tokens].to(how.dtype)
    pairs = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
    return [None if found is None else found.to(x.dtype) for found, x in pairs]


def _logits(how: _How, hidden: Any, weight: Any, bias: Any) -> Iterator[tuple[slice, torch.Tensor]]:
    """Logits of each chunk of tokens, which the caller may change."""
    hidden, weight, bias = (None if x is None else x.to(how.dtype) for x in (hidden, weight, bias))
    for start in range(0, len(hidden), how.chunk):
        tokens = slice(start, start + how.chunk)
        yield tokens, F.linear(hidden[tokens], weight, bias).to(how.exact)


def _own(how: _How, target: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the targets among a member's logits, and whether they are there."""
    rows = weight.shape[0]
    local = target - (0 if how.members is None else how.members.index * rows)
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


class LinearCrossEntropy(nn.Linear):
    """A head: `head(hidden)` are logits, `head(hidden, target)` their cross entropy by `linear_cross_entropy`.

    It is a torch.nn.Linear in all else. In a pipeline it is a unit: its loss is made on its stage, and only that number
    is sent on. A tensor group divides its vocabulary.

    Arguments:
        in_features, out_features, bias, device, dtype: H and V, as of torch.nn.Linear; no bias by default.
        reduction, ignore_index, label_smoothing, z_loss, chunk: see `linear_cross_entropy`.

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
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.reduction, self.ignore_index, self.chunk = reduction, ignore_index, chunk
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def forward(
        self, hidden: torch.Tensor, target: torch.Tensor | None = None, *, members: Members | None = None
    ) -> Any:
        if target is None:
            return super().forward(hidden)
        return linear_cross_entropy(
            hidden,
            self.weight,
            target,
            self.bias,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            chunk=self.chunk,
            members=members,
        )

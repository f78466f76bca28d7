"""Causal attention over slices of the sequence: a stage keeps the keys and values of the slices before.

    F(q)   attention  <---- keys, values of slices 0 .. q-1, kept by the stage, and of slice q
    B(q)   gradients of its own keys and values, plus those that the backwards of slices q+1, q+2, ... left for them

Each slice has its own graph. It is cut at keys and values of other slices: there gradients wait for the backward of
their slice, which comes later, since backwards run from the last slice to the first.

Only `F.scaled_dot_product_attention(..., is_causal=True)` is supported, called by any module, also by
nn.MultiheadAttention. The rest of a model must compute each token independently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torchs

from .tokens import TokenSpan, running

_attention = F.scaled_dot_product_attention
_ATTENTION = frozenset({_attention, torch.ops.aten.scaled_dot_product_attention.default})
_DROPOUT = frozenset(
    {torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)


class _Kept:
    """Keys, or values, of one attention in one microbatch: [..., T, D], filled slice by slice."""

    def __init__(self, like: Tensor, total: int) -> None:
        self._all = like.new_empty((*like.shape[:-2], total, like.shape[-1]))
        self.filled = 0
        self._waiting: Tensor | None = None  # gradients of the first `.shape[-2]` tokens, from later slices

    def with_slice(self, new: Tensor, span: TokenSpan) -> Tensor:
        # .data: graphs of earlier slices hold the front of this memory, which does not change.
        self._all.data[..., span.start : span.end, :] = new
        self.filled = max(self.filled, span.end)
        return self._all.data[..., : span.end, :]

    def own_gradient(self, gradient: Tensor, span: TokenSpan) -> Tensor:
        """The gradient of the slice's own tokens, from that of all up to its end; the rest waits."""
        if self._waiting is not None:
            if self._waiting.shape[-2] != span.end:
                raise ValueError(_lost_gradient(self._waiting.shape[-2], span))
            gradient = gradient + self._waiting
        self._waiting = gradient[..., : span.start, :] if span.start else None
        return gradient[..., span.start :, :]

    @property
    def num_waiting(self) -> int:
        return 0 if self._waiting is None else self._waiting.shape[-2]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, kept: _Kept, span: TokenSpan) -> Tensor:
        ctx.kept, ctx.span = kept, span
        return kept.with_slice(new, span)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.kept.own_gradient(gradient, ctx.span), None, None


_Call = tuple[object, int]  # the calling module, and its number of calls in this forward
KeptCalls = dict[_Call, tuple[_Kept, _Kept]]  # keys and values that one stage keeps of one microbatch


class _Attending(TorchFunctionMode):
    """Mode in which causal attention of one slice includes the slices before it."""

    def __init__(self, kept: KeptCalls, span: TokenSpan, *, drops: bool = True) -> None:
        super().__init__()
        self._kept = kept
        self.span = span
        self._drops = drops
        self._calls: dict[object, int] = {}
        self._mask: Tensor | None = None  # of all calls: [tokens of the slice, tokens up to its end]

    def from_here(self) -> _Attending:
        again = _Attending(self._kept, self.span, drops=self._drops)
        again._calls, again._mask = dict(self._calls), self._mask
        return again

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {} if kwargs is None else kwargs
        if self is not running.get():  # recomputation in a backward has its own mode, inside the backward's
            return func(*args, **given)
        if func in _ATTENTION:
            return self._attend(*args, **given)
        if func is F.multi_head_attention_forward:  # it calls attention where modes do not apply
            with patch.object(F, "scaled_dot_product_attention", self._attend):
                return func(*args, **given)
        if func in _DROPOUT and not self._drops:
            return args[0] if args else given["input"]
        return func(*args, **given)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> Tensor:
        options = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), given, strict=False)), **options}
        masks, is_causal = options.pop("attn_mask", None) is not None, options.pop("is_causal", False)
        span = self.span
        if not self._drops:
            options["dropout_p"] = 0.0
        module, frame = _caller(sys._getframe(1))
        if masks or not is_causal:
            how = "a mask" if masks else "is_causal=False"
            raise ValueError(
                f"attention with {how} in {frame}, over slices of the sequence: expected "
                f"F.scaled_dot_product_attention(query, key, value, is_causal=True), whose tokens need those before "
                f"them alone; or a schedule without slices"
            )
        length = span.end - span.start
        if query.shape[-2] != length or key.shape[-2] != length or value.shape[-2] != length:
            raise ValueError(
                f"attention over {query.shape[-2]} queries and {key.shape[-2]} keys in {frame}, of a slice of {length} "
                f"tokens: expected the sequence in dimension -2 of query, key and value"
            )
        if length == span.total:
            return _attention(query, key, value, is_causal=True, **options)
        number = self._calls.get(id(module), 0)
        self._calls[id(module)] = number + 1
        call = (id(module), number)
        kept = self._kept.get(call)
        if kept is None and span.start == 0:
            kept = self._kept[call] = _Kept(key, span.total), _Kept(value, span.total)
        if kept is None or kept[0].filled < span.start:
            raise ValueError(
                f"attention in {frame} runs for the slice that begins at token {span.start}, and did not for the "
                f"tokens before it (layers that are left out at random, or a graph per slice?): expected the same "
                f"calls for all slices of a microbatch"
            )
        keys, values = (_Join.apply(new, its, span) for new, its in zip((key, value), kept, strict=True))  # type: ignore[no-untyped-call]
        if span.start == 0:
            return _attention(query, keys, values, is_causal=True, **options)
        if self._mask is None or self._mask.device != query.device:
            ones = torch.ones(length, span.end, dtype=torch.bool, device=query.device)
            self._mask = ones.tril(span.start)
        return _attention(query, keys, values, attn_mask=self._mask, **options)


_Caller = tuple[nn.Module | None, str]


def _caller(frame: FrameType | None) -> _Caller:
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner, type(owner).__name__
        if isinstance(owner, _Resumed):
            return owner.caller
        frame = frame.f_back
    return None, "a function"


def _lost_gradient(waiting: int, span: TokenSpan) -> str:
    return (
        f"gradients of keys or values of {waiting} tokens wait, and the backward of the slice {span.start} to "
        f"{span.end} is next: expected a loss that needs every slice of a microbatch"
    )


class KVCache:
    """Keys and values that the stages of one rank keep, by stage and microbatch."""

    def __init__(self, num_slices: int) -> None:
        self._num_slices = num_slices
        self._kept: dict[tuple[int, int], KeptCalls] = {}

    @contextmanager
    def forward(self, stage: int, index: int, span: TokenSpan) -> Iterator[None]:
        with attending(self._kept.setdefault((stage, index // self._num_slices), {}), span):
            yield

    @contextmanager
    def backward(self, stage: int, index: int, span: TokenSpan) -> Iterator[None]:
        """Context of a slice's backward, with recomputation; that of the first slice drops what was kept. Raises
        ValueError where gradients that later slices have left are not used."""
        key = stage, index // self._num_slices
        calls = self._kept[key]
        with attending(calls, span):
            yield
        for kept in (each for call in calls.values() for each in call):
            if kept.num_waiting > span.start:
                raise ValueError(_lost_gradient(kept.num_waiting, span))
        if index % self._num_slices == 0:
            del self._kept[key]

    def drop(self) -> None:
        self._kept.clear()


@contextmanager
def attending(kept: KeptCalls, span: TokenSpan, *, drops: bool = True) -> Iterator[None]:
    """Context in which modules get the tokens of `span`, and attend to the kept ones before them."""
    mode = _Attending(kept, span, drops=drops)
    with _entered(mode), _checkpoints(mode):
        yield


@contextmanager
def _entered(mode: _Attending) -> Iterator[None]:
    token = running.set(mode)
    try:
        with mode:
            yield
    finally:
        running.reset(token)


class _Resumed:
    """A checkpoint's function, which attends to earlier slices in the backward, too, outside of any mode. `caller`: the
    module that called the checkpoint, which is not on the stack in the second run."""

    def __init__(self, run: Callable[..., Any], mode: _Attending, *, is_called_first: bool) -> None:
        self.caller = _caller(sys._getframe(1))
        self._run = run
        self._again = mode.from_here()
        self._is_called_first = is_called_first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_called_first:
            self._is_called_first = False
            return self._run(*args, **kwargs)
        with _entered(self._again.from_here()):
            return self._run(*args, **kwargs)


@contextmanager
def _checkpoints(mode: _Attending) -> Iterator[None]:
    """Context in which functions of checkpoints attend to earlier slices when they run again, too."""
    generator, function = torchs._checkpoint_without_reentrant_generator, torchs.CheckpointFunction

    def without_reentrance(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_Resumed(run, mode, is_called_first=False), *args, **kwargs)

    def reentrant(run: Callable[..., Any], *args: Any) -> Any:
        return function.apply(_Resumed(run, mode, is_called_first=True), *args)  # type: ignore[no-untyped-call]

    with (
        patch.object(torchs, "_checkpoint_without_reentrant_generator", without_reentrance),
        patch.object(torchs, "CheckpointFunction", SimpleNamespace(apply=reentrant)),
    ):
        yield

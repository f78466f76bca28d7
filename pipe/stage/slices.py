"""Causal attention over slices of the sequence: a stage keeps the keys and values of the slices before.

    F(q)   attention  <---- keys, values of slices 0 .. q-1, kept by the stage, and of slice q
    B(q)   gradients of its own keys and values, plus those that the backwards of slices q+1, q+2, ... left for them

Each slice has its own graph. It is cut at keys and values of other slices: there gradients wait for the backward of
their slice, which comes later, since backwards run from the last slice to the first.

Only `F.scaled_dot_product_attention(..., is_causal=True)` is supported, called by any module, also by
nn.MultiheadAttention. The rest of a model must compute each token independently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attending import AttentionMode, Seen, attending, attention, caller
from .tokens import TokenSpan


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


class _OverSlices(AttentionMode):
    """Mode in which causal attention of one slice includes the slices before it."""

    span: TokenSpan

    def __init__(self, kept: KeptCalls, span: TokenSpan, *, drops: bool = True) -> None:
        super().__init__(span, drops=drops)
        self._kept = kept
        self._calls: dict[object, int] = {}
        self._mask: Tensor | None = None  # of all calls: [tokens of the slice, tokens up to its end]

    def from_here(self) -> _OverSlices:
        again = _OverSlices(self._kept, self.span, drops=self._drops)
        again._calls, again._mask = dict(self._calls), self._mask
        return again

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], seen: Seen, **options: Any) -> Tensor:
        (query, key, value), span = qkv, self.span
        module, frame = caller()
        if seen.keys is not None or seen.window is not None or not seen.is_causal or self._has_documents(seen):
            how = "a mask" if seen.is_causal else "is_causal=False"
            raise ValueError(
                f"attention with {how} in {frame}, over slices of the sequence: expected "
                f"F.scaled_dot_product_attention(query, key, value, is_causal=True), whose tokens need those before "
                f"them alone; or a schedule without slices"
            )
        if span.length == span.total:
            return attention(query, key, value, is_causal=True, **options)
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
            return attention(query, keys, values, is_causal=True, **options)
        if self._mask is None or self._mask.device != query.device:
            ones = torch.ones(span.length, span.end, dtype=torch.bool, device=query.device)
            self._mask = ones.tril(span.start)
        return attention(query, keys, values, attn_mask=self._mask, **options)

    def _has_documents(self, seen: Seen) -> bool:
        """Whether the tokens of this slice, and those before it, are of several documents."""
        if seen.positions is None:
            return False
        own = torch.arange(self.span.start, self.span.end, device=seen.positions.device)
        return bool((seen.positions != own).any())


def _lost_gradient(waiting: int, span: TokenSpan) -> str:
    return (
        f"gradients of keys or values of {waiting} tokens wait, and the backward of the slice {span.start} to "
        f"{span.end} is next: expected a loss that needs every slice of a microbatch"
    )


class KVCache:
    """Keys and values that the stages of one rank keep, by stage and microbatch."""

    called = 0  # one rank alone calls them

    def __init__(self, num_slices: int) -> None:
        self._num_slices = num_slices
        self._kept: dict[tuple[int, int], KeptCalls] = {}

    def forward(self, stage: int, index: int, span: TokenSpan) -> AbstractContextManager[None]:
        return over_slices(self._kept.setdefault((stage, index // self._num_slices), {}), span)

    @contextmanager
    def backward(self, stage: int, index: int, span: TokenSpan) -> Iterator[None]:
        """Context of a slice's backward, with recomputation; that of the first slice drops what was kept. Raises
        ValueError where gradients that later slices have left are not used."""
        key = stage, index // self._num_slices
        calls = self._kept[key]
        with over_slices(calls, span):
            yield
        for kept in (each for call in calls.values() for each in call):
            if kept.num_waiting > span.start:
                raise ValueError(_lost_gradient(kept.num_waiting, span))
        if index % self._num_slices == 0:
            del self._kept[key]

    def drop(self) -> None:
        self._kept.clear()


def over_slices(kept: KeptCalls, span: TokenSpan, *, drops: bool = True) -> AbstractContextManager[None]:
    """Context in which modules get the tokens of `span`, and attend to the kept ones before them."""
    return attending(_OverSlices(kept, span, drops=drops))

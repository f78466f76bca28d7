"""A context in which modules compute a part of the tokens of their sequences, and attention sees the others'.

A mode replaces the calls of `F.scaled_dot_product_attention`, also those by nn.MultiheadAttention and those that run
again in a backward (torch.utils.checkpoint). What it computes instead is for `slices` and `context_parts` to say.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torchs

from ...partition.model.calls import checkpoints_as
from .tokens import Tokens, running

attention = F.scaled_dot_product_attention
_ATTENTION = frozenset({attention, torch.ops.aten.scaled_dot_product_attention.default})
_DROPOUT = frozenset(
    {torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Which keys a query sees; T keys."""

    is_causal: bool  # those up to its own token alone
    keys: Tensor | None = None  # [..., 1, T] mask of keys for all queries, as torch's attention takes it, or None
    # [..., T] of tokens in their documents, of which a query sees its own alone: each begins where a position is not
    # one more than the one before. None: one document.
    positions: Tensor | None = None
    window: int | None = None  # number of the newest keys that a query sees, itself among them; None: all of them

    def of_all(self, gather: Callable[[Tensor], Tensor]) -> Seen:
        """The same for all tokens, of which `gather` makes [..., T] from those of this part."""
        keys, positions = (None if x is None else gather(x) for x in (self.keys, self.positions))
        return replace(self, keys=keys, positions=positions)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[tuple[int, int]], **options: Any
    ) -> Tensor:
        """Attention of queries [..., tokens of the blocks, D] over all keys and values [..., T, D] of a sequence."""
        found, at, documents = [], 0, self._documents()
        for start, end in blocks:
            own, at = query.narrow(-2, at, end - start), at + end - start
            stop = end if self.is_causal else key.shape[-2]
            qkv = own, key[..., :stop, :], value[..., :stop, :]
            is_band = (self.is_causal and start > 0) or self.window is not None
            if is_band and query.device.type == "cpu" and self.keys is None and documents is None:
                band = self._banded(range(start, end), stop, own)
                found.append(attention(own.flip(-2), *qkv[1:], attn_mask=band, **options).flip(-2))
                continue
            mask = self._mask(range(start, end), stop, documents, device=query.device)
            if mask is None and self.is_causal and start:
                found.append(CausalBias._dispatch(*qkv, _LowerRight(end - start, stop), **options))  # type: ignore[arg-type]
            else:
                found.append(attention(*qkv, attn_mask=mask, is_causal=self.is_causal and mask is None, **options))
        return found[0] if len(found) == 1 else torch.cat(found, -2)

    def _documents(self) -> Tensor | None:
        """[..., T] number of each token's document; None: all are of one."""
        if self.positions is None:
            return None
        begins = self.positions[..., 1:] != self.positions[..., :-1] + 1
        is_known = not (begins.is_meta or isinstance(begins, FakeTensor))
        return None if is_known and not begins.any() else F.pad(begins.cumsum(-1), (1, 0))

    def _banded(self, own: range, stop: int, like: Tensor) -> Tensor:
        """[queries from the last to the first, keys up to `stop`] that is added to scores: causality, and the window.
        The distance of the two follows from the sum of both indices, so all rows are views of one."""
        before = own.stop - 1 - torch.arange(len(own) + stop - 1, device=like.device)  # the query, by so many tokens
        hidden = (before < 0) & self.is_causal
        if self.window is not None:
            hidden |= before >= self.window
        has_autocast = torch.is_autocast_enabled(like.device.type) and like.dtype is not torch.float64
        kind = torch.get_autocast_dtype(like.device.type) if has_autocast else like.dtype  # else it would be copied
        row = torch.zeros(len(before), dtype=kind, device=like.device).masked_fill(hidden, float("-inf"))
        return row.as_strided((len(own), stop), (1, 1))

    def _mask(self, own: range, stop: int, documents: Tensor | None, *, device: torch.device) -> Tensor | None:
        """[..., queries, keys up to `stop`]; None where causality alone hides keys, or nothing does."""
        keys = None if self.keys is None else self.keys[..., :stop]
        has_window = self.window is not None and self.window < stop
        if keys is None and documents is None and not has_window:
            return None
        found = torch.ones(len(own), stop, dtype=torch.bool, device=device)
        if self.is_causal:
            found = found.tril(own.start)
        if self.window is not None:
            found = found.triu(own.start - self.window + 1)
        if documents is not None:
            found = found & (documents[..., own.start : own.stop, None] == documents[..., None, :stop]).unsqueeze(-3)
        if keys is None or keys.dtype is torch.bool:
            return found if keys is None else found & keys
        return keys.masked_fill(~found, float("-inf"))


class _LowerRight:
    """The mask of `causal_lower_right`, whose tensor cannot be made within a TorchDispatchMode, as torch's kernels read
    it."""

    variant = CausalVariant.LOWER_RIGHT
    _materialize, _lower_right = CausalBias._materialize, CausalBias._lower_right

    def __init__(self, queries: int, keys: int) -> None:
        self.seq_len_q, self.seq_len_kv = queries, keys


class AttentionMode(TorchFunctionMode):
    """Mode in which the tokens are those of `span`. drops: whether dropout is applied."""

    def __init__(self, span: Tokens, *, drops: bool = True) -> None:
        super().__init__()
        self.span = span
        self._drops = drops

    @abstractmethod
    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], seen: Seen, **options: Any) -> Tensor:
        """Attention of the own queries; `seen` is of the own tokens. `options`: of F.scaled_dot_product_attention."""

    @abstractmethod
    def from_here(self) -> Self:
        """The same mode for a function that runs again later."""

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
        mask, is_causal = options.pop("attn_mask", None), options.pop("is_causal", False)
        if mask is not None and (mask.shape[-1] != self.span.length or (mask.dim() > 1 and mask.shape[-2] != 1)):
            raise ValueError(
                f"attention with a mask of shape {tuple(mask.shape)} in {caller()[1]}, to which {self.span.length} of "
                f"{self.span.total} tokens are given: expected is_causal=True and no mask, or stagewright.attend "
                f"within a module's forward"
            )
        return self.checked((query, key, value), Seen(is_causal=is_causal, keys=mask), **options)

    def checked(self, qkv: tuple[Tensor, Tensor, Tensor], seen: Seen, **options: Any) -> Tensor:
        if not self._drops:
            options["dropout_p"] = 0.0
        length = self.span.length
        if any(x.shape[-2] != length for x in qkv):
            raise ValueError(
                f"attention over {qkv[0].shape[-2]} queries and {qkv[1].shape[-2]} keys in {caller()[1]}, to which "
                f"{length} tokens are given: expected query, key and value of these, in dimension -2 (keys of another "
                f"sequence are not divided)"
            )
        if seen.keys is not None and seen.keys.requires_grad:
            raise ValueError(
                f"attention in {caller()[1]} with a mask that requires a gradient, which would be lost: expected "
                f'a mask without, or a schedule without slices and "context": 1'
            )
        return self.attend(qkv, seen, **options)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = True,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention` for masks that a context group can divide; within a module's forward.

    Arguments:
        query, key, value: [B, heads, T, D], of the tokens that a module is given: all, or a part of them.
        is_causal: whether a token sees those up to itself alone.
        key_mask: [B, T] which tokens may be seen, bool.
        positions: [B, T] or [1, T] of tokens in their documents, where several are packed into a sequence: a token sees
            its own document alone. Each begins where a position is not one more than the one before.
        window: number of the newest tokens that a token sees, itself among them.
        options: of scaled_dot_product_attention: dropout_p, scale, enable_gqa.

    Raises ValueError for causal attention over another number of keys than of queries.
    """
    keys = None if key_mask is None else key_mask.bool()[:, None, None, :]
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"attend() of {query.shape[-2]} queries and {key.shape[-2]} keys, causal: expected those of the same tokens"
        )
    seen, mode = Seen(is_causal=is_causal, keys=keys, positions=positions, window=window), running.get()
    if isinstance(mode, AttentionMode):
        token = running.set(None)  # what it calls is not replaced once more
        try:
            return mode.checked((query, key, value), seen, **options)
        finally:
            running.reset(token)
    return seen.attention(query, key, value, [(0, query.shape[-2])], **options)


Caller = tuple[nn.Module | None, str]


def caller() -> Caller:
    """The module whose forward calls attention, and its name."""
    return _caller(sys._getframe(2))


def _caller(frame: FrameType | None) -> Caller:
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner, type(owner).__name__
        if isinstance(owner, _Resumed):
            return owner.caller
        frame = frame.f_back
    return None, "a function"


@contextmanager
def attending(mode: AttentionMode) -> Iterator[None]:
    with _entered(mode), _checkpoints(mode):
        yield


@contextmanager
def _entered(mode: AttentionMode) -> Iterator[None]:
    token = running.set(mode)
    try:
        with mode:
            yield
    finally:
        running.reset(token)


class _Resumed:
    """A checkpoint's function, which runs in its mode in the backward, too, outside of any other. `caller`: the
    module that called the checkpoint, which is not on the stack in the second run."""

    def __init__(self, run: Callable[..., Any], mode: AttentionMode, *, is_called_first: bool) -> None:
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


def _checkpoints(mode: AttentionMode) -> AbstractContextManager[None]:
    """Context in which functions of checkpoints run in the mode when they run again, too."""
    generator, function = torchs._checkpoint_without_reentrant_generator, torchs.CheckpointFunction

    def without_reentrance(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_Resumed(run, mode, is_called_first=False), *args, **kwargs)

    def reentrant(run: Callable[..., Any], *args: Any) -> Any:
        return function.apply(_Resumed(run, mode, is_called_first=True), *args)  # type: ignore[no-untyped-call]

    return checkpoints_as(without_reentrance, reentrant)

"""A context in which modules compute a part of the tokens of their sequences, and attention sees the others'.

A mode replaces the calls of `F.scaled_dot_product_attention`, also those by nn.MultiheadAttention and those that run
again in a backward (torch.utils.checkpoint). What it computes instead is for `slices` and `context_parts` to say.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torchs

from .tokens import Tokens, running

attention = F.scaled_dot_product_attention
_ATTENTION = frozenset({attention, torch.ops.aten.scaled_dot_product_attention.default})
_DROPOUT = frozenset(
    {torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)


class AttentionMode(TorchFunctionMode):
    """Mode in which the tokens are those of `span`. drops: whether dropout is applied."""

    def __init__(self, span: Tokens, *, drops: bool = True) -> None:
        super().__init__()
        self.span = span
        self._drops = drops

    @abstractmethod
    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], *, mask: Tensor | None, is_causal: bool, **options: Any
    ) -> Tensor:
        """Attention of the own queries. `options`: the others of F.scaled_dot_product_attention."""

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
        if not self._drops:
            options["dropout_p"] = 0.0
        mask, is_causal = options.pop("attn_mask", None), options.pop("is_causal", False)
        length = self.span.length
        if query.shape[-2] != length or key.shape[-2] != length or value.shape[-2] != length:
            raise ValueError(
                f"attention over {query.shape[-2]} queries and {key.shape[-2]} keys in {caller()[1]}, of a part of "
                f"{length} tokens: expected the sequence in dimension -2 of query, key and value"
            )
        return self.attend((query, key, value), mask=mask, is_causal=is_causal, **options)


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


@contextmanager
def _checkpoints(mode: AttentionMode) -> Iterator[None]:
    """Context in which functions of checkpoints run in the mode when they run again, too."""
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

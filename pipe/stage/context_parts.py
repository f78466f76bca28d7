"""Attention in a context group: each member has a part of the tokens, and gathers keys and values of all.

    F   own queries  ──>  attention  <──  keys, values of all members, gathered, in the order of the sequence
    B   the gradients of all keys and values, added up over the members; each continues with those of its own tokens

Causal attention of a block stops at its last token, so a member computes what its own blocks need alone (`TokenBlocks`:
the same for each member). All members run the same actions in the same order, as replicas of one schedule do, so that
their collectives meet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..shards.tensor_group import TensorGroup, exchanged
from .attending import AttentionMode, attending, attention, caller
from .tokens import TokenBlocks


class _OverContext(AttentionMode):
    span: TokenBlocks

    def __init__(self, group: TensorGroup, span: TokenBlocks, *, drops: bool = True) -> None:
        super().__init__(span, drops=drops)
        self._group = group
        self._masks: dict[tuple[int, int, torch.device], Tensor] = {}

    def from_here(self) -> _OverContext:
        return self

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], *, mask: Tensor | None, is_causal: bool, **options: Any
    ) -> Tensor:
        query, key, value = qkv
        if mask is not None:
            mask = self._padding(mask)
        if key.shape == value.shape:
            key, value = self._whole(torch.stack((key, value))).unbind()
        else:
            key, value = self._whole(key), self._whole(value)
        if not is_causal:
            return attention(query, key, value, attn_mask=mask, **options)
        found, at = [], 0
        for start, end in self.span.blocks:
            own, at = query.narrow(-2, at, end - start), at + end - start
            keys, values = key[..., :end, :], value[..., :end, :]
            causal: dict[str, Any] = (
                {"attn_mask": self._causal(start, end, query.device)} if start else {"is_causal": True}
            )
            found.append(attention(own, keys, values, **causal, **options))
        return torch.cat(found, -2)

    def _whole(self, x: Tensor) -> Tensor:
        """Those of all tokens, of [..., own tokens, D]."""
        group, span = self._group, self.span
        return exchanged(
            x, lambda x: span.in_order(group.all(x, -2), -2), lambda gradient: span.part(group.sum(gradient), -2)
        )

    def _padding(self, mask: Tensor) -> Tensor:
        """[..., 1, T] of [..., 1, own tokens], which says for each key whether it is padding."""
        if mask.shape[-1] != self.span.length or (mask.dim() > 1 and mask.shape[-2] != 1):
            raise ValueError(
                f"attention with a mask of shape {tuple(mask.shape)} in {caller()[1]}, on a member of a context group, "
                f"which has {self.span.length} of {self.span.total} tokens: expected is_causal=True, no mask, or one "
                f"of keys alone, [..., 1, {self.span.length}], which is gathered as keys are"
            )
        return self.span.in_order(self._group.all(mask.detach(), -1), -1)

    def _causal(self, start: int, end: int, device: torch.device) -> Tensor:
        key = start, end, device
        if key not in self._masks:
            self._masks[key] = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
        return self._masks[key]


def over_context(group: TensorGroup, span: TokenBlocks, *, drops: bool = True) -> AbstractContextManager[None]:
    """Context in which modules get the tokens of `span`, and attend to those of all members."""
    return attending(_OverContext(group, span, drops=drops))


class ContextAttention:
    """The context of each action of one rank."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def forward(self, stage: int, index: int, span: TokenBlocks) -> AbstractContextManager[None]:
        return over_context(self._group, span)

    backward = forward  # recomputation in it

    def drop(self) -> None:
        pass

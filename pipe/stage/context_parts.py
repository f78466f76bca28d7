"""Attention in a context group: each member has a part of the tokens, and gathers keys and values of all.

    F   own queries  ──>  attention  <──  keys, values of all members, gathered, in the order of the sequence
    B   the gradients of all keys and values, added up over the members; each continues with those of its own tokens

Causal attention of a block stops at its last token, so a member computes what its own blocks need alone (`TokenBlocks`:
the same for each member). All members run the same actions in the same order, as replicas of one schedule do, so that
their collectives meet.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..shards.tensor_group import TensorGroup, exchanged
from .attending import AttentionMode, Seen, attending, caller
from .tokens import TokenBlocks


class _OverContext(AttentionMode):
    span: TokenBlocks

    def __init__(
        self,
        group: TensorGroup,
        span: TokenBlocks,
        *,
        drops: bool = True,
        on_call: Callable[[nn.Module | None], None] = lambda module: None,
    ) -> None:
        super().__init__(span, drops=drops)
        self._group, self._on_call = group, on_call

    def from_here(self) -> _OverContext:
        return self

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], seen: Seen, **options: Any) -> Tensor:
        query, key, value = qkv
        module, _ = caller()
        self._on_call(module)
        group = self._group if module is None else self._group.inside(module)
        if key.shape == value.shape:
            key, value = self._whole(torch.stack((key, value)), group).unbind()
        else:
            key, value = self._whole(key, group), self._whole(value, group)
        span = self.span
        whole = seen.of_all(lambda x: span.in_order(group.all(x.detach(), -1), -1))
        return whole.attention(query, key, value, span.blocks, **options)

    def _whole(self, x: Tensor, group: TensorGroup) -> Tensor:
        """Those of all tokens, of [..., own tokens, D]."""
        span = self.span

        def gathered(own: Tensor) -> Tensor:
            with group.noted():
                return span.in_order(group.all(own, -2), -2)

        def summed(gradient: Tensor) -> Tensor:
            with group.noted():
                return span.part(group.sum(gradient), -2)

        return exchanged(x, gathered, summed)


def over_context(group: TensorGroup, span: TokenBlocks, *, drops: bool = True) -> AbstractContextManager[None]:
    """Context in which modules get the tokens of `span`, and attend to those of all members."""
    return attending(_OverContext(group, span, drops=drops))


class ContextAttention:
    """The context of each action of one rank."""

    def __init__(self, group: TensorGroup, root: nn.Module) -> None:
        self._group = group
        self._numbers = {id(module): number for number, module in enumerate(root.modules())}
        # Checksum of the modules of `root` that have called attention, in order: the same on each member, since the
        # collectives of different modules would pair as well.
        self.called = 0

    def forward(self, stage: int, index: int, span: TokenBlocks) -> AbstractContextManager[None]:
        return attending(_OverContext(self._group, span, on_call=self._note))

    def _note(self, module: nn.Module | None) -> None:
        self.called = zlib.crc32(f"{self._numbers.get(id(module))}".encode(), self.called)

    backward = forward  # recomputation in it

    def drop(self) -> None:
        pass

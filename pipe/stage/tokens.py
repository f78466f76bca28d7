"""Positions, in their sequence, of the tokens that a stage is given: of a slice, or of a part of a context group."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from ..settings.given import Given


class TokenSpan(NamedTuple):
    """Tokens of one slice: `start` to `end` of a sequence of `total`."""

    start: int
    end: int
    total: int

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        return ((self.start, self.end),)

    @property
    def length(self) -> int:
        return self.end - self.start

    def part(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Its part of a tensor, contiguous, as in shape inference; all of a tensor without tokens."""
        return x if dim is None else x.narrow(dim, self.start, self.end - self.start).contiguous()


class TokenBlocks(NamedTuple):
    """Tokens of one part of a sequence of `total`: (start, end) of each of its blocks.

    >>> TokenBlocks.of(8, index=0, count=2)
    TokenBlocks(blocks=((0, 2), (6, 8)), total=8)
    """

    blocks: tuple[tuple[int, int], ...]
    total: int

    @classmethod
    def of(cls, total: int, *, index: int, count: int) -> TokenBlocks:
        """Part `index` of `count`: blocks `index` and 2 count - 1 - index of 2 count, which have as many earlier tokens
        together as those of any other part; or one block, where 2 count does not divide `total`.

        Raises ValueError for a `total` that `count` does not divide.
        """
        if total % count:
            raise ValueError(
                f"sequences of {total} tokens over a context group of {count}: expected a multiple of {count}, such as "
                f"{-(-total // count) * count} (pad the batch), or another size of the context axis"
            )
        if total % (2 * count):
            return cls(((total // count * index, total // count * (index + 1)),), total)
        size = total // (2 * count)
        return cls(tuple((size * at, size * (at + 1)) for at in (index, 2 * count - 1 - index)), total)

    @property
    def start(self) -> int:
        return self.blocks[0][0]

    @property
    def length(self) -> int:
        return sum(end - start for start, end in self.blocks)

    def part(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        if dim is None:
            return x
        pieces = [x.narrow(dim, start, end - start) for start, end in self.blocks]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim)

    def in_order(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens of the parts of a group, one part after the other, in the order of the sequence."""
        if len(self.blocks) == 1:
            return x
        count = self.total // self.length
        pieces = x.chunk(2 * count, dim)
        return torch.cat([*pieces[::2], *reversed(pieces[1::2])], dim)


Tokens: TypeAlias = TokenSpan | TokenBlocks
Slice: TypeAlias = tuple[Given, Tokens]  # of a microbatch, and its position in the sequence


class PartsOfSequences(Protocol):
    """Attention of one rank's stages that are given parts of their sequences: the context of each action."""

    called: int

    def forward(self, stage: int, index: int, span: Any) -> AbstractContextManager[None]: ...

    def backward(self, stage: int, index: int, span: Any) -> AbstractContextManager[None]: ...

    def drop(self) -> None: ...


class _Running(Protocol):
    @property
    def span(self) -> Tokens: ...


running: ContextVar[_Running | None] = ContextVar("running", default=None)  # of this thread


def first_position() -> int:
    """Position in its sequence of the first token that a module is given; above 0 for later slices of a microbatch.

    For models with their own position embeddings, within the forward of a module:

        start = stagewright.first_position()
        hidden = self.tokens(tokens) + self.positions[start : start + tokens.shape[1]]

    The code between modules is recorded once, and must take positions from an input of the model instead. Raises
    ValueError in a context group, each part of which is of two blocks: `positions` has those of all tokens.
    """
    mode = running.get()
    if mode is None:
        return 0
    if len(mode.span.blocks) > 1:
        raise ValueError(
            "first_position() of a part of two blocks, as the members of a context group have: expected "
            "stagewright.positions(num_tokens), the position of each token"
        )
    return mode.span.start


def positions(num_tokens: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """[num_tokens] positions in their sequence of the tokens that a module is given, whole or a part of them.

    For models with their own position embeddings, within the forward of a module:

        hidden = self.tokens(tokens) + self.positions[stagewright.positions(tokens.shape[1], device=tokens.device)]

    Raises ValueError for another number of tokens than the part has.
    """
    mode = running.get()
    if mode is None:
        return torch.arange(num_tokens, device=device)
    if num_tokens != mode.span.length:
        raise ValueError(f"positions({num_tokens}) of a part of {mode.span.length} tokens: expected the latter")
    return torch.cat([torch.arange(start, end, device=device) for start, end in mode.span.blocks])

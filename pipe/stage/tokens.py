"""Positions of a slice's tokens in their sequence."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ..settings.given import Given


class TokenSpan(NamedTuple):
    """Tokens of one slice: `start` to `end` of a sequence of `total`."""

    start: int
    end: int
    total: int

    def part(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Its part of a tensor, contiguous, as in shape inference; all of a tensor without tokens."""
        return x if dim is None else x.narrow(dim, self.start, self.end - self.start).contiguous()


Slice: TypeAlias = tuple[Given, TokenSpan]  # of a microbatch, and its position in the sequence


class _Running(Protocol):
    @property
    def span(self) -> TokenSpan: ...


running: ContextVar[_Running | None] = ContextVar("running", default=None)  # of this thread


def first_position() -> int:
    """Position in its sequence of the first token that a module is given; above 0 for later slices of a microbatch.

    For models with their own position embeddings, within the forward of a module:

        start = stagewright.first_position()
        hidden = self.tokens(tokens) + self.positions[start : start + tokens.shape[1]]

    The code between modules is recorded once, and must take positions from an input of the model instead.
    """
    mode = running.get()
    return 0 if mode is None else mode.span.start

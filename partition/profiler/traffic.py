"""Sums over the ranks that a cut weight lies on, as the model of one of them tells of them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..profile import Node


class Sums(NamedTuple):
    """Messages of one unit: (number, bytes) in F and in B."""

    forward: tuple[float, float]
    backward: tuple[float, float]

    def at(self, node: Node) -> Node:
        """The node with these."""
        return replace(
            node,
            forward_sums=self.forward[0],
            forward_sum_bytes=self.forward[1],
            backward_sums=self.backward[0],
            backward_sum_bytes=self.backward[1],
        )


class Traffic:
    """Number of sums, and bytes of each rank in them, since they were last taken."""

    def __init__(self) -> None:
        self._sums = 0.0
        self._bytes = 0.0

    def tell(self, kind: str, num_bytes: int) -> None:
        """One more: a "sum" of tensors of so many bytes, or a "gather" whose result has so many, half a sum's way."""
        self._sums += 1.0 if kind == "sum" else 0.5
        self._bytes += num_bytes if kind == "sum" else num_bytes / 2

    def take(self) -> tuple[float, float]:
        """(sums, bytes)."""
        found = self._sums, self._bytes
        self._sums = self._bytes = 0.0
        return found

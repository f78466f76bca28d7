"""Sums over the ranks that a cut weight lies on, as the model of one of them tells of them."""

from __future__ import annotations


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
        found = self._sums, self._bytes
        self._sums = self._bytes = 0.0
        return found

"""Orders of slices: microbatches cut along the sequence, where each slice attends to those before it."""

from __future__ import annotations


def forward_order(*, num_microbatches: int, num_slices: int) -> list[int]:
    """Indices of all slices as forwards take them: microbatch by microbatch, from the first slice to the last."""
    return list(range(num_microbatches * num_slices))


def backward_order(*, num_microbatches: int, num_slices: int) -> list[int]:
    """The same as backwards take them: microbatch by microbatch, from the last slice to the first.

    >>> backward_order(num_microbatches=2, num_slices=3)
    [2, 1, 0, 5, 4, 3]
    """
    return [k * num_slices + q for k in range(num_microbatches) for q in reversed(range(num_slices))]

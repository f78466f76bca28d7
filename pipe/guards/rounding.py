"""How far results of two ways to compute the same may be apart, by type."""

from __future__ import annotations

import torch

# Relative to the size of what is compared: of float64, of float32, and of shorter types. Sums in another order, or of
# other kernels, differ by some rounding errors. What comparisons are to find (a missing hook, a lost gradient, a sum
# that nobody makes, a buffer that moved twice) differs by far more.
SUMS = (1e-9, 1e-3, 5e-2)
CUT_PROJECTIONS = (1e-9, 1e-4, 3e-2)
SLICED_OUTPUTS = (1e-8, 1e-3, 0.25)
SLICED_LOSSES = (1e-9, 1e-5, 1e-2)


def by_type(tolerance: tuple[float, float, float], dtype: torch.dtype) -> float:
    double, single, shorter = tolerance
    return {torch.float64: double, torch.float32: single}.get(dtype, shorter)

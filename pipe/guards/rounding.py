"""Tolerances for results that are computed in two ways, by type."""

from __future__ import annotations

import torch

# Relative to the size of the values: for float64, float32, and shorter types. Sums in another order, or by other
# kernels, differ by some rounding errors. Mistakes that comparisons are to find (a missing hook, gradient or sum, a
# buffer that moved twice) differ by far more.
SUMS = (1e-9, 1e-3, 5e-2)
CUT_PROJECTIONS = (1e-9, 1e-4, 3e-2)
SLICED_OUTPUTS = (1e-8, 1e-3, 0.25)
SLICED_LOSSES = (1e-9, 1e-5, 1e-2)


def by_type(tolerance: tuple[float, float, float], dtype: torch.dtype) -> float:
    double, single, shorter = tolerance
    return {torch.float64: double, torch.float32: single}.get(dtype, shorter)

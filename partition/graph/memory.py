"""Which tensors share memory."""

from __future__ import annotations

import torch


def memory_of(tensor: torch.Tensor) -> object:
    """The same for tensors over the same memory; None where that cannot be told (sparse ones)."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None

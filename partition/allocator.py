"""Bytes that a device holds beside its tensors whatever these are: CUDA's context, of which no plan can use a byte."""

from __future__ import annotations

_GPUS = ("cuda", "nvidia", "tesla", "geforce", "a100", "a10", "h100", "h200", "b200", "v100", "p100", "l4", "t4")
_CUDA_CONTEXT = 300e6  # at least, with PyTorch's kernels: github.com/pytorch/pytorch issues 107667 and 28113


def certain(device: str) -> float:
    """Least bytes that a device holds beside its tensors; 0 on a CPU and for a name that says nothing.

    >>> certain("A100-80GB"), certain("cpu"), certain("device")
    (300000000.0, 0.0, 0.0)
    """
    name = device.lower()
    return _CUDA_CONTEXT if not name.startswith("cpu") and any(word in name for word in _GPUS) else 0.0

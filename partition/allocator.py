"""Bytes that a device holds beside its tensors: what allocators and libraries keep, as a range.

`MemoryUse` says what tensors take. The memory of a device must hold more:

    holes      Tensors that come and go (gradients, activations, workspace, messages) leave holes that the next ones do
               not fill. None where each finds a hole of its size. By Knuth's fifty-percent rule (The Art of Computer
               Programming 1, 2.5) there is half a hole for each block that is in use, of blocks that come and go for
               long; so at most half of the bytes that do. What stays (weights, the optimizer's state) leaves no holes.
    segments   CUDA's caching allocator takes memory in segments: 20 MiB for blocks above 1 MiB, 2 MiB for smaller ones;
               of either kind one may have been begun. malloc takes pages.
    libraries  Beside all allocators. On CUDA the context with its kernels, 300 MB to 700 MB of PyTorch, and NCCL's
               buffers, up to 700 MB where several devices speak (cuBLAS's workspaces are tensors of the caching
               allocator's). On the CPU what Python and torch load with their first step; what the process held before
               that (the interpreter, torch) is in no figure.

malloc gives back at once what it mapped for one tensor alone. From 128 KiB, a bound that each such tensor that is freed
raises, up to 32 MiB, it maps; below it keeps holes. With MALLOC_MMAP_THRESHOLD_=65536 it keeps none.

Held against the peaks of allocated and of reserved memory of `experiments/works/mist_plans` (33 stages on L4), and
against resident memory of runs on the CPU (`tests/partition/test_allocator.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from .memory_use import MemoryUse
from .strict import number

_MIB = 2.0**20
_HOLES = 0.5  # of what comes and goes: the fifty-percent rule
_GPUS = ("cuda", "nvidia", "tesla", "geforce", "a100", "a10", "h100", "h200", "b200", "v100", "p100", "l4", "t4")


class Allocator(StrEnum):
    """Source of memory on a kind of device."""

    MALLOC = "malloc"  # glibc's, on a CPU
    CUDA = "CUDA caching allocator"

    @classmethod
    def of(cls, device: str) -> Allocator | None:
        """Allocator of a profile's device: a CPU's, a GPU's; None for a name that says nothing, such as "device".

        >>> Allocator.of("cpu"), Allocator.of("A100-80GB"), Allocator.of("device")
        (<Allocator.MALLOC: 'malloc'>, <Allocator.CUDA: 'CUDA caching allocator'>, None)
        """
        name = device.lower()
        if name.startswith("cpu"):
            return cls.MALLOC
        return cls.CUDA if any(word in name for word in _GPUS) else None


_SEGMENTS = {Allocator.MALLOC: 0.0, Allocator.CUDA: (20 + 2) * _MIB}
_LIBRARIES = {  # least and most bytes, alone and where the device speaks to others
    # Measured: the first step of a GPT on a CPU, in one process and in two that train.
    Allocator.MALLOC: ((0.0, 64e6), (0.0, 72e6)),
    # Context: github.com/pytorch/pytorch issues 107667 and 28113. NCCL: github.com/NVIDIA/nccl issue 964.
    Allocator.CUDA: ((300e6, 700e6), (300e6, 1400e6)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes beside tensors, from `low` to `high`.

    Arguments:
        low, high: of holes, segments and libraries together [bytes].

    Raises ValueError for what is no finite number of at least 0, and for a low end above the high one.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, number(f"kept: {each.name}", getattr(self, each.name)))
        if self.low > self.high:
            raise ValueError(f"kept: low={self.low}: expected at most high={self.high}")

    def beside(self, tensors: float) -> tuple[float, float]:
        """Least and most bytes of a device whose tensors take so many."""
        return tensors + self.low, tensors + self.high


def certain(device: str) -> float:
    """Least bytes that a device holds beside its tensors, whatever these are; 0 where nobody knows its allocator.

    >>> certain("A100-80GB"), certain("cpu")
    (300000000.0, 0.0)
    """
    allocator = Allocator.of(device)
    return 0.0 if allocator is None else min(least for least, _ in _LIBRARIES[allocator])


def coming_and_going(use: MemoryUse) -> float:
    """Bytes of tensors that are made and let go of in each step."""
    return use.gradients + use.activations + use.workspace + use.communication


def reserved(use: MemoryUse, *, allocator: Allocator, behind_batch: float = 0.0) -> Kept:
    """Holes and segments beside the tensors of a device; on CUDA, memory that is reserved and not allocated.

    Arguments:
        behind_batch: bytes of what comes and goes at another time than the peak, in other sizes, such as float32 copies
            of gradients that an optimizer makes [bytes].
    """
    return Kept(low=0.0, high=_HOLES * (coming_and_going(use) + behind_batch) + _SEGMENTS[allocator])


def kept(use: MemoryUse, *, allocator: Allocator, speaks: bool) -> Kept:
    """All that a device holds beside these tensors.

    Arguments:
        speaks: whether it exchanges messages with others.

    >>> use = MemoryUse(parameters=20e6, gradients=20e6, optimizer=40e6, activations=40e6)
    >>> kept(use, allocator=Allocator.MALLOC, speaks=False).beside(use.total)
    (120000000.0, 214000000.0)
    """
    least, most = _LIBRARIES[allocator][speaks]
    return Kept(low=least, high=reserved(use, allocator=allocator).high + most)

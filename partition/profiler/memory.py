"""Memory of a unit: kept from its forward to its backward, and taken for a while; what becomes of freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt(3)


@cache  # once per process
def keep_freed_memory() -> None:
    """Let malloc keep freed memory for the next batch, as torch's allocator does on CUDA. By default glibc returns free
    memory at the heap's end, so that each step pays for fresh pages: a fifth of the time of a CNN. Nothing changes
    where the environment configures malloc, or with another malloc."""
    if platform.libc_ver()[0] != "glibc" or any(n.startswith(("MALLOC_", "GLIBC_TUNABLES")) for n in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(_MMAP_THRESHOLD, 1 << 30) or mallopt(_MMAP_THRESHOLD, 1 << 25):  # newer ones accept 32 MiB at most
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


class Stash:
    """The bytes that autograd saves, by storage, each once: with the first that saves it. `apart`: tensors that are
    there in any case: parameters, buffers, the model's inputs. What an autograd.Function keeps as an attribute of its
    context, past `save_for_backward`, is not seen."""

    def __init__(self, apart: Iterable[torch.Tensor]) -> None:
        # The storages are held, so that no other one gets the address of one that was counted.
        self._known = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in apart}
        self._bytes = 0

    @contextmanager
    def counting(self) -> Iterator[Callable[[], int]]:
        """Within: yields a function that gives the bytes saved in this block [bytes]."""
        self._bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield lambda: self._bytes

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known[storage.data_ptr()] = storage
                self._bytes += storage.nbytes()
        return tensor


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Total size of tensors, without gaps and overlaps [bytes]."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Total size of the storages of tensors, each once [bytes]."""
    dense = [part for x in tensors for part in ((x._indices(), x._values()) if x.is_sparse else (x,))]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in dense}.values())


def peaks(actions: Sequence[Callable[[], object]], device: torch.device) -> list[tuple[int, int]]:
    """Run each; (the most that was allocated above what was there at its start, what stays) [bytes].

    CPU: from the allocator's events, by torch.profiler. CUDA: from the allocator's counters.
    """
    if device.type == "cuda":
        return _cuda_peaks(actions, device)
    with cpu_peaks() as (found, mark):
        for action in actions:
            with mark():
                kept = action()
            del kept
    return found


def _cuda_peaks(actions: Sequence[Callable[[], object]], device: torch.device) -> list[tuple[int, int]]:
    found = []
    for action in actions:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = action()
        torch.cuda.synchronize(device)
        peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        found.append((peak - before, after - before))
        del kept
    return found


_MARK = "stagewright action"


@contextmanager
def _mark() -> Iterator[None]:
    torch._C._autograd._enable_record_function(True)
    with record_function(_MARK):
        torch._C._autograd._enable_record_function(False)
        yield


@contextmanager
def cpu_peaks() -> Iterator[tuple[list[tuple[int, int]], Callable[[], AbstractContextManager[None]]]]:
    """Within, each `with` of the second is looked at; afterwards, the first has what `peaks` says of them, in order."""
    found: list[tuple[int, int]] = []
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        torch._C._autograd._enable_record_function(False)  # gloo's work may end after the profiler, and write to it
        try:
            yield found, _mark
        finally:
            torch._C._autograd._enable_record_function(True)
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = recorded.profiler.kineto_results.events()
    changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])  # stable: those of one moment stay in order
    for begin, end in sorted((each.start_ns(), each.end_ns()) for each in events if each.name() == _MARK):
        levels = [0, *accumulate(change for moment, change in changes if begin <= moment <= end)]
        found.append((max(levels), levels[-1]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Kineto says on the process's standard error that it begins and ends (torch 2.13), past any setting."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: counts, in this thread and in the backwards that it runs. `known`: tensors that are there before and may
    be let go of within."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # what is there above what was there at the start [bytes], which `settle` brings up to date; its highest so far
        self.level = self.most = 0
        # by `_cdata` each storage, its bytes and a label: "" of what was there, None of others until they get one
        self.alive: dict[int, list[Any]] = {}
        self.at_most: dict[int, list[Any]] = {}  # the same when the level was highest
        for tensor in known:
            self._note(tensor, is_new=False, is_known=True)

    def settle(self) -> None:
        """Take off what has been let go of."""
        for key in [key for key, (storage, *_) in self.alive.items() if storage.expired()]:
            self.level -= self.alive.pop(key)[1]

    def made(self) -> dict[int, list[Any]]:
        """Storages that were made within and are there, by address, with its size [bytes]: each a list of its own."""
        self.settle()
        return {key: one for key, one in self.alive.items() if one[2] is None}

    def _note(self, tensor: torch.Tensor, *, is_new: bool, is_known: bool = False) -> None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A weak reference keeps the address from being used again; what cannot be resized is not of torch's memory.
        if key in self.alive or not (is_known or storage.resizable()):
            return
        size = storage.nbytes()
        self.alive[key] = [StorageWeakRef(storage), size, None if is_new else ""]  # type: ignore[no-untyped-call]
        self.level += size * is_new
        if is_new and self.level > self.most:
            self.settle()
            if self.level > self.most:
                self.most, self.at_most = self.level, self.alive.copy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, is_new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, is_new=True)
        return result


def give_back(device: torch.device) -> None:
    """Give what is free by now back to the system; the C library and torch would keep it for themselves."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError, TypeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def device_memory(device: torch.device, *, sharing: int = 1) -> float:
    """Bytes of a device; of a host's memory the share of one of so many ranks."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / sharing)
